"""The layer with named taps: what `step` computes, and every intermediate beside it."""

import typing

from gdn_jax.axes import Array
from gdn_jax.border import Weights, check_active, check_request
from gdn_jax.config import GdnConfig
from gdn_jax.require import require_config
from gdn_jax.slot import run_on_slot
from gdn_jax.state import GdnState

__all__ = ["TAPS", "tap_shapes", "trace"]

TAPS = {
    "XC": "xc",
    "XCV": "xcv",
    "Z": "z",
    "Q": "q",
    "K": "k",
    "A": "a",
    "B": "b",
    "BETA": "beta",
    "G": "g",
    "ON": "on",
    "ONN": "onn",
    "OUT": "out",
    "S": "s",
    "HIST": "history",
}
"""Tap name -> field of `Stages`."""


@typing.no_type_check
def tap_shapes(cfg: GdnConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tap without its batch axis, known without computing anything.

    XC, XCV [C]; Z, ON, ONN [H, V]; Q, K [G, K]; A, B, BETA, G [H]; OUT [D]; S [H, K, V]; HIST [W-1, C].
    """
    require_config(cfg)
    value, key, heads = (cfg.value_heads, cfg.value_dim), (cfg.key_heads, cfg.key_dim), (cfg.value_heads,)
    channels = (cfg.conv_channels,)
    return {
        **dict.fromkeys(("XC", "XCV"), channels),
        "Z": value,
        **dict.fromkeys(("Q", "K"), key),
        **dict.fromkeys(("A", "B", "BETA", "G"), heads),
        **dict.fromkeys(("ON", "ONN"), value),
        "OUT": (cfg.hidden,),
        "S": (cfg.value_heads, cfg.key_dim, cfg.value_dim),
        "HIST": (cfg.conv_width - 1, cfg.conv_channels),
    }


@typing.no_type_check
def trace(
    w: Weights,
    state: GdnState,
    x: Array,
    *,
    cfg: GdnConfig,
    layer=0,
    active=None,
    precision: str = "exact",
    implementation: str | None = None,
) -> tuple[Array, GdnState, dict[str, Array]]:
    """One `step` that also returns its intermediates: x [B, D] -> y [B, D], the next state, taps by name [B, …].

    XC: conv input; XCV: after conv and SiLU; Z: output gate; Q (normalised, times K^-1/2) and K (normalised), per key
    head; A, B: raw gates; BETA; G: log decay; ON: delta output; ONN: after the gated norm; OUT: y; S and HIST: the
    layer's state after the token. Shapes: `tap_shapes`. Jitted at one batch shape, y and state equal those of `step`
    bitwise. For an inactive row OUT is 0, S and HIST are the untouched state, and the other taps mean nothing.

    Arguments and errors as for `step`.
    """
    check_request(w, state, x, "B D", cfg, layer, precision, implementation)
    active = check_active(active, (state.batch,))

    def one(slot, x, active):
        carry, stages = slot.advance(slot.carry, x, active)
        return slot.finish(carry, {tap: getattr(stages, field) for tap, field in TAPS.items()})

    taps, state = run_on_slot(one, w, state, (x, active), cfg, layer, precision, implementation, keep=True)
    return taps["OUT"], state, taps
