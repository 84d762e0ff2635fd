"""What looking at drafted tokens costs a whole model, what taking them costs, and what becomes of it end to end."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax.bench import models, operands
from gdn_jax.bench.naming import implementation_of
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Step, Timing, program, sample
from gdn_jax.decoder.decoder import Decoder
from gdn_jax.decoder.model import decode_step
from gdn_jax.decoder.script import ScriptDrafter
from gdn_jax.decoder.speculate import Drafting
from gdn_jax.decoder.window import commit_window, verify_window
from gdn_jax.state_value import restore, snapshot

__all__ = ["run"]

_TURNS = 16
"""Calls in one program."""
_NEW_TOKENS = 256
_PROMPT = 4


def run(request: Request) -> Iterator[Row]:
    """A step; windows of every length, alone and with their commit; copies of the state; generation with drafts.

    Raises:
        ValueError: the context has no room for the windows, or a window has one token only.
    """
    cfg = models.require_decoder(request)
    longest = max(request.lengths)
    if request.context < longest + _PROMPT + 2 or min(request.lengths) < 2:
        raise ValueError(
            f"--tokens must be windows of at least 2 tokens, and --context at least {longest + _PROMPT + 2} for them, "
            f"got {','.join(map(str, request.lengths))} and {request.context}"
        )
    weights = models.decoder_weights(1, cfg, request.tier)
    for batch in request.batches:
        for precision in request.precisions:
            yield from _all(weights, batch, precision, request)
        yield _copies(batch, request)


def _logits(weights: Any, state: Any, tokens: jax.Array, **named: Any) -> jax.Array:
    """Logits [B, T, vocab] of tokens [B, T] that are looked at: what the gate sees."""
    return verify_window(weights, state, tokens, **named)[0]


def _all(weights: Any, batch: int, precision: str, request: Request) -> Iterator[Row]:
    cfg = models.require_decoder(request)
    named = models.named(request, precision)
    verdict = models.judged(_logits, batch, precision, request)
    steps: dict[str, tuple[Step, int]] = {"step": (Step(functools.partial(_step, named), weights), 1)}
    for tokens in request.lengths:
        steps[f"verify {tokens}"] = (Step(functools.partial(_verify, named), weights), tokens)
        steps[f"verify {tokens}, commit"] = (Step(functools.partial(_round, named), weights), tokens)
    once = None
    for name, (step, tokens) in steps.items():
        ids = jnp.asarray(models.prompt(cfg, batch, tokens))
        row = _timed(name, step, (models.new_state(request, batch), ids), verdict, batch, precision, request)
        once = once or row.timing
        if row.timing and once:
            ratio = row.timing.us / once.us
            row = dataclasses.replace(
                row,
                note=f"{row.timing.us / 1e3:.3f} ms, {ratio:.2f} of a step; {row.note}",
                details=row.details | {"of_a_step": ratio, "window": tokens},
            )
        yield row
    if verdict.passed:
        yield from _generated(weights, batch, precision, request)


def _step(named: Any, carry: Any, _: Any, weights: Any) -> Any:
    state, ids = carry
    logits, after = decode_step(weights, state, ids[:, 0], **named)
    # It begins anew where it began, so that attention sees as much each time.
    return dataclasses.replace(after, position=state.position), jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None]


def _verify(named: Any, carry: Any, _: Any, weights: Any) -> Any:
    state, ids = carry
    logits, state, window = verify_window(weights, state, ids, **named)
    # The window must be made, or what nobody asks for would not be.
    logits, _ = lax.optimization_barrier((logits, window))
    return state, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _round(named: Any, carry: Any, _: Any, weights: Any) -> Any:
    state, ids = carry
    logits, after, window = verify_window(weights, state, ids, **named)
    how = {name: named[name] for name in ("cfg", "implementation")}
    after = commit_window(weights, after, window, jnp.full((state.batch,), ids.shape[1], jnp.int32), **how)
    return dataclasses.replace(after, position=state.position), jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _timed(
    name: str, step: Step, carry: Any, verdict: models.Verdict, batch: int, precision: str, request: Request
) -> Row:
    state, ids = carry
    first = request.context - ids.shape[1] - 1
    carry = (state.replace(position=jnp.full_like(state.position, first)), ids)
    used = implementation_of(step, carry)
    timing, details, note = None, {}, "not timed: wrong result"
    if verdict.passed:
        turns = min(_TURNS, request.effort.kernels)
        loop = program(step, turns, turns, dataclasses.replace(request.effort, unroll=1))
        compiled = models.compiled(loop, carry, step.operands)
        seconds = sample({name: lambda carry: compiled.run(carry, step.operands)}, carry, request.effort)[name]
        timing = Timing.between(seconds / turns, np.zeros_like(seconds), turns)
        details, note = compiled.details | {"temp_bytes": compiled.temp}, compiled.note
    return Row(
        subject="speculation",
        case=f"{request.geometry} {name}",
        batch=batch,
        implementation=used,
        precision=precision,
        nbytes=models.moved(request, batch),
        max_rel=verdict.max_rel,
        bound=verdict.bound,
        timing=timing,
        note=note,
        details=_settings(request) | {"gate_implementation": verdict.implementation} | details,
    )


def _generated(weights: Any, batch: int, precision: str, request: Request) -> Iterator[Row]:
    """`Decoder.generate` without drafts, and with those of a script of which half the places, by chance, are right.

    Of every window one token is the pending one, all others are drafts.
    """
    cfg = models.require_decoder(request)
    model = Decoder(
        cfg=cfg,
        weights=weights,
        capacity=request.context,
        kv_dtype=request.kv_dtype,
        precision=precision,
        implementation=request.implementation,
    )
    prompts = models.prompt(cfg, batch, _PROMPT)
    new = min(_NEW_TOKENS, request.context - _PROMPT)

    def answers(draft: Drafting | None) -> Any:
        results = [
            model.generate(prompts.tolist(), max_new_tokens=new, ignore_eos=True, draft=draft)
            for _ in range(1 + min(3, request.effort.rounds))
        ]
        seconds = np.array([result.timings.decode_seconds for result in results[1:]])
        return results[0], Timing.between(seconds / (new - 1), np.zeros_like(seconds), new - 1)

    def row(name: str, timing: Timing, note: str, details: dict[str, Any], *, same: bool) -> Row:
        rate = batch * 1e6 / timing.us
        return Row(
            subject="speculation",
            case=f"{request.geometry} {name}",
            batch=batch,
            implementation=request.implementation or "chosen",
            precision=precision,
            nbytes=models.moved(request, batch),
            # The gate of these rows: no token may differ.
            max_rel=0.0 if same else 1.0,
            bound=0.0,
            timing=timing,
            note=f"{rate:,.1f} tok/s{note}",
            details=_settings(request) | {"tok_per_s": rate} | details,
        )

    plain, alone = answers(None)
    yield row("generate", alone, "", {}, same=True)
    script = np.concatenate([prompts, plain.tokens], axis=1)
    right = np.random.default_rng(0).integers(0, 2, script.shape).astype(bool)
    script = np.where(right, script, (script + 1) % cfg.vocab).astype(np.int32)
    for drafts in (tokens - 1 for tokens in request.lengths):
        drafted, helped = answers(Drafting(ScriptDrafter(drafts), jnp.asarray(script)))
        same = bool(np.array_equal(plain.tokens, drafted.tokens))
        counts, speed_up = drafted.drafts, alone.us / helped.us
        yield row(
            f"generate, half of {drafts} drafts right",
            helped,
            f", {speed_up:.2f} times as fast; {counts.accepted} of {counts.proposed} accepted in {counts.rounds} "
            f"rounds, {'the same' if same else 'OTHER'} tokens",
            {
                "speed_up": speed_up,
                "same_tokens": same,
                "rounds": counts.rounds,
                "proposed": counts.proposed,
                "accepted": counts.accepted,
            },
            same=same,
        )


def _copies(batch: int, request: Request) -> Row:
    """Snapshot and restore of the GDN state, one after the other on the device."""
    state = models.new_state(request, batch).gdn
    turns = min(_TURNS, request.effort.kernels)
    take, give = jax.jit(snapshot), jax.jit(restore)

    def copied(state: Any) -> Any:
        for _ in range(turns):
            state = give(take(state))
        return state

    seconds = sample({"copies": copied}, state, request.effort)["copies"]
    timing = Timing.between(seconds / turns, np.zeros_like(seconds), turns)
    return Row(
        subject="speculation",
        case=f"{request.geometry} snapshot, restore of S and history",
        batch=batch,
        implementation="xla",
        precision="exact",
        nbytes=4 * operands.nbytes(state),
        timing=timing,
        note=f"{operands.nbytes(state) / 1e6:.0f} MB, {timing.us / 1e3:.3f} ms for both",
        details=_settings(request),
    )


def _settings(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("tier", "context", "kv_dtype")}
