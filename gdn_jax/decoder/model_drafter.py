"""Drafts by another model of the same vocabulary, as a rule a smaller one."""

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp

from gdn_jax.axes import Array, Int32
from gdn_jax.decoder.drafting import Drafter, Draw, Proposal
from gdn_jax.decoder.network import TextNetwork
from gdn_jax.decoder.state import DecoderState, init_decoder_state
from gdn_jax.integers import positive_int

__all__ = ["ModelDrafter"]

_FEW = 16
"""Tokens of a row up to which a window is cheaper than a prompt's chunks."""


@dataclasses.dataclass(frozen=True)
class ModelDrafter(Drafter):
    """`draft_tokens` steps of a model, whose memory is a state of its own and whose tokens are drawn as the model's.

    A round costs one window and so many steps of it, and a copy of its GDN state.
    """

    network: TextNetwork
    draft_tokens: int = 3
    kv_dtype: str = "float32"

    def __post_init__(self) -> None:
        positive_int("draft_tokens", self.draft_tokens)

    @property
    @override
    def vocab(self) -> int:
        return self.network.cfg.vocab

    @property
    @override
    def count(self) -> int:
        return self.draft_tokens

    @override
    def begin(self, weights: Any, *, batch: int, capacity: int) -> DecoderState:
        return init_decoder_state(self.network.cfg, batch=batch, capacity=capacity, kv_dtype=self.kv_dtype)

    @override
    def read(
        self, weights: Any, memory: DecoderState, tokens: Int32[Array, "B T"], lengths: Int32[Array, "B"], hidden: Any
    ) -> DecoderState:
        if tokens.shape[1] > _FEW:
            return self.network.prefill(weights, memory, tokens, lengths)[1]
        _, _, memory, window = self.network.look(weights, memory, tokens, lengths)
        return self.network.take(weights, memory, window, lengths)

    @override
    def propose(
        self, weights: Any, memory: DecoderState, pending: Int32[Array, "B"], draw: Draw
    ) -> tuple[Proposal, DecoderState]:
        def body(carry: tuple[DecoderState, Array], ahead: Array) -> tuple[tuple[DecoderState, Array], Array]:
            state, token = carry
            logits, state = self.network.step(weights, state, token, state.position < state.capacity)
            token = draw(logits, ahead)
            return (state, token), token

        ahead = jnp.arange(1, self.count + 1, dtype=jnp.int32)
        (after, _), tokens = jax.lax.scan(body, (memory, pending), ahead)
        counts = jnp.clip(memory.capacity - memory.position, 0, self.count)
        # Keys and values of the drafts lie beyond the position, where nothing is read.
        memory = dataclasses.replace(memory, keys=after.keys, values=after.values)
        return Proposal(jnp.maximum(tokens.T, 0), counts), memory
