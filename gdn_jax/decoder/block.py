"""The layers of a decoder in order: norm, mixer, residual; norm, MLP, residual.

The layers repeat with a period (three GDN layers and one of full attention, say). One period is compiled, and a loop on
the device runs it over and over. The state is in the loop's carry, so that it is updated in place; the weights are not
among what it walks over, which would copy them, but are read at a layer's number.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from gdn_jax.axes import Array, Bool, Int32
from gdn_jax.config import GdnConfig
from gdn_jax.decoder.attention import Cache, attention_step
from gdn_jax.decoder.config import DecoderConfig, LayerPlan
from gdn_jax.decoder.mlp import mlp_step
from gdn_jax.decoder.moe import moe_step
from gdn_jax.ops import add_and_norm, dense

__all__ = ["Flow", "Mixer", "Place", "Settings", "block_step", "blocks"]

type Mixer = Callable[[Any, Any, GdnConfig, Int32[Array, ""]], tuple[Array, Any]]
"""(memory, input, the layers' configuration, the layer's number among them) -> output, memory."""


class Flow(NamedTuple):
    """What goes from layer to layer: the residual stream, a row a token, what is to be added to it, and the state."""

    x: Array
    y: Array
    """From the part before: the sum is made where the next norm reads it."""
    gdn: Any
    """What GDN layers carry: `GdnState` in a step; None where the model has none."""
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


def blocks(
    flow: Flow, cfg: DecoderConfig, block: Callable[[Flow, LayerPlan, Place], Flow], *, loop_alike: bool = False
) -> Flow:
    """Carry `flow` through all layers, each of which is `block(flow, plan, place)`; of the plan its kinds count alone.

    With `loop_alike`, neighbours of the same kinds are compiled once and looped over too: less to compile, for a few
    microseconds of a loop per layer.
    """
    period = cfg.plan()[: cfg.period]
    repeats = cfg.layers // cfg.period
    kinds = [(plan.mixer, plan.mlp) if loop_alike else index for index, plan in enumerate(period)]
    runs = [len(list(alike)) for _, alike in itertools.groupby(kinds)]

    def layer(repeat, offset, within, flow):
        # The parts of a kind are counted through: so many in the periods before, and then those of this one.
        plan = period[offset]
        place = Place(
            layer=repeat * cfg.period + offset + within,
            mixer=repeat * (cfg.count(plan.mixer) // repeats) + plan.mixer_ordinal + within,
            mlp=repeat * (cfg.count(plan.mlp) // repeats) + plan.mlp_ordinal + within,
        )
        return block(flow, plan, place)

    def body(repeat, flow):
        for offset, length in zip(itertools.accumulate(runs, initial=0), runs, strict=False):
            run = functools.partial(layer, repeat, offset)
            flow = run(0, flow) if length == 1 else jax.lax.fori_loop(0, length, run, flow)
        return flow

    return jax.lax.fori_loop(0, repeats, body, flow)


def block_step(
    weights: Any,
    flow: Flow,
    position: Int32[Array, "M"],
    writes: Bool[Array, "M"],
    plan: LayerPlan,
    place: Place,
    settings: Settings,
    gdn_step: Mixer,
) -> Flow:
    """Carry the rows of `flow` through the layer at `place`, whose parts are of the kinds that `plan` says.

    A row is one token, with its own `position` and `writes`; where `writes` is false it leaves the state as it is, and
    its x means nothing. `gdn_step` is what GDN layers do.
    """
    cfg = settings.cfg
    x, y, memory, cache = flow
    how = {"precision": settings.precision, "implementation": settings.implementation}
    norm = functools.partial(add_and_norm, layer=place.layer, eps=cfg.norm_eps, **how)
    with jax.named_scope(plan.mixer):
        if plan.mixer == "linear_attention" and cfg.gdn is not None:
            large = weights.gdn.layers.large
            x, h = norm(x, y, weights.input_norm, consumers=(large.qkv, large.z))
            y, memory = gdn_step(memory, h, cfg.gdn, place.mixer)
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
