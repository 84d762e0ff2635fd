"""The device that a program is compiled for, as far as kernels care."""

import jax

__all__ = ["device_kind", "gpu_objection", "tensor_core_objection"]

_HOPPER = ("H100", "H200", "H800", "H20", "GH200")


def device_kind() -> str:
    """Its kind, as tuning tables name it."""
    return _device()[1]


def gpu_objection() -> str | None:
    """None where it is a GPU that the kernels are compiled for, else why not."""
    platform, kind, capability = _device()
    if platform not in ("gpu", "cuda") or not kind.startswith(("NVIDIA", "Tesla")):
        return f"the kernel needs an NVIDIA GPU, and the device here is {kind!r} ({platform})"
    if capability is not None and float(capability) < 8:
        return f"the kernel needs compute capability 8.0 or newer, and {kind!r} has {capability}"
    return None


def tensor_core_objection() -> str | None:
    """None where it is a Hopper GPU, whose copy engine and matrix units Mosaic programs, else why not."""
    if reason := gpu_objection():
        return reason
    _, kind, capability = _device()
    hopper = float(capability) == 9 if capability is not None else any(name in kind for name in _HOPPER)
    return None if hopper else f"the tensor core form needs compute capability 9.0 (Hopper), and {kind!r} has another"


def _device() -> tuple[str, str, str | None]:
    """Platform, kind and compute capability (None if unknown) of the device that is compiled for."""
    # A mesh of described devices stands for a GPU that need not be here.
    if described := jax.sharding.get_abstract_mesh().abstract_device:
        return described.platform, described.device_kind, None
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return device.platform, device.device_kind, getattr(device, "compute_capability", None)
