"""The layers of a decoder in order: norm, mixer, residual; norm, MLP, residual.

The layers repeat with a period (three GDN layers and one of full attention, say). One period is compiled, and a loop on
the device runs it over and over. The state is in the loop's carry, so that it is updated in place; the weights are not
among what it walks over, which would copy them, but are read at a layer's number.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
    firsts = list(itertools.accumulate(runs[:-1], initial=0))
    counts = [_counts(cfg, first, period[first], repeats) for first in firsts]

    def layer(plan, start, within, flow):
        return block(flow, plan, Place._make(number + within for number in start))

    def body(repeat, flow):
        numbers = _numbers(sorted({count for of_run in counts for count in of_run}), repeat, repeats)
        for first, length, of_run in zip(firsts, runs, counts, strict=True):
            run = functools.partial(layer, period[first], [numbers[count] for count in of_run])
            flow = run(0, flow) if length == 1 else jax.lax.fori_loop(0, length, run, flow)
        return flow

    return jax.lax.fori_loop(0, repeats, body, flow)


class _Count(NamedTuple):
    """The parts of a kind are counted through: so many in each of the periods before, and then those of this one."""

    here: int
    each: int


def _counts(cfg: DecoderConfig, first: int, plan: LayerPlan, repeats: int) -> tuple[_Count, _Count, _Count]:
    """Those behind the `Place` of the layer that is `first` in every period."""
    mixer = _Count(plan.mixer_ordinal, cfg.count(plan.mixer) // repeats)
    mlp = _Count(plan.mlp_ordinal, cfg.count(plan.mlp) // repeats)
    return _Count(first, cfg.period), mixer, mlp


def _numbers(counts: Sequence[_Count], repeat: Array, repeats: int) -> dict[_Count, Int32[Array, ""]]:
    """`each * repeat + here` of all counts in one launch.

    Computed one by one they would be a kernel each, of a microsecond, in every turn of the loop. A sum with many
    results is one kernel: over all turns, of which all but this one are nothing.
    """
    turns = jnp.arange(repeats, dtype=jnp.int32)
    terms = [jnp.where(turns == repeat, count.each * turns + count.here, 0) for count in counts]
    zeros = [jnp.int32(0)] * len(counts)
    sums = jax.lax.reduce(terms, zeros, lambda xs, ys: [x + y for x, y in zip(xs, ys, strict=True)], (0,))
    return dict(zip(counts, sums, strict=True))


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
