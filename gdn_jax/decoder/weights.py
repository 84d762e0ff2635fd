"""The weights of a decoder as a pytree, filled from canonical tensors by one table.

Layers of a kind are stacked, and a layer is addressed by its number in the stack: nothing is copied to use it. What
becomes of a tensor depends on its name and on the tier:

| | f32 | bf16 | q4 |
|---|---|---|---|
| embedding, head, the large projections of GDN, attention and MLPs | float32 | bfloat16 | 4-bit |
| norms, the small tensors of GDN, the router and the gate of the shared expert | float32 | float32 | float32 |
"""

import functools
import operator
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

import checkpoints
from checkpoints.names import listed
from gdn_jax import weights as gdn_weights
from gdn_jax.axes import Leaf
from gdn_jax.convert import Progress, Watcher
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.errors import CheckpointError, UnsupportedError
from gdn_jax.q4 import CODES_PER_WORD, GROUP, METHODS, Q4Tensor, quantize_words
from gdn_jax.require import require_array, require_kind
from gdn_jax.weights import DenseProjections, GdnStack, GdnWeights, Q4Projections

__all__ = [
    "TIERS",
    "AttentionWeights",
    "DecoderWeights",
    "Field",
    "MlpWeights",
    "MoeWeights",
    "abstract_decoder",
    "abstract_fields",
    "check_decoder_weights",
    "load_decoder",
    "of_layer",
    "read_decoder",
    "read_fields",
    "table",
]

TIERS = ("f32", "bf16", "q4")
_MATRIX_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
_READABLE = ("float32", "float16", "bfloat16")
_NOTHING: Mapping[str, str] = {}

_MOVED_WHOLE = 64 << 20
"""Fields of at most so many bytes are put together on the host: one transfer instead of one per layer or expert."""

# As for `Leaf`: transformations rebuild the tree with other nodes, which a run-time check would refuse.
if TYPE_CHECKING:
    Matrix = jax.Array | Q4Tensor
    Gdn = GdnStack | None
else:
    Matrix = Gdn = Any


@flax.struct.dataclass
class AttentionWeights:
    """A attention layers: `q` [A, 2·N_q·Hd, D], `k` and `v` [A, N·Hd, D], `o` [A, D, N_q·Hd].

    `q` holds per query head the Hd rows of the query, then the Hd rows of the gate. `q_norm` and `k_norm` [A, Hd].
    """

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    q_norm: Leaf
    k_norm: Leaf


@flax.struct.dataclass
class MlpWeights:
    """M gated MLPs of inner size F: `gate` and `up` [M, F, D], `down` [M, D, F]."""

    gate: Matrix
    up: Matrix
    down: Matrix


if TYPE_CHECKING:
    Mlp = MlpWeights
else:
    Mlp = Any


@flax.struct.dataclass
class MoeWeights:
    """M mixtures of E experts: `router` [M, E, D], `shared_gate` [M, 1, D], `shared` M MLPs.

    `experts` are M·E MLPs in one stack: expert e of mixture m is number m·E + e.
    """

    router: Leaf
    experts: Mlp
    shared: Mlp
    shared_gate: Leaf


if TYPE_CHECKING:
    Attention = AttentionWeights | None
    Moe = MoeWeights | None
else:
    Attention = Moe = Any


@flax.struct.dataclass
class DecoderWeights:
    """A decoder of L layers: the parts of each kind, stacked in the order of the layers that have them.

    `embed` [vocab, D]; `head` [vocab, D], or None where the embedding serves as head; `norm` [D], before the head;
    `input_norm` and `post_norm` [L, D], before the mixer and before the MLP. Norms hold w, and multiply by 1 + w.
    A kind that no layer has is None.
    """

    embed: Matrix
    norm: Leaf
    input_norm: Leaf
    post_norm: Leaf
    head: Matrix | None = None
    gdn: Gdn = None
    attention: Attention = None
    mlp: Mlp | None = None
    moe: Moe = None

    @property
    def tier(self) -> str:
        """The form of the matrices, one of `TIERS`."""
        if isinstance(self.embed, Q4Tensor):
            return "q4"
        return "bf16" if self.embed.dtype == jnp.bfloat16 else "f32"


_NODES: Mapping[str, Callable[..., Any]] = {
    "gdn": GdnStack,
    "gdn.layers": GdnWeights,
    "gdn.layers.large": lambda **large: _projections(large)(**large),
    "attention": AttentionWeights,
    "mlp": MlpWeights,
    "moe": MoeWeights,
    "moe.experts": MlpWeights,
    "moe.shared": MlpWeights,
}
"""What stands where fields have a dotted path."""


def _projections(large: Mapping[str, Any]) -> type[DenseProjections] | type[Q4Projections]:
    return Q4Projections if any(isinstance(matrix, Q4Tensor) for matrix in large.values()) else DenseProjections


def _same(tensor: Any) -> Any:
    return tensor


class Field(NamedTuple):
    """One weight: its path in a tree such as `DecoderWeights`, its canonical name and shape, and what lies between.

    `{layer}` in the name makes it a stack over the layers whose mixer or MLP is of `kind` (None: all layers), and
    `{expert}` one over their experts too.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    kind: str | None = None
    is_matrix: bool = False
    """Whether the tier decides its form."""
    transform: Callable[[Any], Any] = _same

    @property
    def is_stack(self) -> bool:
        """Whether its leaves have a leading axis."""
        return "{layer}" in self.name

    def layers(self, cfg: DecoderConfig) -> list[int]:
        """The layers that have it, in the order of the stack."""
        kinds = zip(cfg.layer_types, cfg.mlp_types, strict=True)
        return [layer for layer, own in enumerate(kinds) if self.kind is None or self.kind in own]

    def experts(self, cfg: DecoderConfig) -> int:
        """How many there are of it per layer."""
        return cfg.moe.experts if cfg.moe is not None and "{expert}" in self.name else 1

    def of(self, weights: Any) -> Any:
        """The weight of this field among `weights`."""
        return operator.attrgetter(self.path)(weights)


@functools.cache
def table(cfg: DecoderConfig) -> tuple[Field, ...]:
    """Every field of the weights of `cfg`."""
    vector, embedding = (cfg.hidden,), (cfg.vocab, cfg.hidden)
    fields = [
        Field("embed", "embed_tokens.weight", embedding, is_matrix=True),
        Field("norm", "norm.weight", vector),
        Field("input_norm", "layers.{layer}.input_layernorm.weight", vector),
        Field("post_norm", "layers.{layer}.post_attention_layernorm.weight", vector),
    ]
    if not cfg.tied:
        fields.append(Field("head", "lm_head.weight", embedding, is_matrix=True))
    if cfg.gdn is not None:
        fields += _gdn_fields(cfg)
    if cfg.count("full_attention"):
        fields += _attention_fields(cfg)
    if cfg.ffn is not None:
        fields += _mlp_fields("mlp", "layers.{layer}.mlp", "dense", cfg.hidden, cfg.ffn)
    if cfg.moe is not None:
        fields += _moe_fields(cfg)
    return tuple(fields)


def _gdn_fields(cfg: DecoderConfig) -> list[Field]:
    assert cfg.gdn is not None
    return [
        Field(
            f"gdn.layers.{row.field}",
            f"layers.{{layer}}.linear_attn.{row.name}",
            row.shape(cfg.gdn),
            "linear_attention",
            row.is_large,
            row.transform,
        )
        for row in gdn_weights.TABLE
    ]


def _attention_fields(cfg: DecoderConfig) -> list[Field]:
    shapes = {
        "q": (2 * cfg.queries, cfg.hidden),
        "k": (cfg.key_values, cfg.hidden),
        "v": (cfg.key_values, cfg.hidden),
        "o": (cfg.hidden, cfg.queries),
    }
    prefix, kind = "layers.{layer}.self_attn", "full_attention"
    matrices = [Field(f"attention.{m}", f"{prefix}.{m}_proj.weight", shapes[m], kind, True) for m in shapes]
    norms = [Field(f"attention.{n}", f"{prefix}.{n}.weight", (cfg.head_dim,), kind) for n in ("q_norm", "k_norm")]
    return matrices + norms


def _mlp_fields(path: str, prefix: str, kind: str, hidden: int, inner: int) -> list[Field]:
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return [Field(f"{path}.{m}", f"{prefix}.{m}_proj.weight", shape, kind, True) for m, shape in shapes.items()]


def _moe_fields(cfg: DecoderConfig) -> list[Field]:
    assert cfg.moe is not None
    prefix = "layers.{layer}.mlp"
    return [
        Field("moe.router", f"{prefix}.gate.weight", (cfg.moe.experts, cfg.hidden), "moe"),
        Field("moe.shared_gate", f"{prefix}.shared_expert_gate.weight", (1, cfg.hidden), "moe"),
        *_mlp_fields("moe.shared", f"{prefix}.shared_expert", "moe", cfg.hidden, cfg.moe.shared_ffn),
        *_mlp_fields("moe.experts", f"{prefix}.experts.{{expert}}", "moe", cfg.hidden, cfg.moe.ffn),
    ]


@typing.no_type_check
def abstract_decoder(cfg: DecoderConfig, *, tier: str = "f32") -> DecoderWeights:
    """The weights as `jax.ShapeDtypeStruct` leaves.

    Raises:
        TypeError: `cfg` is no DecoderConfig. ValueError: an unknown tier. UnsupportedError: tier "q4", and the columns
        of a matrix do not divide by 32.
    """
    require_kind("cfg", cfg, DecoderConfig)
    return abstract_fields(DecoderWeights, table(cfg), cfg, tier)


def abstract_fields[Tree](root: Callable[..., Tree], fields: Iterable[Field], cfg: DecoderConfig, tier: str) -> Tree:
    """The tree `root` of `fields` as `abstract_decoder` has it; errors too."""
    if tier not in TIERS:
        raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {tier!r}")
    return _assembled(root, {field.path: _abstract_field(field, cfg, tier) for field in fields})


def _abstract_field(field: Field, cfg: DecoderConfig, tier: str) -> Any:
    shape = jax.eval_shape(field.transform, jax.ShapeDtypeStruct(field.shape, jnp.float32)).shape
    if field.is_stack:
        shape = (len(field.layers(cfg)) * field.experts(cfg), *shape)
    if not field.is_matrix or tier != "q4":
        return jax.ShapeDtypeStruct(shape, _MATRIX_DTYPES[tier] if field.is_matrix else jnp.float32)
    if shape[-1] % GROUP:
        name = field.name.format(layer=field.layers(cfg)[0], expert=0)
        raise UnsupportedError(
            f"tier 'q4' needs matrices whose columns divide by {GROUP}, and {name!r} is {list(field.shape)}; "
            "use tier 'bf16' or 'f32'"
        )
    codes = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // CODES_PER_WORD), jnp.uint32)
    scales = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // GROUP), jnp.float16)
    return Q4Tensor(codes=typing.cast(Any, codes), scales=typing.cast(Any, scales))


def _assembled(node: Callable[..., Any], fields: Mapping[str, Any], path: str = "") -> Any:
    """The `node` at `path` from its fields by the rest of their paths."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        own, _, rest = name.partition(".")
        groups.setdefault(own, {})[rest] = value
    places = {name: f"{path}.{name}".removeprefix(".") for name in groups}
    return node(
        **{
            name: group[""] if "" in group else _assembled(_NODES[places[name]], group, places[name])
            for name, group in groups.items()
        }
    )


def of_layer(stack: jax.Array, layer: jax.Array) -> jax.Array:
    """One layer of a stack that is not a matrix of the tier; `layer` must lie in range."""
    return jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False)


def check_decoder_weights(weights: Any, cfg: DecoderConfig) -> None:
    """Refuse weights that are not those of `cfg`, naming the first one that does not fit.

    Raises:
        TypeError: not DecoderWeights, or a leaf of another dtype. ValueError: a leaf of another shape, or parts that
        the configuration does not have, or lacks.
    """
    require_kind("weights", weights, DecoderWeights)
    want = abstract_decoder(cfg, tier=weights.tier)
    for name in vars(want):
        if (getattr(weights, name) is None) != (getattr(want, name) is None):
            state = "have no" if getattr(weights, name) is None else "have"
            raise ValueError(f"the weights {state} {name!r}, unlike the configuration; load both together")
    for field in table(cfg):
        _check_weight(field.path, field.of(weights), field.of(want))


def _check_weight(path: str, got: Any, want: Any) -> None:
    if isinstance(want, Q4Tensor):
        require_kind(f"weights.{path}", got, Q4Tensor)
        _check_weight(f"{path}.codes", got.codes, want.codes)
        _check_weight(f"{path}.scales", got.scales, want.scales)
        return
    require_array(f"weights.{path}", got, str(want.dtype))
    if got.shape != want.shape:
        raise ValueError(f"weights.{path} must have shape {want.shape} for this configuration, got {got.shape}")


@typing.no_type_check
def load_decoder(
    path, *, tier: str = "f32", quantiser: str = "absmax", progress: Watcher | None = None
) -> tuple[DecoderConfig, DecoderWeights]:
    """Read a whole model: a Hugging Face directory, a GGUF file or a converted checkpoint.

    Tier "f32" widens what is stored, exactly; "bf16" rounds to nearest; "q4" takes 4-bit matrices as they are stored,
    bit for bit, and quantises the others by `quantiser` (see `quantize`). Tensor by tensor to the device: the host
    holds one at a time, or 64 MiB of small ones. `progress` is called after each with `convert.Progress`, in bytes of
    the result.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not hold the model of its configuration; shapes are compared
            before any data is read. ValueError: an unknown tier or quantiser. UnsupportedError: as `abstract_decoder`
            and `DecoderConfig.from_hf`.
    """
    with checkpoints.open_checkpoint(path) as checkpoint:
        return read_decoder(checkpoint, tier=tier, quantiser=quantiser, progress=progress)


@typing.no_type_check
def read_decoder(
    checkpoint: checkpoints.Checkpoint,
    *,
    tier: str = "f32",
    quantiser: str = "absmax",
    progress: Watcher | None = None,
) -> tuple[DecoderConfig, DecoderWeights]:
    """`load_decoder` from an open checkpoint, which stays open."""
    cfg = DecoderConfig.from_hf(checkpoint.config)
    weights = read_fields(
        DecoderWeights,
        table(cfg),
        cfg,
        checkpoint,
        names=checkpoint.names(),
        tied={_HEAD: _EMBEDDING} if cfg.tied else {},
        tier=tier,
        quantiser=quantiser,
        progress=progress,
    )
    return cfg, weights


_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def read_fields[Tree](
    root: Callable[..., Tree],
    fields: Sequence[Field],
    cfg: DecoderConfig,
    checkpoint: checkpoints.Checkpoint,
    *,
    names: Iterable[str],
    tied: Mapping[str, str] = _NOTHING,
    tier: str,
    quantiser: str,
    progress: Watcher | None,
) -> Tree:
    """The tree `root` of `fields`, out of the tensors `names`, each of which must have a place in it.

    Of `tied`, the first may be there too if it is equal to the second.

    Raises:
        As `load_decoder`.
    """
    if quantiser not in METHODS:
        raise ValueError(f"quantiser must be one of {', '.join(METHODS)}, got {quantiser!r}")
    shapes, names = abstract_fields(root, fields, cfg, tier), frozenset(names)
    pieces = {field.path: list(_pieces(field, cfg, names)) for field in fields}
    _check_tensors(checkpoint, names, [piece for group in pieces.values() for piece in group], tied)
    nbytes = sum(map(_nbytes, jax.tree.leaves(shapes)))
    total = sum(map(len, pieces.values()))
    loader = _Loader(checkpoint, quantiser, progress, Progress(total, total, nbytes, nbytes))
    return _assembled(root, {field.path: loader.field(field, field.of(shapes), pieces[field.path]) for field in fields})


class _Piece(NamedTuple):
    """A stored tensor of `shape` that holds a field's stack from entry `start` on: one entry, or several.

    Where it is several, `rows` are the rows of each that belong to the field; None where it is one.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    rows: slice | None = None

    def entries(self, stored: np.ndarray) -> np.ndarray:
        """The entries out of the stored tensor, along a new or its own leading axis."""
        return stored[None] if self.rows is None else stored[:, self.rows]


def _pieces(field: Field, cfg: DecoderConfig, names: frozenset[str]) -> Iterator[_Piece]:
    """Where the entries of a field lie. Experts lie in tensors of their own, or all of a layer in one."""
    if not field.is_stack:
        yield _Piece(field.name, field.shape)
        return
    experts = field.experts(cfg)
    for slot, layer in enumerate(field.layers(cfg)):
        joined = _joined_experts(field, layer, experts)
        if joined is not None and joined.name in names:
            yield joined._replace(start=slot * experts)
            continue
        for expert in range(experts):
            name = field.name.format(layer=layer, expert=expert)
            yield _Piece(name, field.shape, slot * experts + expert)


def _joined_experts(field: Field, layer: int, experts: int) -> _Piece | None:
    """The tensor that would hold this matrix of all experts of a layer: the gate's rows first, then those of up."""
    prefix, of_expert, _ = field.name.partition(".{expert}")
    if not of_expert:
        return None
    prefix, (outputs, inputs) = prefix.format(layer=layer), field.shape
    if field.path.endswith(".down"):
        return _Piece(f"{prefix}.down_proj", (experts, outputs, inputs), 0, slice(None))
    first = 0 if field.path.endswith(".gate") else outputs
    return _Piece(f"{prefix}.gate_up_proj", (experts, 2 * outputs, inputs), 0, slice(first, first + outputs))


def _check_tensors(
    checkpoint: checkpoints.Checkpoint, names: frozenset[str], pieces: list[_Piece], tied: Mapping[str, str]
) -> None:
    """Everything is there, in the right shape, and nothing else is."""
    expected = {piece.name: piece.shape for piece in pieces}
    copies = {name: original for name, original in tied.items() if name in names}
    if missing := [f"{name} {list(shape)}" for name, shape in expected.items() if name not in names]:
        raise CheckpointError(f"{checkpoint.source} lacks {len(missing)} tensors of this model: {listed(missing)}")
    expected |= {name: expected[original] for name, original in copies.items()}
    if unknown := sorted(names - expected.keys()):
        raise CheckpointError(
            f"{checkpoint.source}: {len(unknown)} tensors have no place in this model: {listed(unknown)}"
        )
    for name, shape in expected.items():
        if (got := checkpoint.info(name).shape) != shape:
            raise CheckpointError(
                f"{checkpoint.source}: tensor {name!r} must have shape {list(shape)}, got {list(got)}"
            )
    # Some programs save the shared matrix twice; another one under this name would be lost in silence.
    for name, original in copies.items():
        if not np.array_equal(checkpoint.read(name), checkpoint.read(original)):
            raise CheckpointError(
                f"{checkpoint.source}: tie_word_embeddings is set, but {name!r} is not equal to {original!r}"
            )


class _Loader:
    """Moves stored tensors to the device, piece by piece, and says how far it is."""

    def __init__(self, checkpoint: checkpoints.Checkpoint, quantiser: str, progress: Watcher | None, total: Progress):
        self._checkpoint = checkpoint
        self._quantiser = quantiser
        self._progress = progress
        self._done = total._replace(tensors=0, nbytes=0)

    def field(self, field: Field, want: Any, pieces: list[_Piece]) -> Any:
        """One field: in buffers on the device or, where it is small, on the host, to be moved in one go."""
        leaves, kind = jax.tree.flatten(want)
        on_host = sum(map(_nbytes, leaves)) <= _MOVED_WHOLE
        make, put = (np.empty, _put_on_host) if on_host else (jnp.zeros, _put_on_device)
        buffers: list[Any] = [make(leaf.shape, leaf.dtype) for leaf in leaves]
        for piece in pieces:
            parts = self._parts(field, piece, quantised=isinstance(want, Q4Tensor))
            parts = [part if field.is_stack else part[0] for part in parts]
            filled = [put(buffer, part, np.int32(piece.start)) for buffer, part in zip(buffers, parts, strict=True)]
            buffers = [buffer for buffer, _ in filled]
            # Waiting here also keeps the host from running ahead, with one more tensor in memory each time.
            if not all(bool(finite) for _, finite in filled):
                raise CheckpointError(f"{self._checkpoint.source}: tensor {piece.name!r} holds NaN or inf")
            self._count(sum(buffer.dtype.itemsize * part.size for buffer, part in zip(buffers, parts, strict=True)))
        return kind.unflatten([jnp.asarray(buffer) for buffer in buffers])

    def _parts(self, field: Field, piece: _Piece, *, quantised: bool) -> tuple[np.ndarray, ...]:
        """The entries of a piece as the leaves of the field take them."""
        name, checkpoint = piece.name, self._checkpoint
        if quantised and checkpoint.info(name).dtype == "Q4_0":
            return tuple(piece.entries(leaf) for leaf in checkpoint.read_words(name))
        stored = checkpoint.read(name)
        if stored.dtype.name not in _READABLE:
            raise CheckpointError(
                f"{checkpoint.source}: tensor {name!r} must be {', '.join(_READABLE)} or 4-bit, got {stored.dtype}"
            )
        entries = piece.entries(field.transform(stored))
        if not quantised:
            return (entries,)
        try:
            return quantize_words(np.ascontiguousarray(entries), self._quantiser)
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.source}: tensor {name!r} cannot be quantised: {error}") from error

    def _count(self, nbytes: int) -> None:
        self._done = self._done._replace(tensors=self._done.tensors + 1, nbytes=self._done.nbytes + nbytes)
        if self._progress is not None:
            self._progress(self._done)


def _nbytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _put_on_host(buffer: np.ndarray, part: np.ndarray, start: np.int32) -> tuple[np.ndarray, bool]:
    """`part` written into `buffer` from entry `start` on, and whether all of it is finite."""
    buffer[start : start + len(part)] = part
    return buffer, part.dtype.kind == "u" or bool(np.isfinite(part).all())


@functools.partial(jax.jit, donate_argnames=("buffer",))
def _put_on_device(buffer: jax.Array, part: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_put_on_host` for a buffer on the device."""
    finite = jnp.bool_(True) if part.dtype == jnp.uint32 else jnp.isfinite(part).all()
    at = (start, *(jnp.int32(0),) * (buffer.ndim - 1))
    return jax.lax.dynamic_update_slice(buffer, part.astype(buffer.dtype), at), finite
