"""Reading a prompt with a whole model, from its tokens to the first new one on the host."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.bench import models
from gdn_jax.bench.naming import implementation_of
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Step, Timing, sample
from gdn_jax.decoder.model import prefill_tokens

__all__ = ["run"]

# More than a chunk of the delta rule, and than the rows of one product.
_GATE_TOKENS = 70


def run(request: Request) -> Iterator[Row]:
    """A row for every batch and precision: one prompt of `tokens` tokens per sequence.

    Raises:
        ValueError: the context has no room for the prompt.
    """
    cfg = models.require_decoder(request)
    if request.context < request.tokens:
        raise ValueError(
            f"--context must be at least the --tokens of the prompt, {request.tokens}; got {request.context}"
        )
    weights = models.decoder_weights(1, cfg, request.tier)
    for batch in request.batches:
        for precision in request.precisions:
            yield _measured(weights, batch, precision, request)


def _logits(weights: Any, state: Any, tokens: jax.Array, **named: Any) -> jax.Array:
    return prefill_tokens(weights, state, tokens, **named)[0]


def _measured(weights: Any, batch: int, precision: str, request: Request) -> Row:
    cfg = models.require_decoder(request)
    verdict = models.judged(_logits, batch, precision, request, _GATE_TOKENS)
    tokens = jnp.asarray(models.prompt(cfg, batch, request.tokens))

    def read(carry, _, weights_and_tokens):
        state, _ = carry
        weights, tokens = weights_and_tokens
        state = state.replace(position=jnp.zeros_like(state.position))
        logits, state = prefill_tokens(weights, state, tokens, **models.named(request, precision))
        return state, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    carry = (models.new_state(request, batch), jnp.zeros((batch,), jnp.int32))
    step = Step(read, (weights, tokens))
    used = implementation_of(step, carry)
    timing, details, note = None, {}, "not timed: wrong result"
    if verdict.passed:
        jitted = jax.jit(read, donate_argnums=0, compiler_options=dict(request.effort.options))
        compiled = models.compiled(jitted, carry, jnp.int32(0), step.operands)
        details = models.memory_details(compiled, batch, request, piece=request.tokens)
        once = {"prompt": lambda carry: compiled.run(carry, jnp.int32(0), step.operands)}
        seconds = sample(once, carry, request.effort)["prompt"]
        timing = Timing.between(seconds, np.zeros_like(seconds), 1)
        rate = batch * request.tokens / timing.us * 1e6
        details |= {
            "tok_per_s": rate,
            "first_token_seconds": timing.us / 1e6,
            "ms_per_token": timing.us / 1e3 / request.tokens,
            **compiled.details,
        }
        note = f"{rate:,.1f} tok/s, first token after {timing.us / 1e6:.3f} s, {compiled.note}"
    return Row(
        subject="prefill",
        case=f"{request.geometry} {request.tokens} tokens",
        batch=batch,
        implementation=used,
        precision=precision,
        # Of a whole prompt: what any way of reading it must move at least, however many passes this one makes.
        nbytes=models.moved(request, batch),
        max_rel=verdict.max_rel,
        bound=verdict.bound,
        timing=timing,
        note=note,
        details=models.settings(request) | {"gate_implementation": verdict.implementation} | details,
    )
