"""Hugging Face directories: `config.json` beside `model.safetensors`, or beside shards and their index."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np

from checkpoints.base import Checkpoint, TensorInfo
from checkpoints.errors import CheckpointError
from checkpoints.hf_config import GdnDims, gdn_dims, gdn_layers, text_config
from checkpoints.interleave import deinterleaved_rows, interleaved_shapes
from checkpoints.names import (
    INTERLEAVED_NAMES,
    PROJECTION_NAMES,
    STORED_GDN_NAMES,
    Vocabulary,
    gdn_prefix,
    gdn_shapes,
    is_mtp,
    kind_outside_text,
    listed,
    mtp_objection,
    unprefixed,
)
from checkpoints.safetensors_file import DTYPES, SafetensorsFile, StoredTensor
from checkpoints.strict_json import read_json

__all__ = ["open_hf"]

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")


class _Part(NamedTuple):
    """A canonical tensor as the byte spans of a stored one, concatenated."""

    shape: tuple[int, ...]
    stored: StoredTensor
    spans: tuple[range, ...]

    @classmethod
    def whole(cls, stored: StoredTensor, shape: tuple[int, ...] | None = None) -> "_Part":
        span = range(stored.start, stored.start + stored.nbytes)
        return cls(stored.shape if shape is None else shape, stored, (span,))

    @classmethod
    def rows(cls, stored: StoredTensor, shape: tuple[int, ...], rows: Iterable[range]) -> "_Part":
        width = stored.nbytes // stored.shape[0]
        spans = (range(stored.start + run.start * width, stored.start + run.stop * width) for run in rows)
        return cls(shape, stored, tuple(spans))


class _HfCheckpoint(Checkpoint):
    def __init__(
        self,
        source: str,
        config: Mapping[str, Any],
        skipped: Mapping[str, list[str]],
        *,
        parts: dict[str, _Part],
        files: contextlib.ExitStack,
    ):
        super().__init__(source, config, skipped)
        self._parts = parts
        self._files = files

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self._parts if not is_mtp(name)))

    def mtp_names(self) -> tuple[str, ...]:
        return tuple(sorted(filter(is_mtp, self._parts)))

    def info(self, name: str) -> TensorInfo:
        part = self._part(name)
        return TensorInfo(part.shape, DTYPES[part.stored.dtype].name)

    def read(self, name: str) -> np.ndarray:
        part = self._part(name)
        tensor = np.empty(part.shape, DTYPES[part.stored.dtype])
        part.stored.file.read_into(tensor.reshape(-1).view(np.uint8), part.spans, f"tensor {part.stored.name!r}")
        return tensor

    def close(self) -> None:
        self._files.close()

    def _part(self, name: str) -> _Part:
        if name not in self._parts:
            raise CheckpointError(f"{self.source}: no tensor {name!r} among its {len(self._parts)} canonical names")
        return self._parts[name]


def open_hf(path: str | os.PathLike[str], *, mtp: bool = False) -> Checkpoint:
    """Open a Hugging Face directory of Qwen3.5 or Qwen3-Next, nested or text-only, in one file or in shards.

    Reads the configuration, the index and the headers, never tensor data. Projections interleaved as in Qwen3-Next are
    offered in the canonical layout; which layout a layer has is seen from its tensors. A convolution stored as [C, W]
    is offered as [C, 1, W], unless C = W, where [W, C] could not be told from it. `mtp` as in `open_checkpoint`.

    Raises:
        CheckpointError: a file is missing or damaged, files disagree with each other or with the configuration, a
            tensor is unknown, missing, misshapen or of an unsupported dtype, or the directory is of another kind.
    """
    folder = Path(path)
    config, dims, vocabulary = _read_config(folder / CONFIG_FILE)
    files = contextlib.ExitStack()
    try:
        shards = _open_shards(folder, files)
        tensors, skipped = _wanted_tensors(str(folder), shards, vocabulary, mtp)
        parts = _canonical_parts(str(folder), dims, gdn_layers(config), tensors)
        return _HfCheckpoint(str(folder), config, skipped, parts=parts, files=files)
    except BaseException:
        files.close()
        raise


def _read_config(path: Path) -> tuple[dict[str, Any], GdnDims, Vocabulary]:
    raw = read_json(path)
    try:
        config = text_config(raw)
        return config, gdn_dims(config), Vocabulary(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _open_shards(folder: Path, files: contextlib.ExitStack) -> list[SafetensorsFile]:
    """Open every weight file, each checked against the index where there is one."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.exists():
        shard_of = _read_index(index)
        names = sorted(set(shard_of.values()))
        if single.exists() and SINGLE_FILE not in names:
            raise CheckpointError(f"{folder}: {INDEX_FILE} does not mention {SINGLE_FILE}; remove whichever is stale")
    elif single.exists():
        shard_of, names = None, [SINGLE_FILE]
    else:
        raise CheckpointError(f"{folder}: {_what_is_there_instead(folder)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: missing shards of {INDEX_FILE}: {listed(missing)}; is the download complete?")
    shards = [files.enter_context(SafetensorsFile(folder / name)) for name in names]
    _refuse_mlx(shards)
    if shard_of is not None:
        _check_index(index, shard_of, shards)
    return shards


def _what_is_there_instead(folder: Path) -> str:
    expected = f"expected {SINGLE_FILE}, or shards with {INDEX_FILE}"
    found = sorted(entry.name for entry in folder.iterdir())
    pickles = [name for name in found if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return f"only pickled weights ({listed(pickles)}), which run code when loaded; {expected}: save as safetensors"
    loose = [name for name in found if name.endswith(".safetensors")]
    return f"{expected}; found {listed(loose)} without an index" if loose else f"no weights: {expected}"


def _read_index(path: Path) -> dict[str, str]:
    """`weight_map` of the index: tensor name -> shard file name, which must lie in the same directory."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected 'weight_map' to map tensor names to shard files")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_shard_name(shard):
            raise CheckpointError(
                f"{path}: tensor {tensor!r}: expected a .safetensors file in the same directory, got {shard!r}"
            )
    return weight_map


def _is_plain_shard_name(name: str) -> bool:
    return name.endswith(".safetensors") and PurePosixPath(name).name == PureWindowsPath(name).name == name


def _check_index(index: Path, shard_of: Mapping[str, str], shards: Iterable[SafetensorsFile]) -> None:
    """Every tensor is in exactly the shard that the index names, and no shard holds another."""
    found: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in found:
                raise CheckpointError(f"{index.parent}: tensor {name!r} is in both {found[name]} and {shard.path.name}")
            found[name] = shard.path.name
    for name in sorted(shard_of.keys() | found.keys()):
        if shard_of.get(name) != found.get(name):
            raise CheckpointError(
                f"{index}: tensor {name!r} is listed in {shard_of.get(name, 'no shard')} "
                f"and found in {found.get(name, 'no shard')}"
            )


def _refuse_mlx(shards: Iterable[SafetensorsFile]) -> None:
    for shard in shards:
        if shard.metadata.get("format") == "mlx":
            raise CheckpointError(
                f"{shard.path}: saved by MLX, whose conversion adds 1 to the norm weights and transposes the "
                "convolutions; open the original Hugging Face checkpoint"
            )


def _wanted_tensors(
    source: str, shards: Iterable[SafetensorsFile], vocabulary: Vocabulary, mtp: bool
) -> tuple[dict[str, StoredTensor], dict[str, list[str]]]:
    """The tensors of the text model, and with `mtp` of its head, by unprefixed name; stored names of others by kind."""
    tensors: dict[str, StoredTensor] = {}
    skipped: dict[str, list[str]] = {}
    objections: list[str] = []
    for stored in (tensor for shard in shards for tensor in shard.tensors.values()):
        name = unprefixed(stored.name)
        wanted = mtp and is_mtp(name)
        if not wanted and (kind := kind_outside_text(name)):
            skipped.setdefault(kind, []).append(stored.name)
        elif not wanted and (objection := vocabulary.objection(name)):
            objections.append(f"{stored.name!r} ({objection})")
        elif name in tensors:
            raise CheckpointError(f"{source}: {tensors[name].name!r} and {stored.name!r} are both {name!r}")
        elif stored.dtype not in DTYPES:
            raise CheckpointError(f"{stored}: dtype {stored.dtype}; supported are {', '.join(DTYPES)}")
        else:
            tensors[name] = stored
    if objections:
        raise CheckpointError(f"{source}: {len(objections)} tensors have no place in this model: {listed(objections)}")
    head = list(filter(is_mtp, tensors))
    if head and (objection := mtp_objection(head)):
        raise CheckpointError(f"{source}: {objection}")
    return tensors, skipped


def _canonical_parts(
    source: str, dims: GdnDims, layers: Iterable[int], tensors: Mapping[str, StoredTensor]
) -> dict[str, _Part]:
    """Every canonical tensor; those of GDN layers are checked against the geometry, the others pass as they are."""
    rest = dict(tensors)
    parts: dict[str, _Part] = {}
    for layer in layers:
        prefix = gdn_prefix(layer)
        own = {name: rest.pop(prefix + name) for name in STORED_GDN_NAMES if prefix + name in rest}
        for name, part in _gdn_parts(f"{source}: layer {layer}", dims, own).items():
            parts[prefix + name] = part
    return parts | {name: _Part.whole(stored) for name, stored in rest.items()}


def _gdn_parts(where: str, dims: GdnDims, own: Mapping[str, StoredTensor]) -> dict[str, _Part]:
    """The canonical tensors of one GDN layer out of its stored ones, in whichever of the two layouts they are."""
    shapes = gdn_shapes(dims)
    interleaved = [own[name].name for name in INTERLEAVED_NAMES if name in own]
    split = [own[name].name for name in PROJECTION_NAMES if name in own]
    if not interleaved:
        _check_gdn_layer(where, shapes, own)
        return {name: _Part.whole(own[name], shape) for name, shape in shapes.items()}
    if split:
        raise CheckpointError(
            f"{where} holds interleaved projections ({listed(interleaved)}) and separate ones ({listed(split)}); "
            "only one layout can be right"
        )
    rows = deinterleaved_rows(dims)
    untouched = {name: shape for name, shape in shapes.items() if name not in rows}
    _check_gdn_layer(where, interleaved_shapes(dims) | untouched, own)
    parts = {name: _Part.whole(own[name], shape) for name, shape in untouched.items()}
    for name, (holder, runs) in rows.items():
        parts[name] = _Part.rows(own[holder], shapes[name], runs)
    return parts


def _check_gdn_layer(where: str, shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, StoredTensor]) -> None:
    missing = [f"linear_attn.{name} {list(shape)}" for name, shape in shapes.items() if name not in own]
    if missing:
        raise CheckpointError(f"{where} lacks {listed(missing, shown=len(shapes))}")
    for name, shape in shapes.items():
        accepted = _accepted_shapes(name, shape)
        if own[name].shape not in accepted:
            raise CheckpointError(f"{own[name]}: expected shape {list(shape)}, got {list(own[name].shape)}")


def _accepted_shapes(name: str, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """`shape`, and for the convolution [C, W] too, where it cannot be a transposed [W, C]."""
    if name != "conv1d.weight" or shape[0] == shape[-1]:
        return {shape}
    return {shape, (shape[0], shape[-1])}
