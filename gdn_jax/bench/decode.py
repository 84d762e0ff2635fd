"""Decoding with a whole model: greedy steps in one program, the same by `Decoder.generate`, and where time goes."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.bench import models, operands
from gdn_jax.bench.compile_cache import CacheWatch
from gdn_jax.bench.naming import implementation_of
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Effort, Step, Timing, kernels_for, measure, program, sample, touch
from gdn_jax.decoder.attention import Cache, attention_step
from gdn_jax.decoder.block import Settings
from gdn_jax.decoder.decoder import Decoder
from gdn_jax.decoder.mlp import mlp_step
from gdn_jax.decoder.model import decode_step, logits_of
from gdn_jax.decoder.moe import moe_step
from gdn_jax.layer import step as gdn_step

__all__ = ["run"]

_CHUNK = 16
"""Tokens that `generate` draws in one dispatch, its default."""


class Part(NamedTuple):
    """A kind of layer alone: `advance(carry, layer, weights)`, how many there are, and the bytes that one must move."""

    advance: Callable[[Any, jax.Array, Any], Any]
    carry: Any
    weights: Any
    layers: int
    nbytes: int


def run(request: Request) -> Iterator[Row]:
    """For every batch and precision the step, and `generate`; then, for each, the parts of a step.

    Raises:
        ValueError: the context has no room for the tokens.
    """
    cfg = models.require_decoder(request)
    if request.context < request.tokens + 2:
        raise ValueError(
            f"--context must be at least {request.tokens + 2} for --tokens {request.tokens}, got {request.context}"
        )
    weights = models.decoder_weights(1, cfg, request.tier)
    cases = [(batch, precision) for batch in request.batches for precision in request.precisions]
    steps = {}
    for batch, precision in cases:
        steps[batch, precision] = step = _whole(weights, batch, precision, request)
        yield step
        if step.timing and request.parts:
            yield _generated(weights, step, request)
    if request.parts:
        for step in steps.values():
            if step.timing:
                yield from _parts_of(weights, step, request)


def _logits(weights: Any, state: Any, tokens: jax.Array, **named: Any) -> jax.Array:
    """Logits [T, B, vocab] of tokens [B, T], step by step: what the gate looks at."""

    def body(state, now):
        logits, state = decode_step(weights, state, now, **named)
        return state, logits

    return jax.lax.scan(body, state, tokens.T)[1]


def _greedy(request: Request, precision: str) -> Step:
    """One greedy step on the carry (state, ids), the loop's counter being the token's number.

    The last tokens that the context has room for, so that attention has all of it to look at.
    """
    first = request.context - request.tokens

    def advance(carry, number, weights):
        state, ids = carry
        state = state.replace(position=jnp.full_like(state.position, first) + number)
        logits, state = decode_step(weights, state, ids, **models.named(request, precision))
        return state, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return Step(advance)


def _whole(weights: Any, batch: int, precision: str, request: Request) -> Row:
    cfg, tokens = models.require_decoder(request), request.tokens
    verdict = models.judged(_logits, batch, precision, request)
    step = _greedy(request, precision)._replace(operands=weights)
    carry = (models.new_state(request, batch), jnp.asarray(models.prompt(cfg, batch, 1)[:, 0]))
    used = implementation_of(step, carry)
    timing, details, note = None, {}, "not timed: wrong result"
    if verdict.passed:
        loop = program(step, tokens, tokens, dataclasses.replace(request.effort, unroll=1))
        compiled = models.compiled(loop, carry, weights)
        details = models.memory_details(compiled, batch, request)
        seconds = sample({"step": lambda carry: compiled.run(carry, weights)}, carry, request.effort)["step"]
        timing = Timing.between(seconds / tokens, np.zeros_like(seconds), tokens)
        details |= _speed(timing, batch) | compiled.details
        note = f"{_speed_note(timing, batch)}, {compiled.note}"
    return Row(
        subject="decode",
        case=f"{request.geometry} step",
        batch=batch,
        implementation=used,
        precision=precision,
        nbytes=models.moved(request, batch),
        max_rel=verdict.max_rel,
        bound=verdict.bound,
        timing=timing,
        note=note,
        details=models.settings(request) | {"gate_implementation": verdict.implementation} | details,
    )


def _generated(weights: Any, step: Row, request: Request) -> Row:
    """The same tokens as a user gets them: `Decoder.generate`, with drawing, blocks to the host and the host's loop."""
    cfg, batch = models.require_decoder(request), step.batch
    decoder = Decoder(
        cfg=cfg,
        weights=weights,
        capacity=request.context,
        kv_dtype=request.kv_dtype,
        precision=step.precision,
        implementation=request.implementation,
    )
    chunk = min(_CHUNK, request.tokens)
    drawn = request.tokens - request.tokens % chunk  # whole blocks: the last one runs to its end in any case
    prompts = models.prompt(cfg, batch, 1).tolist()

    def timings() -> Any:
        return decoder.generate(prompts, max_new_tokens=1 + drawn, ignore_eos=True, chunk=chunk).timings

    with CacheWatch() as watch:
        first = timings()
    seconds = np.array([timings().decode_seconds for _ in range(request.effort.rounds)])
    timing = Timing.between(seconds / drawn, np.zeros_like(seconds), drawn)
    return dataclasses.replace(
        step,
        case=f"{request.geometry} generate",
        max_rel=None,
        bound=None,
        timing=timing,
        note=_speed_note(timing, batch),
        details=models.settings(request)
        | _speed(timing, batch)
        | {"compile_seconds": first.compile_seconds, "compile_cache": watch.answer, "chunk": chunk},
    )


def _parts_of(weights: Any, step: Row, request: Request) -> Iterator[Row]:
    """Each part alone, over all layers of its kind; then what is left of the step."""
    assert step.timing is not None
    rest, rest_nbytes = step.timing.us, step.nbytes
    for name, part in _parts(weights, step.batch, step.precision, request).items():
        timing = _timed(part, request.effort)
        rest -= part.layers * timing.us
        rest_nbytes -= part.layers * part.nbytes
        yield _part_row(name, step, timing, part.layers, part.nbytes, request)
    timing = Timing(rest, rest, rest, rest, step.timing.kernels, step.timing.rounds)
    yield _part_row("rest", step, timing, 1, max(rest_nbytes, 0), request)


def _part_row(name: str, step: Row, timing: Timing, count: int, nbytes: int, request: Request) -> Row:
    assert step.timing is not None
    in_step = count * timing.us
    share = in_step / step.timing.us
    return dataclasses.replace(
        step,
        case=f"{request.geometry} {name}",
        nbytes=nbytes,
        max_rel=None,
        bound=None,
        timing=timing,
        note=f"{count} of them: {in_step / 1e3:.3f} ms, {share:.0%} of the step",
        details=models.settings(request) | {"layers": count, "ms_per_step": in_step / 1e3, "share": share},
    )


def _timed(part: Part, effort: Effort) -> Timing:
    def glue(carry, *_):
        x, rest = carry
        return touch(x, x), rest

    kernels = kernels_for(part.nbytes, effort)
    steps = {"glue": Step(glue, part.weights), "part": Step(part.advance, part.weights)}
    samples = measure(steps, part.carry, layers=part.layers, kernels=kernels, effort=effort)
    return Timing.between(samples["part"], samples["glue"], kernels)


def _parts(weights: Any, batch: int, precision: str, request: Request) -> dict[str, Part]:
    """The mixers and MLPs that the model has, and its head. Each takes a plain x, and splits it into limbs itself."""
    cfg = models.require_decoder(request)
    how = {"precision": precision, "implementation": request.implementation}
    state = models.new_state(request, batch)
    position = jnp.full((batch,), request.context - 1, jnp.int32)
    writes = jnp.ones((batch,), bool)
    parts = {}

    def add(name, advance, held, of, count, moved):
        carry = (operands.activations(3, (batch, cfg.hidden)), held)
        parts[name] = Part(advance, carry, of, count, (operands.nbytes(of) + moved) // count)

    def gdn(carry, layer, w):
        x, held = carry
        y, held = gdn_step(w, held, x, cfg=cfg.gdn, layer=layer, active=writes, **how)
        return touch(x, y), held

    def attention(carry, layer, w):
        x, held = carry
        y, held = attention_step(w, held, x, position, writes, cfg=cfg, layer=layer, **how)
        return touch(x, y), held

    def mlp(carry, layer, w):
        x, held = carry
        return touch(x, mlp_step(w, x, layer=layer, **how)), held

    def experts(carry, layer, w):
        x, held = carry
        assert cfg.moe is not None
        return touch(x, moe_step(w, x, cfg=cfg.moe, layer=layer, **how)), held

    def head(carry, _, w):
        x, held = carry
        return touch(x, logits_of(w, x, Settings(cfg, **how))), held

    if cfg.gdn is not None:
        count = cfg.count("linear_attention")
        add("gdn", gdn, state.gdn, weights.gdn, count, 2 * operands.nbytes(state.gdn))
    if cfg.count("full_attention"):
        cache = Cache(state.keys, state.values)
        add("attention", attention, cache, weights.attention, cfg.count("full_attention"), operands.nbytes(cache))
    if cfg.count("dense"):
        add("mlp", mlp, (), weights.mlp, cfg.count("dense"), 0)
    if cfg.moe is not None:
        idle = cfg.moe.experts - min(batch * cfg.moe.experts_per_token, cfg.moe.experts)
        unread = operands.nbytes(weights.moe.experts) * idle // cfg.moe.experts
        add("experts", experts, (), weights.moe, cfg.count("moe"), -unread)
    # Only what the head reads: an operand counts as read.
    read = "embed" if weights.head is None else "head"
    add("head", head, (), weights.replace(**{name: None for name in vars(weights) if name != read}), 1, 0)
    return parts


def _speed(timing: Timing, batch: int) -> dict[str, float]:
    ms = timing.us / 1e3
    return {"tok_per_s": 1e3 * batch / ms, "ms_per_step": ms, "ms_per_token": ms / batch}


def _speed_note(timing: Timing, batch: int) -> str:
    speed = _speed(timing, batch)
    return f"{speed['tok_per_s']:,.1f} tok/s, {speed['ms_per_step']:.3f} ms per step"
