"""Drawing the next token on the device: logits float32 [B, vocab] -> int32 [B].

In this order, each on what the one before left: repetition penalty, temperature, top-k, top-p, min-p, one draw.
"""

import dataclasses
import math
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.axes import Array, Bool, Float32, Int32, Leaf
from gdn_jax.integers import integer

__all__ = ["GREEDY", "NOT_FINITE", "Knobs", "SamplingParams", "sample"]

NOT_FINITE = -2
"""What stands in place of a token where the largest logit is not finite: no choice among such logits means anything."""

_SEEDS = 1 << 32
# Beyond these, scaled logits of ordinary size would overflow, or lose their differences to rounding.
_COLDEST, _HOTTEST = 1e-6, 1e6
_WEAKEST, _STRONGEST = 1e-3, 1e3
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty")


def _integer(name: str, value: Any, limit: int) -> int:
    number = integer(name, value)
    if not 0 <= number < limit:
        raise ValueError(f"{name} must be an integer in 0 … {limit - 1}, got {value!r}")
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


@typing.no_type_check  # the class checks its own fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen; the defaults draw from the model's own distribution.

    `temperature` divides the logits; 0 takes the most likely token, the first of equals. `top_k` keeps the k most
    likely tokens (0: all; of equals, the smaller ids). `top_p` keeps the fewest most likely tokens whose probabilities
    reach p. `min_p` keeps tokens at least `min_p` times as likely as the most likely one. `repetition_penalty` r turns
    the logit l of every token in the prompt or generated so far into l / r where l > 0 and l · r elsewhere.

    `seed` is an integer in 0 … 2^32 - 1, or one for each row; an integer s gives row i the seed s + i (modulo 2^32). A
    row's randomness is `fold_in(key(its seed), position)`, with the position in its sequence of the token to be drawn
    and threefry as the generator: a row draws the same tokens alone, in any batch, and however many tokens a dispatch
    generates.

    Raises:
        TypeError: a value of another kind. ValueError: one outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | tuple[int, ...] = 0

    def __post_init__(self):
        checked: dict[str, Any] = {name: _number(name, getattr(self, name)) for name in _REAL}
        if checked["temperature"] != 0 and not _COLDEST <= checked["temperature"] <= _HOTTEST:
            raise ValueError(f"temperature must be 0 or lie in {_COLDEST:g} … {_HOTTEST:g}, got {self.temperature!r}")
        if not 0 < checked["top_p"] <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (1: all tokens), got {self.top_p!r}")
        if not 0 <= checked["min_p"] <= 1:
            raise ValueError(f"min_p must lie in [0, 1] (0: all tokens), got {self.min_p!r}")
        if not _WEAKEST <= checked["repetition_penalty"] <= _STRONGEST:
            limits = f"{_WEAKEST:g} … {_STRONGEST:g}"
            raise ValueError(f"repetition_penalty must lie in {limits} (1: none), got {self.repetition_penalty!r}")
        checked["top_k"] = _integer("top_k", self.top_k, 1 << 31)
        if isinstance(self.seed, list | tuple | np.ndarray):
            checked["seed"] = tuple(_integer("seed", seed, _SEEDS) for seed in self.seed)
        else:
            checked["seed"] = _integer("seed", self.seed, _SEEDS)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def row_seeds(self, batch: int) -> np.ndarray:
        """The seed of every row, uint32 [B].

        Raises:
            ValueError: seeds were given for another number of rows.
        """
        if isinstance(self.seed, int):
            return (np.arange(batch, dtype=np.uint64) + np.uint64(self.seed)).astype(np.uint32)
        if len(self.seed) != batch:
            raise ValueError(f"seed must be an integer or one for each of the {batch} rows, got {len(self.seed)} seeds")
        return np.array(self.seed, np.uint32)

    def knobs(self) -> "Knobs":
        """The settings as arrays: they are traced, so that changing one does not compile anything."""
        return Knobs(
            temperature=jnp.float32(self.temperature),
            top_k=jnp.int32(self.top_k),
            top_p=jnp.float32(self.top_p),
            min_p=jnp.float32(self.min_p),
            repetition_penalty=jnp.float32(self.repetition_penalty),
        )


GREEDY = SamplingParams(temperature=0.0)
"""Always the most likely token."""


class Knobs(NamedTuple):
    """`SamplingParams` on the device: float32 scalars, and int32 for `top_k`."""

    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    min_p: Leaf
    repetition_penalty: Leaf


def sample(
    logits: Float32[Array, "B vocab"],
    seen: Bool[Array, "B vocab"],
    seeds: jax.Array,
    position: Int32[Array, "B"],
    knobs: Knobs,
) -> Int32[Array, "B"]:
    """One token for each row: ids int32 [B], `NOT_FINITE` where the largest logit is NaN or infinite.

    `seen` marks the tokens that the repetition penalty concerns, `seeds` uint32 [B] are the rows' own, `position` [B]
    is where in its sequence the token will stand.
    """
    logits = _penalised(logits, seen, knobs.repetition_penalty)
    # A maximum does not pass NaN on reliably: on CPUs, XLA's vectorised form may drop it.
    peak = jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=1, keepdims=True)

    # Only what the settings ask for is carried out: a greedy choice draws no random numbers, and only top-k and top-p
    # need the vocabulary sorted.
    def greedy() -> Array:
        return jnp.argmax(logits, axis=1).astype(jnp.int32)

    def draw() -> Array:
        scaled = (logits - peak) / knobs.temperature
        sorts = ((knobs.top_k > 0) & (knobs.top_k < logits.shape[1])) | (knobs.top_p < 1)
        top = jax.lax.cond(sorts, lambda: _top(scaled, knobs.top_k, knobs.top_p), lambda: jnp.ones(scaled.shape, bool))
        return _draw(scaled, top & _likely(scaled, knobs.min_p), seeds, position)

    tokens = jax.lax.cond(knobs.temperature == 0, greedy, draw)
    return jnp.where(jnp.isfinite(peak[:, 0]), tokens, jnp.int32(NOT_FINITE))


def _penalised(logits: Array, seen: Array, penalty: Array) -> Array:
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def _likely(scaled: Array, min_p: Array) -> Array:
    """Whether p >= min_p · max p, from logits whose largest is 0: [B, vocab] bool."""
    return scaled >= jnp.log(min_p)


def _top(scaled: Array, top_k: Array, top_p: Array) -> Array:
    """Membership in the top-p set of the top-k set, from logits whose largest is 0: [B, vocab] bool.

    Both sets are a beginning of the tokens in order of probability, so the last member of it decides.
    """
    vocab = scaled.shape[1]
    ids = rank = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    descending, order = jax.lax.sort((-scaled, ids), dimension=1, num_keys=2)
    within_k = (rank < top_k) | (top_k == 0)
    weight = jnp.where(within_k, jnp.exp(-descending), jnp.float32(0))
    share = weight / jnp.sum(weight, axis=1, keepdims=True)
    before = jnp.cumsum(share, axis=1) - share
    enough = jnp.where(top_p < 1, jnp.sum(before < top_p, axis=1, dtype=jnp.int32), jnp.int32(vocab))
    size = jnp.minimum(enough, jnp.sum(within_k, axis=1, dtype=jnp.int32))
    last = size[:, None] - 1
    edge, edge_id = -jnp.take_along_axis(descending, last, axis=1), jnp.take_along_axis(order, last, axis=1)
    return (scaled > edge) | ((scaled == edge) & (ids <= edge_id))


def _draw(scaled: Array, kept: Array, seeds: Array, position: Array) -> Array:
    """A token of softmax(scaled) restricted to `kept`, by the Gumbel-max rule.

    The noise belongs to token ids, so a token that was drawn stays drawn under a stricter filter that keeps it.
    """

    def noise(seed: Array, at: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), at)
        return jax.random.gumbel(key, scaled.shape[1:], jnp.float32)

    perturbed = scaled + jax.vmap(noise)(seeds, position)
    return jnp.argmax(jnp.where(kept, perturbed, -jnp.inf), axis=1).astype(jnp.int32)
