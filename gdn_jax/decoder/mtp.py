"""The multi-token-prediction (MTP) head as a drafter: from a hidden state and the token after it, the token after that.

    z  = W_fc [norm_e(embedding of x_t), norm_h(h_{t-1})]
    h' = norm(layer(z))
    logits of x_{t+1} = W_head h'

h_{t-1} is what the model made of the token before x_t, after its final norm. `layer` is one layer of full attention as
the model has them, with keys and values of its own: one for each pair (h_{t-1}, x_t), the first of which belongs to the
second token of a sequence, so that the pair of token t lies in slot t - 1, and is turned by that position. For further
drafts h' stands in for the hidden state of the model, and the draft for the token.

Once tokens are part of a sequence nothing is asked of the head about them but the keys and values of their pairs. These
follow from z alone, so that reading a prompt takes `fc` and two small projections, and no attention.
"""

import dataclasses
import functools
import typing
from typing import Any, ClassVar, override

import flax.struct
import jax
import jax.numpy as jnp

from gdn_jax import ops
from gdn_jax.axes import Array, Bool, Float32, Int32, Leaf
from gdn_jax.decoder.attention import Cache, keep, rotate
from gdn_jax.decoder.block import Flow, Place, Settings, block_step
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.drafting import Drafter, Draw, Proposal
from gdn_jax.decoder.model import embed, logits_of
from gdn_jax.decoder.mtp_weights import MtpWeights, mtp_config
from gdn_jax.decoder.state import DecoderState, init_decoder_state
from gdn_jax.fence import fence
from gdn_jax.integers import positive_int
from gdn_jax.norms import rms_norm
from gdn_jax.require import require_kind

__all__ = ["MtpDrafter", "MtpMemory", "mtp_read", "mtp_step"]


@flax.struct.dataclass
class MtpMemory:
    """What the head keeps of B sequences.

    `state`: the keys and values of its one layer, at the number of pairs so far. `hidden` [B, D] float32: what the
    model made of the last token of each sequence. `begun` bool [B]: whether there is one.
    """

    state: Any
    hidden: Leaf
    begun: Leaf


@typing.no_type_check  # the class checks its own fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpDrafter(Drafter):
    """Drafts `draft_tokens` tokens at a time with the MTP head of a model of `cfg`; its weights are `MtpWeights`.

    `precision`, `implementation` and `kv_dtype` are those of the head alone: all that they change is which drafts are
    right.

    Raises:
        TypeError: `draft_tokens` is not an integer, or `cfg` no DecoderConfig. ValueError: `draft_tokens` is below 1,
        or an unknown implementation.
    """

    cfg: DecoderConfig
    draft_tokens: int = 3
    precision: str = "exact"
    implementation: str | None = None
    kv_dtype: str = "float32"

    reads_hidden: ClassVar[bool] = True

    def __post_init__(self):
        require_kind("cfg", self.cfg, DecoderConfig)
        object.__setattr__(self, "draft_tokens", positive_int("draft_tokens", self.draft_tokens))
        ops.check_implementation(self.implementation)

    @property
    @override
    def count(self) -> int:
        return self.draft_tokens

    @property
    @override
    def vocab(self) -> int:
        return self.cfg.vocab

    @property
    @override
    def hidden(self) -> int:
        return self.cfg.hidden

    @property
    def _settings(self) -> Settings:
        return Settings(mtp_config(self.cfg), self.precision, self.implementation)

    @override
    def begin(self, weights: Any, *, batch: int, capacity: int) -> MtpMemory:
        cfg = self._settings.cfg
        return MtpMemory(
            state=init_decoder_state(cfg, batch=batch, capacity=capacity, kv_dtype=self.kv_dtype),
            hidden=jnp.zeros((batch, cfg.hidden), jnp.float32),
            begun=jnp.zeros((batch,), bool),
        )

    @override
    def read(
        self,
        weights: Any,
        memory: Any,
        tokens: Int32[Array, "B T"],
        lengths: Int32[Array, "B"],
        hidden: Float32[Array, "B T D"] | None,
    ) -> MtpMemory:
        if hidden is None:
            raise ValueError("the multi-token-prediction head reads hidden states, got none")
        if tokens.shape[1] == 0:
            return memory
        before = jnp.concatenate([memory.hidden[:, None], hidden[:, :-1]], axis=1)
        # The first token of a sequence has none before it, and makes no pair: those behind it move up by one.
        begun = memory.begun[:, None]
        tokens = jnp.where(begun, tokens, jnp.roll(tokens, -1, axis=1))
        before = jnp.where(begun[:, :, None], before, hidden)
        pairs = jnp.maximum(lengths - jnp.where(memory.begun, 0, 1), 0)
        state = mtp_read(weights, memory.state, tokens, before, pairs, self._settings)
        last = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        return MtpMemory(
            state=state,
            hidden=jnp.where((lengths > 0)[:, None], last, memory.hidden),
            begun=memory.begun | (lengths > 0),
        )

    @override
    def propose(self, weights: Any, memory: Any, pending: Int32[Array, "B"], draw: Draw) -> tuple[Proposal, MtpMemory]:
        settings, start = self._settings, memory.state
        # Tokens so far, the pending one and the drafts must fit: a row with room for none of them gets none.
        room = start.capacity - (start.position + 1) - 1

        def body(carry, ahead):
            state, hidden, tokens, going = carry
            going = going & (ahead <= room)
            hidden, state = mtp_step(weights, state, tokens, hidden, going, settings)
            drawn = draw(logits_of(weights, hidden, settings), ahead)
            # Where the logits are no numbers nothing is drawn from them.
            going = going & (drawn >= 0) & (drawn < self.cfg.vocab)
            tokens = jnp.where(going, drawn, 0)
            return (state, hidden, tokens, going), (tokens, going)

        carry = start, memory.hidden, pending, memory.begun
        (state, *_), (tokens, valid) = jax.lax.scan(body, carry, jnp.arange(1, self.draft_tokens + 1, dtype=jnp.int32))
        proposal = Proposal(tokens.T, jnp.sum(valid, axis=0, dtype=jnp.int32))
        # Back at the pairs of the sequences: what the drafts wrote lies behind them.
        return proposal, dataclasses.replace(memory, state=dataclasses.replace(state, position=start.position))


def _joined(
    weights: MtpWeights, tokens: Int32[Array, "M"], hidden: Float32[Array, "M D"], cfg: DecoderConfig
) -> Float32[Array, "M 2*D"]:
    """What `fc` takes: the normed embedding of the tokens, then the normed hidden states before them."""
    own = rms_norm(fence(embed(weights.embed, tokens)), weights.embedding_norm, cfg.norm_eps)
    return fence(jnp.concatenate([own, rms_norm(hidden, weights.hidden_norm, cfg.norm_eps)], axis=-1))


def mtp_step(
    weights: MtpWeights,
    state: DecoderState,
    tokens: Int32[Array, "B"],
    hidden: Float32[Array, "B D"],
    writes: Bool[Array, "B"],
    settings: Settings,
) -> tuple[Float32[Array, "B D"], DecoderState]:
    """h' of one pair per row; rows where `writes` is false keep their state, and their result means nothing."""
    cfg, precision, implementation = settings
    joined = _joined(weights, tokens, hidden, cfg)
    x = fence(ops.project(weights.fc, joined, precision=precision, implementation=implementation))
    flow = Flow(x, jnp.zeros_like(x), None, Cache(state.keys, state.values))
    first = jnp.int32(0)
    [plan] = cfg.plan()
    x, y, _, cache = block_step(
        weights, flow, state.position, writes, plan, Place(first, first, first), settings, gdn_step=_never
    )
    made = fence(rms_norm(fence(x + y), weights.norm, cfg.norm_eps))
    return made, DecoderState(None, cache.keys, cache.values, state.position + writes.astype(jnp.int32))


def mtp_read(
    weights: MtpWeights,
    state: DecoderState,
    tokens: Int32[Array, "B T"],
    hidden: Float32[Array, "B T D"],
    pairs: Int32[Array, "B"],
    settings: Settings,
) -> DecoderState:
    """The state with keys and values of the first `pairs` (0 … T) of the pairs of each row."""
    cfg, w, layer = settings.cfg, weights.attention, jnp.int32(0)
    project = functools.partial(ops.project_rows, precision=settings.precision, implementation=settings.implementation)
    batch, count = tokens.shape
    # A sequence that has outgrown the state ends there, so that no slot beyond it is ever counted.
    pairs = jnp.minimum(pairs, state.capacity - state.position)
    index = jnp.arange(count, dtype=jnp.int32)[:, None]
    places = state.position[None] + index
    by_time = jnp.swapaxes(hidden, 0, 1).reshape(-1, cfg.hidden)
    [z] = project((weights.fc,), _joined(weights, tokens.T.reshape(-1), by_time, cfg))
    k, v = fence(project((w.k, w.v), fence(rms_norm(fence(z), weights.input_norm[0], cfg.norm_eps)), layer=layer))
    k, v = (array.reshape(-1, cfg.kv_heads, cfg.head_dim) for array in (k, v))
    k = rotate(rms_norm(k, w.k_norm[0], cfg.norm_eps), places.reshape(-1), cfg.rotary_dim, cfg.rope_theta)
    # The others are dropped beyond the end, every one in a slot of its own there.
    slots = jnp.where(index < pairs[None], places, state.capacity + index)
    k, v = (array.reshape(count, batch, cfg.kv_heads, cfg.head_dim) for array in (k, v))
    cache = keep(Cache(state.keys, state.values), k, v, slots, layer)
    return DecoderState(None, cache.keys, cache.values, state.position + pairs)


def _never(*operands: Any) -> Any:
    raise AssertionError("an MTP head has no GDN layer")
