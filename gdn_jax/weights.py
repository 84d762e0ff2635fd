"""The weights of GDN layers as pytrees, filled from canonical tensors by one table."""

import dataclasses
import operator
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

import checkpoints
from checkpoints.hf_config import GdnDims, gdn_layers
from checkpoints.names import gdn_prefix, gdn_shapes
from checkpoints.q4_blocks import Q4Words
from gdn_jax.axes import Leaf
from gdn_jax.config import GdnConfig
from gdn_jax.errors import CheckpointError, UnsupportedError
from gdn_jax.fence import fence
from gdn_jax.q4 import CODES_PER_WORD, GROUP, METHODS, Q4Tensor, quantize, quantize_words
from gdn_jax.require import require_config, require_kind

__all__ = [
    "TABLE",
    "DenseProjections",
    "GdnStack",
    "GdnWeights",
    "Q4Projections",
    "abstract",
    "from_canonical",
    "load_config",
    "load_layer",
    "load_stack",
    "read_layer",
]


TIERS = ("f32", "q4")


# As for `Leaf`: transformations rebuild the tree with other nodes, which a run-time check would refuse.
if TYPE_CHECKING:
    Matrix = Q4Tensor
else:
    Matrix = Any


@flax.struct.dataclass
class DenseProjections:
    """The three large projections in float32: `qkv` [C, D], `z` [H·V, D], `out` [D, H·V]."""

    qkv: Leaf
    z: Leaf
    out: Leaf


@flax.struct.dataclass
class Q4Projections:
    """The three large projections in 4 bits: `qkv` [C, D], `z` [H·V, D], `out` [D, H·V], each a `Q4Tensor`."""

    qkv: Matrix
    z: Matrix
    out: Matrix


if TYPE_CHECKING:
    Large = DenseProjections | Q4Projections
else:
    Large = Any


@flax.struct.dataclass
class GdnWeights:
    """The weights of one GDN layer; they serve any slot of a state.

    `large`: the three large projections, all in float32 or all in 4 bits: a layer of half a tier, or of both, has no
    representation. The rest is small and always float32: `b` and `a` [H, D] (`in_proj_b` makes beta, `in_proj_a` makes
    the decay), `conv` [C, W], `A_log` and `dt_bias` [H], `norm` [V].
    """

    large: Large
    b: Leaf
    a: Leaf
    conv: Leaf
    A_log: Leaf
    dt_bias: Leaf
    norm: Leaf

    @property
    def tier(self) -> str:
        """The form of the large projections, one of `TIERS`."""
        return "q4" if isinstance(self.large, Q4Projections) else "f32"


if TYPE_CHECKING:
    Layers = GdnWeights
else:
    Layers = Any


@flax.struct.dataclass
class GdnStack:
    """The weights of L layers of one tier: `layers` is a `GdnWeights` whose every leaf has a leading axis L."""

    layers: Layers

    def __len__(self) -> int:
        return self.layers.A_log.shape[0]

    def layer(self, index: int | jax.Array) -> GdnWeights:
        """The weights of one layer; `index` may be traced, and must then lie in range.

        The small tensors are fenced: fused with its neighbours, the slicing would change how they are
        rounded, and a stack would no longer give the bits of the same weights alone. The large ones are read in place.
        """
        taken = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), self.layers)
        small = {row.field: row.of(taken) for row in TABLE if not row.is_large}
        return taken.replace(**fence(small))


def _same(tensor: Any) -> Any:
    return tensor


def _squeeze_channel(tensor: Any) -> Any:
    """[C, 1, W] -> [C, W]: a depthwise kernel has one input channel."""
    return tensor[:, 0, :]


class Row(NamedTuple):
    """One weight: its canonical name, its field (dotted below `GdnWeights`), what turns the file's layout into ours."""

    name: str
    field: str
    transform: Callable[[Any], Any] = _same

    def shape(self, cfg: GdnConfig) -> tuple[int, ...]:
        """The shape in a file."""
        return gdn_shapes(GdnDims(**dataclasses.asdict(cfg)))[self.name]

    @property
    def is_large(self) -> bool:
        """Whether the tier decides its form."""
        return self.field.startswith("large.")

    def of(self, weights: GdnWeights) -> Any:
        """The weight of this row among `weights`."""
        return operator.attrgetter(self.field)(weights)


TABLE = (
    Row("in_proj_qkv.weight", "large.qkv"),
    Row("in_proj_z.weight", "large.z"),
    Row("out_proj.weight", "large.out"),
    Row("in_proj_b.weight", "b"),
    Row("in_proj_a.weight", "a"),
    Row("conv1d.weight", "conv", _squeeze_channel),
    Row("A_log", "A_log"),
    Row("dt_bias", "dt_bias"),
    Row("norm.weight", "norm"),
)


@typing.no_type_check
def abstract(cfg: GdnConfig, *, layers: int | None = None, tier: str = "f32") -> GdnWeights:
    """The weights as `jax.ShapeDtypeStruct` leaves; with `layers`, every leaf has a leading axis of that size.

    Raises:
        ValueError: an unknown tier. UnsupportedError: tier "q4", and the columns of a projection do not divide by 32.
    """
    require_config(cfg)
    _check_tier(tier, cfg)
    lead = () if layers is None else (layers,)

    def leaf(row: Row) -> Any:
        shape = lead + jax.eval_shape(row.transform, jax.ShapeDtypeStruct(row.shape(cfg), jnp.float32)).shape
        if tier == "q4" and row.is_large:
            codes, scales = (*shape[:-1], shape[-1] // CODES_PER_WORD), (*shape[:-1], shape[-1] // GROUP)
            leaves: list[Any] = [jax.ShapeDtypeStruct(codes, jnp.uint32), jax.ShapeDtypeStruct(scales, jnp.float16)]
            return Q4Tensor(*leaves)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return _assemble({row.field: leaf(row) for row in TABLE})


@typing.no_type_check
def from_canonical(
    cfg: GdnConfig, tensors: Mapping[str, Any], *, tier: str = "f32", quantiser: str = "absmax"
) -> GdnWeights:
    """One layer's weights from tensors under their canonical names (`in_proj_qkv.weight`, …), in the file's layout.

    float16 and bfloat16 widen to float32 exactly; tier "q4" then quantises the three large projections by `quantiser`
    (see `quantize`).

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape or dtype, or holds NaN or inf.
        ValueError: an unknown tier or quantiser. UnsupportedError: as `abstract`.
    """
    require_config(cfg)
    require_kind("tensors", tensors, Mapping)
    _check_tier(tier, cfg)
    where = "the given tensors"
    _check_shapes(cfg, {name: tuple(np.shape(tensor)) for name, tensor in tensors.items()}, where)

    def field(row: Row) -> Any:
        array = _convert(row, tensors[row.name], where)
        return quantize(array, quantiser) if tier == "q4" and row.is_large else jnp.asarray(array)

    return _assemble({row.field: field(row) for row in TABLE})


@typing.no_type_check
def load_config(path) -> GdnConfig:
    """The GDN geometry of a checkpoint (see `GdnConfig.from_hf`)."""
    with checkpoints.open_checkpoint(path) as checkpoint:
        return GdnConfig.from_hf(checkpoint.config)


@typing.no_type_check
def read_layer(path, *, layer: int) -> tuple[GdnConfig, dict[str, np.ndarray]]:
    """One GDN layer of a checkpoint: its geometry, and canonical name -> array in the file's dtype and layout.

    Only this layer's bytes are touched, and those only after the shapes of all its tensors are known to fit.

    Raises:
        As `load_layer`.
    """
    with checkpoints.open_checkpoint(path) as checkpoint:
        cfg, (prefix,) = _locate(checkpoint, [layer])
        return cfg, {row.name: checkpoint.read(prefix + row.name) for row in TABLE}


@typing.no_type_check
def load_layer(path, *, layer: int, tier: str = "f32", quantiser: str = "absmax") -> GdnWeights:
    """Read one GDN layer of a checkpoint; only its bytes are touched.

    `layer` counts GDN layers only (0 … 47 for the 27B model), not the model's layers. Tier "q4" takes 4-bit projections
    as they are stored, bit for bit, and quantises others by `quantiser` (see `quantize`); it is refused before any work
    where one of the three cannot be had. Tier "f32" dequantises what is stored in 4 bits, exactly.

    Raises:
        CheckpointError: the checkpoint is damaged or does not hold this layer in the shapes of its configuration.
        ValueError: `layer` is out of range; an unknown tier or quantiser. UnsupportedError: as `abstract`.
    """
    stack = load_stack(path, layers=[layer], tier=tier, quantiser=quantiser)
    return jax.tree.map(lambda leaf: leaf[0], stack.layers)


@typing.no_type_check
def load_stack(path, *, layers: Sequence[int] | None = None, tier: str = "f32", quantiser: str = "absmax") -> GdnStack:
    """Read several GDN layers (all of them by default) into one stack of one tier.

    `layers` are GDN ordinals in stack order. Host memory peaks at one stacked field above the result.

    Raises:
        As `load_layer`.
    """
    with checkpoints.open_checkpoint(path) as checkpoint:
        chosen = range(len(gdn_layers(checkpoint.config))) if layers is None else list(layers)
        if not chosen:
            raise ValueError("layers must name at least one GDN layer, got none")
        cfg, prefixes = _locate(checkpoint, chosen)
        if quantiser not in METHODS:
            raise ValueError(f"quantiser must be one of {', '.join(METHODS)}, got {quantiser!r}")
        shapes = abstract(cfg, layers=len(prefixes), tier=tier)

        def field(row: Row) -> Any:
            """One field of all layers: every leaf of it is filled in a buffer of its own, then moved to the device."""
            leaves, kind = jax.tree.flatten(row.of(shapes))
            buffers = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
            for slot, prefix in enumerate(prefixes):
                where = f"{path}, GDN layer {chosen[slot]}"
                if tier == "q4" and row.is_large:
                    parts = _read_q4(checkpoint, prefix, row, where, quantiser)
                else:
                    parts = (_convert(row, checkpoint.read(prefix + row.name), where),)
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer[slot] = part
            return kind.unflatten([jnp.asarray(buffer) for buffer in buffers])

        return GdnStack(_assemble({row.field: field(row) for row in TABLE}))


def _locate(checkpoint: checkpoints.Checkpoint, layers: Sequence[Any]) -> tuple[GdnConfig, list[str]]:
    """The configuration and the name prefixes of GDN layers, after checking every shape and before reading any data."""
    cfg = GdnConfig.from_hf(checkpoint.config)
    numbers = gdn_layers(checkpoint.config)
    prefixes = []
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not 0 <= layer < len(numbers):
            raise ValueError(
                f"layer must be a GDN ordinal in 0 … {len(numbers) - 1} ({checkpoint.source} has {len(numbers)} GDN "
                f"layers), got {layer!r}"
            )
        prefixes.append(gdn_prefix(numbers[layer]))
    names = checkpoint.names()
    for prefix in prefixes:
        shapes = {n.removeprefix(prefix): checkpoint.info(n).shape for n in names if n.startswith(prefix)}
        _check_shapes(cfg, shapes, f"{checkpoint.source}, {prefix}*")
    return cfg, prefixes


def _check_shapes(cfg: GdnConfig, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    known = {row.name: row.shape(cfg) for row in TABLE}
    for name in shapes.keys() - known.keys():
        raise CheckpointError(f"{where}: unknown tensor {name!r}; a GDN layer has {', '.join(known)}")
    for name, want in known.items():
        if name not in shapes:
            raise CheckpointError(f"{where}: tensor {name!r} {want} is missing")
        if tuple(shapes[name]) != want:
            raise CheckpointError(f"{where}: tensor {name!r} must have shape {want}, got {tuple(shapes[name])}")


def _convert(row: Row, tensor: Any, where: str) -> np.ndarray:
    """A tensor in the file's layout as float32 in ours, refusing what no layer can work with."""
    array = np.asarray(tensor)
    if array.dtype.name not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(f"{where}: tensor {row.name!r} must be float32, float16 or bfloat16, got {array.dtype}")
    array = np.ascontiguousarray(row.transform(array), dtype=np.float32)
    finite = np.isfinite(array)
    if not finite.all():
        bad = array.size - np.count_nonzero(finite)
        raise CheckpointError(f"{where}: tensor {row.name!r} holds {bad} NaN or inf among {array.size} values")
    return array


def _read_q4(checkpoint: checkpoints.Checkpoint, prefix: str, row: Row, where: str, quantiser: str) -> Q4Words:
    """A large projection as device words and scales: as stored where it is stored in 4 bits, else quantised."""
    name = prefix + row.name
    if checkpoint.info(name).dtype == "Q4_0":
        return checkpoint.read_words(name)
    return quantize_words(_convert(row, checkpoint.read(name), where), quantiser)


def _assemble(fields: Mapping[str, Any]) -> GdnWeights:
    large = {field.removeprefix("large."): value for field, value in fields.items() if field.startswith("large.")}
    small = {field: value for field, value in fields.items() if not field.startswith("large.")}
    kind = Q4Projections if all(isinstance(value, Q4Tensor) for value in large.values()) else DenseProjections
    return GdnWeights(large=kind(**large), **small)


def _check_tier(tier: str, cfg: GdnConfig) -> None:
    if tier not in TIERS:
        raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {tier!r}")
    if tier == "q4" and (cfg.hidden % GROUP or cfg.value_channels % GROUP):
        raise UnsupportedError(
            f"tier 'q4' needs projections whose columns divide by {GROUP}: D={cfg.hidden}, H·V={cfg.value_channels}; "
            "use tier 'f32'"
        )
