"""What this machine offers: versions, devices, and whether a GPU is present that JAX does not use."""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import jax

__all__ = ["describe", "gpu_is_present", "make_reproducible", "warnings"]

_REPRODUCIBLE = "--xla_gpu_deterministic_ops=true"

_PACKAGES = ("gdn-jax", "jax", "jaxlib", "flax", "chex", "orbax-checkpoint", "numpy", "safetensors", "gguf")


def describe() -> dict[str, Any]:
    """Versions and devices as one JSON-ready mapping."""
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "packages": {name: _version(name) for name in _PACKAGES},
        "backend": jax.default_backend(),
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()],
    }


def make_reproducible() -> None:
    """Ask XLA for the same code whenever it compiles the same stage; to be called before a backend is used.

    On a GPU, XLA times several versions of a fusion and keeps the fastest, which may be another one in the next
    program, with sums in another order. The flag takes the choice away from the clock.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_gpu_deterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_REPRODUCIBLE}".strip()


def gpu_is_present() -> bool:
    """Whether the operating system shows an NVIDIA card, asked without JAX."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def warnings() -> list[str]:
    """What a user should know before trusting a result or a time from here."""
    found = []
    if gpu_is_present() and jax.default_backend() == "cpu":
        found.append(
            "an NVIDIA GPU is present, but JAX sees only the CPU: install the CUDA plugin (extra cuda12 or cuda13) and "
            "leave JAX_PLATFORMS unset"
        )
    import checkpoints

    if Path(checkpoints.__file__).parent.parent != Path(__file__).parent.parent:
        found.append(f"the imported package 'checkpoints' is not this project's: {checkpoints.__file__}")
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
