"""The layers of a decoder in order: norm, mixer, residual; norm, MLP, residual.

The layers repeat with a period (three GDN layers and one of full attention, say). One period is compiled, and a loop on
the device runs it over and over. The state is in the loop's carry, so that it is updated in place; the weights are not
among what it walks over, which would copy them, but are read at a layer's number.
"""

import functools
from typing import Any, NamedTuple

import jax

from gdn_jax.axes import Array, Bool, Int32
from gdn_jax.decoder.attention import Cache, attention_step
from gdn_jax.decoder.config import DecoderConfig, LayerPlan
from gdn_jax.decoder.mlp import mlp_step
from gdn_jax.decoder.moe import moe_step
from gdn_jax.layer import unchecked_step
from gdn_jax.ops import add_and_norm, dense

__all__ = ["Flow", "Place", "Settings", "block_step", "blocks"]


class Flow(NamedTuple):
    """What goes from layer to layer: the residual stream [B, D], what is still to be added to it, and all the state."""

    x: Array
    y: Array
    """Of the part before: the sum is made where the next norm reads it."""
    gdn: Any
    """`GdnState`, or None where the model has no GDN layers."""
    cache: Cache


class Place(NamedTuple):
    """Where a layer's weights and state are: its own number, and those of its mixer and MLP among their kind."""

    layer: Int32[Array, ""]
    mixer: Int32[Array, ""]
    mlp: Int32[Array, ""]


class Settings(NamedTuple):
    """What all layers share, and a program is compiled for."""

    cfg: DecoderConfig
    precision: str
    implementation: str | None


def blocks(weights: Any, flow: Flow, position: Int32[Array, "B"], writes: Bool[Array, "B"], settings: Settings) -> Flow:
    """Carry one token through all layers.

    Rows where `writes` is false leave the state as it is, and their x means nothing.
    """
    cfg = settings.cfg
    period = cfg.plan()[: cfg.period]
    repeats = cfg.layers // cfg.period

    def body(repeat, flow):
        for offset, plan in enumerate(period):
            # The parts of a kind are counted through: so many in the periods before, and then those of this one.
            place = Place(
                layer=repeat * cfg.period + offset,
                mixer=repeat * (cfg.count(plan.mixer) // repeats) + plan.mixer_ordinal,
                mlp=repeat * (cfg.count(plan.mlp) // repeats) + plan.mlp_ordinal,
            )
            flow = block_step(weights, flow, position, writes, plan, place, settings)
        return flow

    return jax.lax.fori_loop(0, repeats, body, flow)


def block_step(
    weights: Any,
    flow: Flow,
    position: Int32[Array, "B"],
    writes: Bool[Array, "B"],
    plan: LayerPlan,
    place: Place,
    settings: Settings,
) -> Flow:
    """Carry one token through the layer at `place`, whose parts are of the kinds that `plan` says."""
    cfg = settings.cfg
    x, y, memory, cache = flow
    how = {"precision": settings.precision, "implementation": settings.implementation}
    norm = functools.partial(add_and_norm, layer=place.layer, eps=cfg.norm_eps, **how)
    with jax.named_scope(plan.mixer):
        if plan.mixer == "linear_attention" and cfg.gdn is not None:
            large = weights.gdn.layers.large
            x, h = norm(x, y, weights.input_norm, consumers=(large.qkv, large.z))
            y, memory = unchecked_step(weights.gdn, memory, h, cfg.gdn, place.mixer, writes, *how.values())
        else:
            w = weights.attention
            x, h = norm(x, y, weights.input_norm, consumers=(w.q, w.k, w.v))
            y, cache = attention_step(w, cache, h, position, writes, layer=place.mixer, cfg=cfg, **how)
    with jax.named_scope(plan.mlp):
        moe = cfg.moe if plan.mlp == "moe" else None
        consumers = (weights.mlp.gate, weights.mlp.up) if moe is None else ()
        x, h = norm(x, y, weights.post_norm, consumers=consumers)
        if moe is None:
            y = mlp_step(weights.mlp, h, layer=place.mlp, **how)
        else:
            y = moe_step(weights.moe, dense(h), cfg=moe, layer=place.mlp, **how)
    return Flow(x, y, memory, cache)
