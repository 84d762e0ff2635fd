"""Device memory of a whole model, part by part, from the abstract shapes of its weights and state; what a card holds.

    total = weights(tier) + state(batch, context, kv dtype) + workspace(batch, context, tier, piece)

Weights and state are exact: they are the bytes of the arrays that loading and `init_decoder_state` make. The workspace,
what the compiled program holds while it runs, is an estimate from above; `workspace_nbytes` says how it is made.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import checkpoints
from gdn_jax.decoder.config import DECODERS, DecoderConfig
from gdn_jax.decoder.generate import largest_piece, new_rows
from gdn_jax.decoder.piece_attention import SLOTS, queries_of_block
from gdn_jax.decoder.state import decoder_state_shapes
from gdn_jax.decoder.weights import abstract_decoder
from gdn_jax.delta import CHUNK
from gdn_jax.linear import GROUP
from gdn_jax.q4 import Q4Tensor

__all__ = [
    "CARDS",
    "Budget",
    "Card",
    "Load",
    "budget",
    "card",
    "largest",
    "of_checkpoint",
    "published",
    "state_nbytes",
    "tables",
    "weights_nbytes",
    "workspace_nbytes",
]

# `max_position_embeddings` of every model in `DECODERS`.
_PUBLISHED_CONTEXT = 262144

# Float32 arrays of the vocabulary's size that drawing a token holds at once: logits, their sorted form and the like.
_SAMPLING_ARRAYS = 8
# Float32 arrays as wide as a layer's widest intermediate: a block's own, and their limbs.
_LAYER_ARRAYS = 16
# Slots per partial sum of the attention's output; see `decoder.attention`.
_SLOTS = 64
# Of a prompt: arrays as wide as a layer's widest intermediate, of the chunks' triangular systems, of a layer's S (eight
# are partial sums of what a chunk writes), of the scores of a block; and rows of a product that is left to XLA.
_PIECE_ARRAYS, _SYSTEMS, _STATES, _SCORES, _ROWS = 5, 6, 12, 3, 8
_UNBOUNDED = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What is held at once: a model in a tier, and `batch` sequences with room for `context` tokens each.

    `piece`: of how many tokens of each prompt at once there is to be room for; None: of as many as `generate` reads; 0:
    of none, for steps alone.
    """

    cfg: DecoderConfig
    tier: str = "f32"
    batch: int = 1
    context: int = 4096
    kv_dtype: str = "float32"
    piece: int | None = None


class Budget(NamedTuple):
    """Bytes by part; the parts of `weights` and `state` are exact, `workspace` is an upper estimate."""

    weights: Mapping[str, int]
    state: Mapping[str, int]
    workspace: int

    @property
    def held(self) -> int:
        """Bytes of the arrays between two steps."""
        return sum(self.weights.values()) + sum(self.state.values())

    @property
    def total(self) -> int:
        """Bytes while a step runs."""
        return self.held + self.workspace


class Card(NamedTuple):
    """A device's memory, and how much of it arrays can have."""

    name: str
    nbytes: int
    usable: int


_MIB = 2**20
# As the driver reports them: somewhat less than what the data sheet counts in powers of ten or of two.
_CARD_MIB = {
    "B200": 183359,
    "H200": 143771,
    "H100": 81559,
    "A100-80GB": 81920,
    "A100-40GB": 40960,
    "RTX-PRO-6000": 97887,
    "L40S": 46068,
    "RTX-5090": 32607,
    "RTX-4090": 24564,
    "L4": 23034,
}
CARDS: Mapping[str, int] = {name: mib * _MIB for name, mib in _CARD_MIB.items()}
"""Memory in bytes of some cards by name."""


def budget(load: Load) -> Budget:
    """The bytes of a load by part.

    Raises:
        ValueError: an unknown tier or `kv_dtype`, a batch or context below 1. UnsupportedError: tier "q4" of a model
        with matrices that cannot be 4-bit.
    """
    return Budget(weights_nbytes(load.cfg, load.tier), state_nbytes(load), workspace_nbytes(load))


def weights_nbytes(cfg: DecoderConfig, tier: str) -> Mapping[str, int]:
    """Bytes of the weights by part; a part that the model does not have is left out. A tied head takes nothing."""
    shapes = _weight_shapes(cfg, tier)
    parts = {
        "GDN": shapes.gdn,
        "attention": shapes.attention,
        "MLP": shapes.mlp,
        "experts": shapes.moe,
        "embedding": shapes.embed,
        "head": shapes.head,
        "norms": (shapes.norm, shapes.input_norm, shapes.post_norm),
    }
    return {name: _nbytes(part) for name, part in parts.items() if part is not None}


def state_nbytes(load: Load) -> Mapping[str, int]:
    """Bytes of the state by part: what GDN layers remember, keys and values, and what drawing tokens keeps."""
    cfg, batch = load.cfg, load.batch
    state = decoder_state_shapes(cfg, batch=batch, capacity=load.context, kv_dtype=load.kv_dtype)
    rows = (state.position, _row_shapes(batch, cfg.vocab))
    parts = {"GDN state": state.gdn, "KV cache": (state.keys, state.values), "rows": rows}
    return {name: _nbytes(part) for name, part in parts.items() if part is not None}


def workspace_nbytes(load: Load) -> int:
    """Bytes held beside weights and state, estimated from above by the largest of three moments.

    A layer of a step: its activations, the attention's scores and shares [B, S, Nq] and partial sums [B, S/64, Nq, Hd].
    The head: arrays [B, vocab] of drawing a token. A layer of a prompt, with all tokens of a piece as rows: activations
    [T·B, widest]; and systems [T·B, H, 64] and copies of S of a GDN layer, or the scores of a block of queries with one
    of slots, or what the experts of all tokens give. To each come, where products are XLA's (f32, bf16), the partial
    sums per 32 columns of the widest, and for a prompt copies of it.
    """
    cfg = load.cfg
    shapes = _weight_shapes(cfg, load.tier)
    head = shapes.embed if shapes.head is None else shapes.head
    inside = [matrix for part in (shapes.gdn, shapes.attention, shapes.mlp, shapes.moe) for matrix in _matrices(part)]
    widest = max((max(matrix.shape[-2:]) for matrix in inside), default=cfg.hidden)
    sums = max(map(_partial_sums, inside), default=0)
    drawing = _SAMPLING_ARRAYS * cfg.vocab + _partial_sums(head)
    step = 4 * load.batch * max(_step(load, widest) + sums, drawing)
    if load.piece == 0:
        return step
    products = 2 * (
        4 * _ROWS * sums + max(map(_copied, inside), default=0)
    )  # an MLP's gate and up are under way at once
    return max(step, 4 * _piece(load, widest) + products)


def _step(load: Load, widest: int) -> int:
    """Floats of a layer's activations for one token of one sequence."""
    scores = load.context * load.cfg.heads if load.cfg.count("full_attention") else 0
    return _LAYER_ARRAYS * widest + 2 * scores + math.ceil(scores / _SLOTS) * load.cfg.head_dim


def _piece(load: Load, widest: int) -> int:
    """Floats of a layer's activations for all tokens of a piece."""
    cfg, gdn, moe = load.cfg, load.cfg.gdn, load.cfg.moe
    piece = largest_piece(load.batch) if load.piece is None else load.piece
    tokens, parts = min(piece, load.context), [0]
    if gdn is not None:
        states = _STATES * gdn.key_dim * gdn.value_dim
        parts.append(gdn.value_heads * (tokens * _SYSTEMS * CHUNK + states))
    if cfg.count("full_attention"):
        parts.append(_SCORES * cfg.heads * queries_of_block(tokens, load.batch) * min(load.context, SLOTS))
    if moe is not None:
        parts.append(tokens * 2 * moe.experts_per_token * cfg.hidden)
    return load.batch * (tokens * _PIECE_ARRAYS * widest + max(parts))


def largest(fits: Callable[[int], bool], limit: int = _UNBOUNDED) -> int:
    """The largest n in 0 … limit with `fits(n)`, where what fits also fits when it is smaller; 0 if not even 1 does."""
    if fits(limit):
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def card(text: str) -> Card:
    """A card by its name in `CARDS`, "auto" for the default device, or bytes ("24GB", "80GiB", "25769803776").

    Of a card by name, arrays get the share that JAX takes for itself: 75 %, or `XLA_CLIENT_MEM_FRACTION`. Of the
    default device they get what it says; bytes are taken as they are.

    Raises:
        ValueError: none of these, or a default device that does not say how much memory it has.
    """
    if text == "auto":
        return _present()
    for name, nbytes in CARDS.items():
        if name.lower() == text.lower():
            return Card(name, nbytes, int(nbytes * _share()))
    given = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", text.strip())
    if given is None or not (nbytes := int(float(given[1]) * _unit(given[2] or "B"))):
        raise ValueError(
            f"a card must be one of {', '.join(CARDS)}, auto (the device here), or a number of bytes such as 24GB or "
            f"80GiB, got {text!r}"
        )
    return Card(text, nbytes, nbytes)


def published(geometry: str) -> tuple[DecoderConfig, int]:
    """The published model of that name, and the longest context that it was made for.

    Raises:
        ValueError: there is none.
    """
    if geometry not in DECODERS:
        raise ValueError(f"geometry must be one of {', '.join(DECODERS)}, got {geometry!r}")
    return DECODERS[geometry], _PUBLISHED_CONTEXT


def of_checkpoint(path: str | os.PathLike[str]) -> tuple[DecoderConfig, int | None]:
    """The model in a checkpoint, of which no tensor is read, and the longest context that its configuration names.

    Raises:
        CheckpointError, UnsupportedError: as for loading it.
    """
    with checkpoints.open_checkpoint(path) as checkpoint:
        longest = checkpoint.config.get("max_position_embeddings")
        return DecoderConfig.from_hf(checkpoint.config), longest if type(longest) is int and longest > 0 else None


def tables(
    load: Load, chosen: Card | None, most_context: int | None
) -> Iterator[tuple[str, str, tuple[str, ...], list[tuple[Any, ...]], bool | None]]:
    """Name, title, columns, rows and verdict (whether it fits on the `chosen` card) of the bytes, then of the cards.

    `most_context` is the longest context that the model was made for, if that is known.
    """
    found = budget(load)
    parts = [("weights", *part) for part in found.weights.items()] + [("state", *part) for part in found.state.items()]
    rows = [(kind, name, nbytes, round(nbytes / 1e6)) for kind, name, nbytes in parts]
    for kind, nbytes in (("workspace, at most", found.workspace), ("total", found.total)):
        rows.append((kind, "", nbytes, round(nbytes / 1e6)))
    case = f"tier {load.tier}, batch {load.batch}, context {load.context}, keys and values in {load.kv_dtype}"
    yield "bytes", f"Device memory: {case}", ("kind", "part", "bytes", "MB"), rows, None
    cards = _cards() if chosen is None else [chosen]
    columns = ("card", "MB", "usable_MB", "fits", "left_MB", "largest_context", "largest_batch")
    rows = [_row(load, found, one, most_context) for one in cards]
    title = f"Where it fits: the largest context at batch {load.batch}, the largest batch at context {load.context}"
    yield "cards", title, columns, rows, None if chosen is None else found.total <= chosen.usable


def _row(load: Load, found: Budget, one: Card, most_context: int | None) -> tuple[Any, ...]:
    def fits(**changed: int) -> bool:
        return budget(dataclasses.replace(load, **changed)).total <= one.usable

    # Without full attention no memory depends on a context that has room for a piece.
    bounded = load.cfg.count("full_attention") > 0
    context = largest(lambda n: fits(context=n), most_context or _UNBOUNDED) if bounded else None
    batch = largest(lambda n: fits(batch=n))
    left = one.usable - found.total
    mb = (round(n / 1e6) for n in (one.nbytes, one.usable))
    return (one.name, *mb, "yes" if left >= 0 else "no", round(left / 1e6), context, batch)


def _cards() -> list[Card]:
    """The device here, where it says how much memory it has, then those known by name."""
    here = [_present()] if jax.devices()[0].memory_stats() else []
    return [*here, *map(card, CARDS)]


def _present() -> Card:
    device = jax.devices()[0]
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ValueError(f"{device.device_kind!r} does not say how much memory it has; name a card or give bytes")
    return Card(device.device_kind, stats["bytes_limit"], stats["bytes_limit"])


def _share() -> float:
    """The part of a card's memory that JAX gives to arrays."""
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if text := os.environ.get(variable):
            try:
                share = float(text)
            except ValueError:
                share = math.nan
            if not 0 < share <= 1:
                raise ValueError(f"{variable} must be a number above 0 and at most 1 here, got {text!r}")
            return share
    return 0.75


def _unit(name: str) -> int:
    base, exponent = (1024 if "i" in name else 1000), "BKMGT".index(name[0])
    return base**exponent


# Searching for the largest load asks for the same shapes over and over.
@functools.lru_cache(maxsize=8)
def _weight_shapes(cfg: DecoderConfig, tier: str) -> Any:
    return abstract_decoder(cfg, tier=tier)


@functools.lru_cache(maxsize=8)
def _row_shapes(batch: int, vocab: int) -> Any:
    """What a generation keeps of its rows beside the decoder's state."""
    return jax.eval_shape(functools.partial(new_rows, None, batch=batch, vocab=vocab))


def _matrices(part: Any) -> list[Any]:
    """The matrices of a part, stacked or not, in whatever form."""
    leaves = jax.tree.leaves(part, is_leaf=_is_q4)
    return [leaf for leaf in leaves if _is_q4(leaf) or len(leaf.shape) >= 3]


def _partial_sums(matrix: Any) -> int:
    """Partial sums per sequence of a product that is left to XLA."""
    return 0 if _is_q4(matrix) else matrix.shape[-2] * math.ceil(matrix.shape[-1] / GROUP)


def _copied(matrix: Any) -> int:
    """Bytes of a matrix in its own form and in float32, copied for a product of rows that is left to XLA."""
    size = matrix.shape[-2] * matrix.shape[-1]
    return 0 if _is_q4(matrix) else size * (4 + matrix.dtype.itemsize)


def _is_q4(leaf: Any) -> bool:
    return isinstance(leaf, Q4Tensor)


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
