"""What the form of the weights does to a whole model: its logits, token by token, against float32.

Every form reads the same tokens, those that the model in float32 continues a fixed prompt with. So an error at a token
is what the form has done to the state and to this step, and not a sequence that went another way.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.decoder.block import Settings
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.model import hidden_step, logits_of
from gdn_jax.decoder.state import init_decoder_state
from gdn_jax.decoder.weights import load_decoder
from gdn_jax.evidence.metrics import differing, max_rel, rms_rel
from gdn_jax.evidence.report import Section

__all__ = ["Options", "run"]

_PROMPT = 4
# The parts of a model that are 4-bit one at a time, and the fields of the weights that they are.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "q4 GDN": ("gdn",),
    "q4 attention": ("attention",),
    "q4 MLP": ("mlp", "moe"),
    "q4 embedding, head": ("embed", "head"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Which checkpoint, for how many tokens after the prompt, and by which rule of quantisation."""

    model: Path
    tokens: int = 16
    quantiser: str = "absmax"


def run(options: Options) -> Iterator[Section]:
    """A summary by form of the weights, then the errors token by token.

    The forms: bf16; q4; and q4 in one part at a time, the rest in float32. Passes when float32 gives its own logits
    again, bit for bit.

    Raises:
        CheckpointError, UnsupportedError: the model cannot be had, or not in 4 bits.
    """
    cfg, exact = load_decoder(options.model)
    tokens = _continued(cfg, exact, options.tokens)
    want = _logits(cfg, exact, tokens)
    found = {"f32 again": _logits(cfg, exact, tokens)}
    for name, weights in _forms(exact, options):
        found[name] = _logits(cfg, weights, tokens)
    errors = {name: [rms_rel(*pair) for pair in zip(got, want, strict=True)] for name, got in found.items()}
    yield _summary(options, want, found, errors)
    rows = [(token, *(errors[name][token] for name in found)) for token in range(options.tokens)]
    shown = sorted({*range(min(4, options.tokens)), *range(7, options.tokens, 8), options.tokens - 1})
    title = "The same token by token, rms_rel of the logits against f32"
    yield Section("drift_per_token", title, ("token", *found), rows, None, shown)


def _summary(
    options: Options, want: np.ndarray, found: Mapping[str, np.ndarray], errors: Mapping[str, list[float]]
) -> Section:
    choices = want.argmax(axis=-1)
    rows = []
    for name, got in found.items():
        worst = max(max_rel(*pair) for pair in zip(got, want, strict=True))
        agreed = f"{int(np.sum(got.argmax(axis=-1) == choices))}/{len(choices)}"
        same = differing(got, want) == 0 if name == "f32 again" else None
        mine = errors[name]
        rows.append((name, mine[0], float(np.median(mine)), mine[-1], max(mine), worst, agreed, same))
    columns = ("weights", "rms_rel_first", "median", "last", "worst", "max_rel_worst", "greedy_agreement", "same_bits")
    title = f"{options.model}: logits over {len(want)} tokens against f32, by form of the weights"
    return Section("drift", title, columns, rows, rows[0][-1])


def _forms(exact: Any, options: Options) -> Iterator[tuple[str, Any]]:
    """The weights in their other forms, one after the other: no two of them are held at once beside float32."""
    _, rounded = load_decoder(options.model, tier="bf16")
    yield "bf16", rounded
    del rounded
    _, quantised = load_decoder(options.model, tier="q4", quantiser=options.quantiser)
    yield "q4", quantised
    for name, fields in _PARTS.items():
        part = {field: getattr(quantised, field) for field in fields}
        if any(value is not None for value in part.values()):
            yield name, exact.replace(**part)


def _continued(cfg: DecoderConfig, weights: Any, tokens: int) -> jax.Array:
    """A prompt and what the model says next, all but the last token of it: int32 [P + T - 1]."""
    prompt = jnp.arange(1, _PROMPT + 1, dtype=jnp.int32) * 7919 % cfg.vocab
    given = jnp.concatenate([prompt, jnp.full(tokens - 1, -1, jnp.int32)])
    read, _ = _scanned(weights, given, cfg=cfg)
    return read


def _logits(cfg: DecoderConfig, weights: Any, tokens: jax.Array) -> np.ndarray:
    """Logits float32 [T, vocab] after the prompt and after every token that follows it."""
    _, logits = _scanned(weights, tokens, cfg=cfg)
    return np.asarray(logits[_PROMPT - 1 :])


@functools.partial(jax.jit, static_argnames=("cfg",))
def _scanned(weights: Any, tokens: jax.Array, *, cfg: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """The tokens that were read, -1 being replaced by the most likely one, and the logits after each.

    Below the checks of `decode_step`, which take a model in one tier only.
    """
    settings = Settings(cfg, "exact", None)

    def body(carry: Any, token: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        state, likeliest = carry
        token = jnp.where(token < 0, likeliest, token)
        hidden, state = hidden_step(weights, state, token[None], jnp.ones(1, bool), settings)
        [logits] = logits_of(weights, hidden, settings)
        return (state, jnp.argmax(logits).astype(jnp.int32)), (token, logits)

    start = init_decoder_state(cfg, batch=1, capacity=tokens.size), jnp.int32(0)
    return jax.lax.scan(body, start, tokens)[1]
