"""GGUF files of Qwen3.5 and Qwen3-Next as canonical tensors, and canonical tensors as GGUF files.

`gguf_layout` says what the format does to the tensors and how exactly that can be undone, `gguf_config` what the
metadata means, `gguf_file` and `gguf_writer` what the bytes are.
"""

import contextlib
import math
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, override

import numpy as np

from checkpoints.base import Checkpoint, TensorInfo
from checkpoints.errors import CheckpointError
from checkpoints.gguf_config import ARCHITECTURES, WRITTEN, hf_text_config, metadata_of
from checkpoints.gguf_file import MAGIC, PLAIN_DTYPES, READABLE, GgufFile, GgufTensor
from checkpoints.gguf_layout import Part, canonical_parts, mtp_parts
from checkpoints.gguf_writer import GgufWriter
from checkpoints.hf_config import text_config
from checkpoints.names import MTP_KIND, MTP_OWN, is_mtp, listed
from checkpoints.q4_blocks import (
    CODES_PER_WORD,
    GROUP,
    Q4Codes,
    Q4Words,
    check_codes,
    pack_words,
    q4_0_of_words,
    unpack_words,
)

__all__ = ["GgufCheckpoint", "is_gguf", "open_gguf", "write_gguf", "written_parts"]


Stored = np.ndarray | tuple[np.ndarray, np.ndarray] | Q4Words
"""A tensor to write: numbers, or codes and scales, or the same packed."""


class GgufCheckpoint(Checkpoint):
    """A GGUF file as a checkpoint. Tensors whose `info(name).dtype` is "Q4_0" can also be had as codes and scales.

    Block types are dequantised by `read`: their `info(name).dtype` is the name of the block type, the array is float32.
    """

    def __init__(self, file: GgufFile, *, mtp: bool = False):
        """Take over `file`, which `close` closes; `mtp` as in `open_checkpoint`.

        Raises:
            CheckpointError: see `open_gguf`; `file` stays open.
        """
        source = str(file.path)
        try:
            architecture = _architecture(file)
            shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
            config = text_config(hf_text_config(architecture, file.metadata, shapes))
            parts = canonical_parts(config, file.tensors, ARCHITECTURES[architecture].tiled)
            drafting = range(config["num_hidden_layers"], file.metadata[f"{architecture}.block_count"])
            if mtp:
                parts |= _head_parts(file, config, drafting)
                drafting = range(0)
            _check_tensors(file, parts)
            skipped = _skipped(file, parts, drafting)
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None
        super().__init__(source, config, skipped)
        self._file = file
        self._parts = parts

    @override
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self._parts if not is_mtp(name)))

    @override
    def mtp_names(self) -> tuple[str, ...]:
        return tuple(sorted(filter(is_mtp, self._parts)))

    @override
    def info(self, name: str) -> TensorInfo:
        part = self._part(name)
        stored = self._file.tensors[part.stored].type.name
        if part.transform is not None:
            return TensorInfo(part.shape, "float32")
        return TensorInfo(part.shape, PLAIN_DTYPES[stored].name if stored in PLAIN_DTYPES else stored)

    @override
    def read(self, name: str) -> np.ndarray:
        part = self._part(name)
        tensor, start, stop = self._stored_rows(part)
        array = part.to_canonical(self._file.read(tensor, start, stop).reshape(part.entry_shape))
        if part.transform is not None:
            try:
                array = part.transform.undo(array)
            except CheckpointError as error:
                raise CheckpointError(f"{self.source}: tensor {part.stored!r}: {error}") from None
        return array.reshape(part.shape)

    def read_q4(self, name: str) -> Q4Codes:
        """The Q4_0 tensor `name` [N, I] as codes int8 [N, I] and scales float16 [N, I/32], bit for bit.

        Raises:
            CheckpointError: it is stored in another type; its columns change places in runs that cut groups of 32 with
                a common scale (out_proj with V not a multiple of 32); or see `read`.
        """
        words, scales = self.read_words(name)
        return Q4Codes(unpack_words(words), scales)

    @override
    def read_words(self, name: str) -> Q4Words:
        part = self._part(name)
        tensor, start, stop = self._stored_rows(part)
        if part.cuts_groups:
            raise CheckpointError(f"{self.source}: tensor {part.stored!r}: {_CUT_GROUPS}; read it dequantised instead")
        rows = part.entry_shape[:-1]
        words, scales = (half.reshape(*rows, -1) for half in self._file.read_words(tensor, start, stop))
        return Q4Words(part.to_canonical(words, CODES_PER_WORD), part.to_canonical(scales, GROUP))

    @override
    def close(self) -> None:
        self._file.close()

    def _part(self, name: str) -> Part:
        if name not in self._parts:
            raise CheckpointError(f"{self.source}: no tensor {name!r} among its {len(self._parts)} canonical names")
        return self._parts[name]

    def _stored_rows(self, part: Part) -> tuple[GgufTensor, int, int]:
        """The stored tensor and the rows of it to read: all, or those of one expert."""
        tensor = self._file.tensors[part.stored]
        if part.expert is None:
            return tensor, 0, tensor.rows
        count = part.stored_shape[-2]
        return tensor, part.expert * count, (part.expert + 1) * count


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that calls itself GGUF, by its first bytes or by its name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC or path.suffix == ".gguf"


def open_gguf(path: str | os.PathLike[str], *, mtp: bool = False) -> GgufCheckpoint:
    """Open a GGUF file of Qwen3.5 (`qwen35`, `qwen35moe`) or Qwen3-Next (`qwen3next`), reading nothing but its header.

    Vision tensors are skipped, and logged, and so are those of multi-token prediction unless `mtp` asks for them, as in
    `open_checkpoint`. Split files must be merged first.

    Raises:
        CheckpointError: the file is missing, damaged, of another kind or architecture; metadata is missing or
            contradictory; a tensor is unknown, missing or misshapen; a GDN layer holds a type that cannot be read
            (elsewhere only `read` refuses such a tensor).
    """
    file = GgufFile(path)
    try:
        return GgufCheckpoint(file, mtp=mtp)
    except BaseException:
        file.close()
        raise


def write_gguf(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Stored]],
    *,
    metadata: Mapping[str, Any] | None = None,
    mtp: Iterable[str] = (),
) -> None:
    """Write a dense Qwen3.5 model as a GGUF file of architecture `qwen35`.

    `config` is a Hugging Face configuration. `tensors` yields every canonical tensor once, in any order, and is used
    one by one: float32, float16 or bfloat16 arrays, which keep their type if they are matrices and become F32
    otherwise (exactly, but for the norms and A_log); or codes int8 [N, I] and scales float16 [N, I/32] of a matrix, or
    the same as `Q4Words`, which become Q4_0. `mtp` names those of them that make up a multi-token-prediction head, if
    there is to be one. `metadata` adds further keys, such as a tokenizer's: without these other
    programs can read the file but not turn text into tokens. Programs that take V for K accept only models where the
    two are equal.

    The file appears under `path` when it is complete, replacing what was there; after an error nothing is left behind.

    Raises:
        CheckpointError: the configuration or a tensor is not what the model needs; the message names it.
    """
    text = text_config(config)
    head = frozenset(mtp)
    own = metadata_of(text, mtp=bool(head)) | {"general.quantization_version": 2, "general.file_type": 0}
    parts = written_parts(text, head)
    extra = dict(metadata or {})
    if taken := [key for key in extra if key in own or key.startswith(f"{WRITTEN}.") or key == "general.alignment"]:
        raise CheckpointError(f"metadata must not set {listed(taken)}, which follow from the model")
    shapes = {part.stored: part.stored_shape for part in parts.values()}
    with _replacing(Path(path)) as file:
        writer = GgufWriter(file, own | extra, shapes)
        _write_tensors(writer, parts, tensors)
        writer.finish()


def written_parts(config: Mapping[str, Any], mtp: Collection[str] = ()) -> dict[str, Part]:
    """Where each canonical tensor lies in a file that `write_gguf` writes for the flat text configuration `config`."""
    parts = canonical_parts(config, (), ARCHITECTURES[WRITTEN].tiled)
    if mtp:
        possible = mtp_parts(config, (), config["num_hidden_layers"])
        parts |= {name: part for name, part in possible.items() if name in mtp or name not in MTP_OWN}
    return parts


_CUT_GROUPS = (
    f"reordering its value heads would cut groups of {GROUP} columns that share a scale, since their width V is not a "
    f"multiple of {GROUP}"
)

# What other programs call the mixture, by the type of most of its weights.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "BF16": 32}


def _architecture(file: GgufFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(f"general.architecture is {architecture!r:.80}; supported are {', '.join(ARCHITECTURES)}")
    return architecture


def _head_parts(file: GgufFile, config: Mapping[str, Any], blocks: range) -> dict[str, Part]:
    """The parts of the multi-token-prediction head in `blocks`; none where the file announces one but has it not."""
    if not any(_is_in(name, blocks) for name in file.tensors):
        return {}
    if len(blocks) > 1:
        raise CheckpointError(f"has {len(blocks)} blocks for multi-token prediction; supported are heads of one")
    possible = mtp_parts(config, file.tensors, blocks.start)
    return {name: part for name, part in possible.items() if part.stored in file.tensors or name not in MTP_OWN}


def _check_tensors(file: GgufFile, parts: Mapping[str, Part]) -> None:
    """Every part is stored, in the right shape, and in GDN layers in a type that can be read.

    Axes of length 1 are not significant: programs of this format drop them in some places and add them in others.
    """
    missing = {part.stored: None for part in parts.values() if part.stored not in file.tensors}
    if missing:
        raise CheckpointError(f"the file lacks {len(missing)} tensors of this model: {listed(missing)}")
    for name, part in parts.items():
        tensor = file.tensors[part.stored]
        if _significant(tensor.shape) != _significant(part.stored_shape):
            raise CheckpointError(
                f"tensor {part.stored!r}: expected shape {list(part.stored_shape)}, got {list(tensor.shape)}"
            )
        if ".linear_attn." in name and tensor.type.name not in READABLE:
            raise CheckpointError(
                f"tensor {part.stored!r} is of type {tensor.type.name}; supported are {', '.join(READABLE)}"
            )


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length > 1)


def _skipped(file: GgufFile, parts: Mapping[str, Part], drafting: range) -> dict[str, list[str]]:
    """The stored names that have no part, by kind; `drafting` are the multi-token-prediction blocks to skip."""
    used = {part.stored for part in parts.values()}
    skipped: dict[str, list[str]] = {}
    unknown = []
    for name in file.tensors.keys() - used:
        if _is_in(name, drafting):
            skipped.setdefault(MTP_KIND, []).append(name)
        elif name.startswith(("v.", "mm.")):
            skipped.setdefault("vision", []).append(name)
        else:
            unknown.append(name)
    if unknown:
        raise CheckpointError(f"{len(unknown)} tensors have no place in this model: {listed(sorted(unknown))}")
    return skipped


# The length of the number is bounded so that a name cannot ask for an absurd integer.
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")


def _is_in(name: str, blocks: range) -> bool:
    block = _BLOCK.match(name)
    return block is not None and int(block[1]) in blocks


def _write_tensors(
    writer: GgufWriter,
    parts: Mapping[str, Part],
    tensors: Iterable[tuple[str, Stored]],
) -> None:
    missing = dict(parts)
    weights = dict.fromkeys(_FILE_TYPES, 0)
    for name, value in tensors:
        part = missing.pop(name, None)
        if part is None:
            raise CheckpointError(
                f"tensor {name!r} came twice" if name in parts else f"tensor {name!r} has no place in this model"
            )
        try:
            type_name, data = _stored_form(part, value)
        except (CheckpointError, TypeError, ValueError) as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from error
        writer.add(part.stored, type_name, data)
        weights[type_name] += math.prod(part.shape)
    if missing:
        raise CheckpointError(f"{len(missing)} tensors of this model did not come: {listed(missing)}")
    writer.metadata["general.file_type"] = _FILE_TYPES[max(weights, key=lambda kind: weights[kind])]


def _stored_form(part: Part, value: Stored) -> tuple[str, np.ndarray]:
    """Type name and data of a canonical tensor as the file holds it."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(half, np.ndarray) for half in value):
        return "Q4_0", _stored_q4(part, value)
    if not isinstance(value, np.ndarray):
        raise CheckpointError(f"must be a numpy array, or a tuple of two: codes and scales, got {value!r:.80}")
    _check_shape("array", value, part.shape)
    if value.dtype not in _TYPE_NAMES:
        raise CheckpointError(f"dtype must be one of {', '.join(map(str, _TYPE_NAMES))}, got {value.dtype}")
    if part.transform is not None:
        value = part.transform.apply(value)
    if not part.is_matrix:
        value = value.astype(np.float32)
    return _TYPE_NAMES[value.dtype], part.to_stored(value.reshape(part.stored_shape))


_TYPE_NAMES = {dtype: name for name, dtype in PLAIN_DTYPES.items()}


def _stored_q4(part: Part, value: tuple[np.ndarray, np.ndarray] | Q4Words) -> np.ndarray:
    if not part.is_matrix:
        raise CheckpointError("only matrices can be Q4_0; pass the numbers themselves")
    if part.cuts_groups:
        raise CheckpointError(f"cannot be Q4_0: {_CUT_GROUPS}")
    codes, scales = value
    packed = isinstance(value, Q4Words)
    _check_shape("codes", value if packed else codes, part.shape)
    _check_shape("scales", scales, (part.shape[0], part.shape[1] // GROUP))
    if not packed:
        check_codes(codes, scales)
    words = codes if packed else pack_words(codes)
    return q4_0_of_words(Q4Words(part.to_stored(words, CODES_PER_WORD), part.to_stored(scales, GROUP)))


def _check_shape(what: str, array: np.ndarray | Q4Words, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise CheckpointError(f"{what} must have shape {list(shape)}, got {list(array.shape)}")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, and vanishes when it raises."""
    if path.is_dir():
        raise CheckpointError(f"{path}: is a directory; name the file to write")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        file = draft.open("xb")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink()
        raise
