"""The causal depthwise convolution, one token at a time, over an explicit history."""

import functools
import operator
import typing

import jax
import jax.numpy as jnp

from gdn_jax.axes import Array, Float32
from gdn_jax.require import require_array

__all__ = ["conv_step", "history_from_window"]


def conv_step(
    history: Float32[Array, "B P C"], x: Float32[Array, "B C"], weight: Float32[Array, "C W"]
) -> tuple[Float32[Array, "B C"], Float32[Array, "B P C"]]:
    """silu(sum_j weight[c, j] · window[j, c]), window = [history, x], oldest first; no flip, no bias.

    The products are added in the order of the window. Returns the activations and the next history, which is the
    window without its oldest frame: the convolution's inputs, before convolution and SiLU. W = 1 has no history.
    """
    window = jnp.concatenate([history, x[:, None, :]], axis=1)
    taps = [window[:, j] * weight[None, :, j] for j in range(weight.shape[1])]
    return jax.nn.silu(functools.reduce(operator.add, taps)), window[:, 1:]


@typing.no_type_check
def history_from_window(frames: Array, *, layout: str, conv_width: int) -> Array:
    """Convert another system's convolution cache into this library's history, [B, W-1, C], oldest frame first.

    `layout` names how the cache is stored: `"BCW"` and `"BWC"` hold W frames, of which the oldest is never read again
    and is dropped; `"BC(W-1)"` and `"B(W-1)C"` hold W-1. In all of them the newest frame is last. The tag is explicit
    because the shapes alone do not tell.

    Raises:
        TypeError: `frames` is not a float32 array. ValueError: an unknown layout, a width below 1, or a number of
        frames that the layout does not have.
    """
    require_array("frames", frames, "float32")
    if isinstance(conv_width, bool) or not isinstance(conv_width, int) or conv_width < 1:
        raise ValueError(f"conv_width must be an integer of at least 1, got {conv_width!r}")
    layouts = {"BCW": (True, 0), "BWC": (False, 0), "BC(W-1)": (True, 1), "B(W-1)C": (False, 1)}
    if layout not in layouts:
        raise ValueError(f"layout must be one of {', '.join(layouts)}, got {layout!r}")
    channels_first, missing = layouts[layout]
    if frames.ndim != 3:
        raise ValueError(f"a convolution cache has 3 axes ({layout}), got shape {frames.shape}")
    frames = jnp.swapaxes(frames, 1, 2) if channels_first else frames
    if frames.shape[1] != conv_width - missing:
        raise ValueError(
            f"layout {layout} with conv_width={conv_width} holds {conv_width - missing} frames, got {frames.shape[1]}"
        )
    return frames[:, 1 - missing :]
