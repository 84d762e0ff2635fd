"""The weights of GDN layers as pytrees, filled from canonical tensors by one table."""

import dataclasses
import operator
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

import checkpoints
from checkpoints.hf_config import GdnDims, gdn_layers
from checkpoints.names import gdn_prefix, gdn_shapes
from gdn_jax.axes import Leaf
from gdn_jax.config import GdnConfig
from gdn_jax.errors import CheckpointError, UnsupportedError
from gdn_jax.require import require_config, require_kind

__all__ = [
    "TABLE",
    "DenseProjections",
    "GdnStack",
    "GdnWeights",
    "abstract",
    "from_canonical",
    "load_config",
    "load_layer",
    "load_stack",
    "read_layer",
]


@flax.struct.dataclass
class DenseProjections:
    """The three large projections in float32: `qkv` [C, D], `z` [H·V, D], `out` [D, H·V]."""

    qkv: Leaf
    z: Leaf
    out: Leaf


@flax.struct.dataclass
class GdnWeights:
    """The weights of one GDN layer; they serve any slot of a state.

    `large`: the three large projections, all of one tier. The rest is small and always float32: `b` and `a` [H, D]
    (`in_proj_b` makes beta, `in_proj_a` makes the decay), `conv` [C, W], `A_log` and `dt_bias` [H], `norm` [V].
    """

    large: DenseProjections
    b: Leaf
    a: Leaf
    conv: Leaf
    A_log: Leaf
    dt_bias: Leaf
    norm: Leaf


@flax.struct.dataclass
class GdnStack:
    """The weights of L layers of one tier: `layers` is a `GdnWeights` whose every leaf has a leading axis L."""

    layers: GdnWeights

    def __len__(self) -> int:
        return self.layers.A_log.shape[0]

    def layer(self, index: int | jax.Array) -> GdnWeights:
        """The weights of one layer; `index` may be traced, and must then lie in range."""
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), self.layers)


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
def abstract(cfg: GdnConfig, *, layers: int | None = None) -> GdnWeights:
    """The weights as `jax.ShapeDtypeStruct` leaves; with `layers`, every leaf has a leading axis of that size."""
    require_config(cfg)
    lead = () if layers is None else (layers,)

    def leaf(row: Row) -> jax.ShapeDtypeStruct:
        shape = jax.eval_shape(row.transform, jax.ShapeDtypeStruct(row.shape(cfg), jnp.float32)).shape
        return jax.ShapeDtypeStruct(lead + shape, jnp.float32)

    return _assemble({row.field: leaf(row) for row in TABLE})


@typing.no_type_check
def from_canonical(cfg: GdnConfig, tensors: Mapping[str, Any]) -> GdnWeights:
    """One layer's weights from tensors under their canonical names (`in_proj_qkv.weight`, …), in the file's layout.

    float16 and bfloat16 widen to float32 exactly.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape or dtype, or holds NaN or inf.
    """
    require_config(cfg)
    require_kind("tensors", tensors, Mapping)
    return _build(cfg, tensors, "the given tensors")


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
def load_layer(path, *, layer: int, tier: str = "f32") -> GdnWeights:
    """Read one GDN layer of a checkpoint; only its bytes are touched.

    `layer` counts GDN layers only (0 … 47 for the 27B model), not the model's layers.

    Raises:
        CheckpointError: the checkpoint is damaged or does not hold this layer in the shapes of its configuration.
        ValueError: `layer` is out of range. UnsupportedError: an unknown tier.
    """
    _check_tier(tier)
    return _build(*read_layer(path, layer=layer), f"{path}, GDN layer {layer}")


@typing.no_type_check
def load_stack(path, *, layers: Sequence[int] | None = None, tier: str = "f32") -> GdnStack:
    """Read several GDN layers (all of them by default) into one stack.

    `layers` are GDN ordinals in stack order. Host memory peaks at one stacked field above the result.

    Raises:
        As `load_layer`.
    """
    _check_tier(tier)
    with checkpoints.open_checkpoint(path) as checkpoint:
        chosen = range(len(gdn_layers(checkpoint.config))) if layers is None else list(layers)
        if not chosen:
            raise ValueError("layers must name at least one GDN layer, got none")
        cfg, prefixes = _locate(checkpoint, chosen)
        shapes = abstract(cfg, layers=len(prefixes))

        def field(row: Row) -> jax.Array:
            buffer = np.empty(row.of(shapes).shape, np.float32)
            for slot, prefix in enumerate(prefixes):
                buffer[slot] = _convert(row, checkpoint.read(prefix + row.name), f"{path}, GDN layer {chosen[slot]}")
            return jnp.asarray(buffer)

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


def _build(cfg: GdnConfig, tensors: Mapping[str, Any], where: str) -> GdnWeights:
    _check_shapes(cfg, {name: tuple(np.shape(tensor)) for name, tensor in tensors.items()}, where)
    return _assemble({row.field: jnp.asarray(_convert(row, tensors[row.name], where)) for row in TABLE})


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


def _assemble(fields: Mapping[str, Any]) -> GdnWeights:
    large = {field.removeprefix("large."): value for field, value in fields.items() if field.startswith("large.")}
    small = {field: value for field, value in fields.items() if not field.startswith("large.")}
    return GdnWeights(large=DenseProjections(**large), **small)


def _check_tier(tier: str) -> None:
    if tier != "f32":
        raise UnsupportedError(f"tier must be 'f32', got {tier!r}")
