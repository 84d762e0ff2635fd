"""Drafts from a text that is expected to come: an earlier answer, a file about to be edited, that of a measurement."""

import dataclasses
from typing import Any, override

import jax.numpy as jnp

from gdn_jax.axes import Array, Int32
from gdn_jax.decoder.drafting import Drafter, Draw, Proposal
from gdn_jax.integers import positive_int
from gdn_jax.require import require_array

__all__ = ["ScriptDrafter"]


@dataclasses.dataclass(frozen=True)
class ScriptDrafter(Drafter):
    """Proposes what the script has at the same places. Its weights are the script, int32 [B, S], prompts included.

    Where a row has -1, and beyond the end, nothing is known and nothing proposed. What was drawn instead of a proposal
    changes nothing about the places that follow. The memory is the number of tokens of each row.
    """

    draft_tokens: int = 3

    def __post_init__(self) -> None:
        positive_int("draft_tokens", self.draft_tokens)

    @property
    @override
    def count(self) -> int:
        return self.draft_tokens

    @override
    def begin(self, weights: Any, *, batch: int, capacity: int) -> Int32[Array, "B"]:
        require_array("draft.weights, the script,", weights, "int32")
        if weights.ndim != 2 or weights.shape[0] != batch or weights.shape[1] == 0:
            raise ValueError(
                f"the script must be [B, S] with B={batch} (the number of prompts) and S of at least 1, got shape "
                f"{list(weights.shape)}"
            )
        return jnp.zeros(batch, jnp.int32)

    @override
    def read(
        self, weights: Any, memory: Any, tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"], hidden: Any
    ) -> Int32[Array, "B"]:
        return memory + lengths

    @override
    def propose(self, weights: Any, memory: Any, pending: Int32[Array, "B"], draw: Draw) -> tuple[Proposal, Any]:
        # The pending token is at place `memory`.
        places = memory[:, None] + jnp.arange(1, self.count + 1, dtype=jnp.int32)[None]
        inside = places < weights.shape[1]
        found = jnp.take_along_axis(weights, jnp.where(inside, places, 0), axis=1)
        known = jnp.cumprod((inside & (found >= 0)).astype(jnp.int32), axis=1)
        return Proposal(jnp.maximum(found, 0), jnp.sum(known, axis=1, dtype=jnp.int32)), memory
