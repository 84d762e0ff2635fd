"""Checkpoints from one format into another, tensor by tensor, with the linear layers in 4 bits if wanted.

Sources are whatever `checkpoints.open_checkpoint` reads; destinations are a converted checkpoint (`checkpoints.store`)
or a GGUF file. What becomes of a tensor depends on its name and on the tier alone:

| | tier f32 | tier q4 | tier q4, parts gdn |
|---|---|---|---|
| the three large projections of a GDN layer | numbers | Q4_0 | Q4_0 |
| other linear layers, embedding and head, where their columns are a multiple of 32 | numbers | Q4_0 | as stored |
| every other tensor | numbers | as stored | as stored |

Q4_0: codes are kept bit for bit, numbers are quantised. As stored: codes stay codes, numbers stay numbers.
Numbers keep their dtype (bfloat16 stays bfloat16, and widens exactly when it is loaded); other block types of a GGUF
file become float32. So does, in a GGUF file, everything but matrices; its norms and A_log are rounded as stated in
`checkpoints.gguf_layout`.

A multi-token-prediction head goes with its model; one of a kind that is not supported is left out, with a warning.

The text files of a model (`checkpoints.text_files`) go with it into a converted checkpoint, byte for byte; into a GGUF
file the tokenizer goes as metadata (`checkpoints.gguf_tokenizer`), as does what a GGUF source says beside its model.

At any time at most one tensor is held in both forms, and beside it one unfinished item: half a tensor of the largest
size, or one tensor.
"""

import dataclasses
import hashlib
import importlib.metadata
import logging
import math
import os
import re
import shutil
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoints import Checkpoint, TensorInfo, open_checkpoint
from checkpoints.gguf_config import metadata_of
from checkpoints.gguf_file import GGML_TYPES, GgufFile
from checkpoints.gguf_layout import Part
from checkpoints.gguf_qwen import GgufCheckpoint, write_gguf, written_parts
from checkpoints.gguf_tokenizer import PREFIX, TokenizerKindError, tokenizer_metadata
from checkpoints.names import is_linear, is_mtp, listed
from checkpoints.orbax_item import DENSE_DTYPES, Q4_0
from checkpoints.q4_blocks import GROUP, Q4Words
from checkpoints.store import StoreCheckpoint, is_store, open_store
from checkpoints.store_manifest import MANIFEST_FILE, Q4_PARTS, TIERS, Record, make_header, must_be_q4
from checkpoints.store_writer import StoreWriter, draft_of, require_same_conversion
from checkpoints.text_files import TEXT_FILES, read_texts
from gdn_jax.decoder.generation_config import END_KEYS, end_ids, named_ids
from gdn_jax.errors import CheckpointError, UnsupportedError
from gdn_jax.q4 import METHODS, Q4Tensor, quantization_report
from gdn_jax.q4_quantizers import quantize_words

__all__ = [
    "FORMATS",
    "Conversion",
    "Job",
    "Progress",
    "Recipe",
    "Watcher",
    "convert",
    "format_of",
    "gguf_extras",
    "gguf_parts",
]

_log = logging.getLogger(__name__)

FORMATS = ("orbax", "gguf")
GGUF_SUFFIX = ".gguf"

# What an unfinished item may hold at least, so that small models do not fall into crumbs.
_LEAST_ITEM_BYTES = 64 << 20

# Reading this much of each file tells models of one architecture apart without reading the files twice.
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 12

_LAYER = re.compile(r"layers\.(\d+)\.")
_OUTSIDE_LAYERS, _HEAD = "model", "mtp"

TIER_KEY, QUANTISER_KEY, SOURCE_KEY = "gdn_jax.tier", "gdn_jax.quantiser", "gdn_jax.source"
PARTS_KEY = "gdn_jax.q4_parts"
"""Metadata of a GGUF file that say how it was made."""

_CARRIED = ("tokenizer.", "general.")
_NOT_CARRIED = ("general.architecture", "general.alignment", "general.quantization_version", "general.file_type")


class Progress(NamedTuple):
    """How far a conversion or verification is, in tensors and in bytes of the source."""

    tensors: int
    all_tensors: int
    nbytes: int
    all_nbytes: int


Watcher = Callable[[Progress], None]


class Transformed(NamedTuple):
    """A tensor as the destination gets it, and the numbers it was quantised from if that was done."""

    value: np.ndarray | Q4Words
    original: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What becomes of each tensor: see the module.

    Raises:
        ValueError: an unknown tier, quantiser or choice of parts.
    """

    tier: str
    quantiser: str
    q4_parts: str = Q4_PARTS[0]

    def __post_init__(self):
        for name, known in (("tier", TIERS), ("quantiser", METHODS), ("q4_parts", Q4_PARTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    def target(self, name: str, info: TensorInfo) -> TensorInfo:
        """Shape and dtype of the tensor `name` in the destination, where `info` is what the source has."""
        if self.tier == "q4" and (info.dtype == Q4_0 or must_be_q4(name, info.shape, self.q4_parts)):
            return info._replace(dtype=Q4_0)
        return info if info.dtype in DENSE_DTYPES else info._replace(dtype="float32")

    def quantises(self, name: str, info: TensorInfo) -> bool:
        """Whether the tensor becomes Q4_0 without being so in the source."""
        return info.dtype != Q4_0 and self.target(name, info).dtype == Q4_0

    def apply(self, source: Checkpoint, name: str) -> Transformed:
        """The tensor `name` of `source` as the destination gets it.

        Raises:
            CheckpointError: it cannot be read, or quantised.
        """
        info = source.info(name)
        if self.target(name, info).dtype != Q4_0:
            return Transformed(source.read(name))
        if info.dtype == Q4_0:
            return Transformed(source.read_words(name))
        numbers = source.read(name)
        try:
            return Transformed(quantize_words(numbers, self.quantiser), numbers)
        except ValueError as error:
            raise CheckpointError(f"{source.source}: tensor {name!r} cannot be quantised: {error}") from error


class Conversion(NamedTuple):
    """What a conversion did.

    `q4_parts` is None in tier f32, `quantiser` where nothing had to be quantised; `quantisation` says what it cost each
    tensor (the fields of `QuantReport`). `not_q4` are the linear layers that q4_parts "all" had to leave as stored.
    `resumed` counts the tensors that an earlier run had finished.
    """

    format: str
    tier: str
    q4_parts: str | None
    quantiser: str | None
    tensors: int
    resumed: int
    source_nbytes: int
    nbytes: int
    seconds: float
    quantisation: Mapping[str, Mapping[str, float]]
    not_q4: tuple[str, ...]


def format_of(destination: str | os.PathLike[str]) -> str:
    """The format that the name of the destination asks for: "gguf" by its suffix, else "orbax"."""
    return "gguf" if Path(destination).suffix == GGUF_SUFFIX else "orbax"


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    tier: str = "f32",
    quantiser: str = "absmax",
    q4_parts: str = "all",
    format: str | None = None,
    resume: bool = False,
    progress: Watcher | None = None,
) -> Conversion:
    """Convert the checkpoint at `source` into a new one at `destination`.

    `q4_parts` says what tier q4 makes 4-bit: "all" linear layers, embedding and head, or the large projections of "gdn"
    layers alone; see the module. Layers of "all" whose columns do not divide by 32 are kept as stored, and named.
    `format` is by default what `format_of` says. `destination` appears when it is complete; nothing is left behind
    otherwise. With `resume` (converted checkpoints only) finished items outlive an error or interrupt, and are taken
    over from an earlier run after their content was compared with its hashes; the result has the same bits either way.

    Raises:
        CheckpointError: the source cannot be read, or a tensor not quantised; there is something at the destination, it
            cannot be written, or lies on a disk with too little room; the GGUF format cannot hold the model; what is to
            be resumed belongs to another conversion. UnsupportedError: tier q4 of a model one of whose GDN projections
            cannot be 4-bit. ValueError: an unknown tier, quantiser, choice of parts or format; `resume` of a GGUF file.
            All but unreadable tensors are found before any work is done.
    """
    recipe, format = Recipe(tier, quantiser, q4_parts), format or format_of(destination)
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if resume and format == "gguf":
        raise ValueError("a GGUF file is written in one go and cannot be resumed; convert without resume")
    source, destination = Path(source), Path(destination)
    started = time.perf_counter()
    with _opened(source) as checkpoint:
        job = Job(source, checkpoint, recipe, progress)
        _check_projections(job)
        if job.not_q4:
            _log.warning(
                "%s: kept as stored, because their columns are not a multiple of %d: %s",
                checkpoint.source,
                GROUP,
                listed(job.not_q4),
            )
        if format == "gguf":
            _check_gguf(job)
            _check_place(destination, job.nbytes)
            quantisation = _to_gguf(job, destination)
        elif resume and is_store(destination):
            quantisation = _finished(job, destination)
        else:
            _check_place(destination, job.nbytes, replaces=draft_of(destination))
            quantisation = _to_store(job, destination, resumable=resume)
    seconds = time.perf_counter() - started
    return Conversion(
        format=format,
        tier=tier,
        q4_parts=job.q4_parts,
        quantiser=job.quantiser,
        tensors=len(job.infos),
        resumed=job.resumed,
        source_nbytes=job.source_nbytes,
        nbytes=job.nbytes,
        seconds=seconds,
        quantisation=quantisation,
        not_q4=job.not_q4,
    )


def _opened(source: Path) -> Checkpoint:
    """The source with its multi-token-prediction head, if that is one of those that are known."""
    try:
        return open_checkpoint(source, mtp=True)
    except CheckpointError as error:
        without = open_checkpoint(source)  # raises again where it is not the head that is wrong
        _log.warning("the multi-token-prediction head is left out: %s", error)
        return without


class Job:
    """One source under one recipe, and how far the work on it is: its head too, where it was opened with one."""

    def __init__(self, path: Path, source: Checkpoint, recipe: Recipe, progress: Watcher | None):
        self.path = path
        self.source = source
        self.recipe = recipe
        self.infos = {name: source.info(name) for name in (*source.names(), *source.mtp_names())}
        self.targets = {name: recipe.target(name, info) for name, info in self.infos.items()}
        self.source_nbytes = sum(map(_nbytes, self.infos.values()))
        self.nbytes = sum(map(_nbytes, self.targets.values()))
        self.resumed = 0
        self._progress = progress
        self._done = Progress(0, len(self.infos), 0, self.source_nbytes)

    @property
    def quantiser(self) -> str | None:
        """The quantiser, where any tensor needs it."""
        needed = any(self.recipe.quantises(name, info) for name, info in self.infos.items())
        return self.recipe.quantiser if needed else None

    @property
    def q4_parts(self) -> str | None:
        """What is in 4 bits, where the tier says that something is."""
        return self.recipe.q4_parts if self.recipe.tier == "q4" else None

    @property
    def not_q4(self) -> tuple[str, ...]:
        """The linear layers that were to be 4-bit, and cannot."""
        if self.q4_parts != "all":
            return ()
        return tuple(name for name, target in self.targets.items() if is_linear(name) and target.dtype != Q4_0)

    def apply(self, name: str) -> tuple[np.ndarray | Q4Words, dict[str, float] | None]:
        """The tensor `name` for the destination, and what quantising cost, if it was done."""
        value, original = self.recipe.apply(self.source, name)
        return value, _cost(original, value) if original is not None and isinstance(value, Q4Words) else None

    def done(self, names: Sequence[str], resumed: bool = False) -> None:
        """Count `names` as finished, by an earlier run if `resumed`."""
        tensors, _, nbytes, _ = self._done
        nbytes += sum(_nbytes(self.infos[name]) for name in names)
        self._done = self._done._replace(tensors=tensors + len(names), nbytes=nbytes)
        self.resumed += len(names) if resumed else 0
        if self._progress is not None:
            self._progress(self._done)


def _to_store(job: Job, destination: Path, *, resumable: bool) -> dict[str, Mapping[str, float]]:
    texts = read_texts(job.path)
    _warn_of_tokenizer(job)
    with StoreWriter(destination, _header(job, texts), resumable=resumable) as writer:
        for item, names in _items(job.targets, _item_bytes(job)):
            if writer.keep(item, {name: job.targets[name] for name in names}):
                job.done(names, resumed=True)
                continue
            with writer.item(item) as building:
                for name in names:
                    building.put(name, *job.apply(name))
                    job.done([name])
        records = writer.finish(texts)
    return _costs(records)


def _finished(job: Job, destination: Path) -> dict[str, Mapping[str, float]]:
    """The complete result of an earlier run of the same conversion, checked against its hashes."""
    with open_store(destination, mtp=True) as store:
        require_same_conversion(store.header, _header(job, read_texts(job.path)), destination)
        for name in store.records:
            store.check(name)
            job.done([name], resumed=True)
        return _costs(store.records)


def _costs(records: Mapping[str, Record]) -> dict[str, Mapping[str, float]]:
    return {name: record.quantisation for name, record in records.items() if record.quantisation is not None}


def _to_gguf(job: Job, destination: Path) -> dict[str, Mapping[str, float]]:
    quantisation = {}

    def tensors() -> Iterator[tuple[str, np.ndarray | Q4Words]]:
        for name in job.infos:
            value, cost = job.apply(name)
            if cost is not None:
                quantisation[name] = cost
            yield name, value
            job.done([name])

    head = job.source.mtp_names()
    write_gguf(destination, job.source.config, tensors(), metadata=_gguf_metadata(job), mtp=head)
    return quantisation


def _nbytes(info: TensorInfo) -> int:
    """Stored bytes of a tensor, without headers."""
    count = math.prod(info.shape)
    if info.dtype in DENSE_DTYPES:
        return count * DENSE_DTYPES[info.dtype].itemsize
    block = _BLOCKS[info.dtype]
    return count // block.block * block.nbytes


_BLOCKS = {kind.name: kind for kind in GGML_TYPES.values()}


def _cost(original: np.ndarray, value: Q4Words) -> dict[str, float]:
    """The fields of `QuantReport`, to six digits: what differs beyond that between machines is no information."""
    words, scales = typing.cast(Any, value)
    report = quantization_report(original, Q4Tensor(codes=words, scales=scales))
    return {field: float(f"{number:.6g}") for field, number in report._asdict().items()}


def _check_projections(job: Job) -> None:
    """All three large projections of every layer can be Q4_0, or the tier is refused."""
    if job.recipe.tier != "q4":
        return
    for name, target in job.targets.items():
        if target.dtype == Q4_0 and target.shape[-1] % GROUP:
            raise UnsupportedError(
                f"{job.source.source}: tensor {name!r} {list(target.shape)} cannot be 4-bit: its columns are not a "
                f"multiple of {GROUP}, and a layer is quantised whole or not at all; convert with tier f32"
            )
    # A GGUF file may hold codes of out_proj that cannot be brought into order. All layers have one geometry, so that
    # reading one tells; the others are refused by their widths above.
    stored = (name for name, info in job.infos.items() if info.dtype == Q4_0 and name.endswith("out_proj.weight"))
    if (name := next(stored, None)) is not None:
        job.source.read_q4(name)


def _check_gguf(job: Job) -> None:
    """The format can hold the model: its architecture, its tensors, and its 4-bit ones in the order of the format."""
    metadata_of(job.source.config)
    parts = gguf_parts(job.source)
    if odd := sorted(parts.keys() ^ job.infos.keys()):
        extra = [name for name in odd if name in job.infos]
        problem = f"has no place for {listed(extra)}" if extra else f"needs {listed(odd)}, which the source lacks"
        raise CheckpointError(f"{job.source.source}: a GGUF file of this model {problem}")
    for name, target in job.targets.items():
        if target.dtype == Q4_0 and parts[name].cuts_groups:
            raise UnsupportedError(
                f"{job.source.source}: tensor {name!r} cannot be Q4_0 in a GGUF file, whose order of value heads would "
                f"cut groups of {GROUP} columns with a common scale; convert to the orbax format, or with tier f32"
            )


def gguf_parts(source: Checkpoint) -> dict[str, Part]:
    """Where each tensor of the model lies in a GGUF file that is written here."""
    return written_parts(source.config, source.mtp_names())


def _check_place(destination: Path, nbytes: int, replaces: Path | None = None) -> None:
    """The destination is free and its disk has room; the part that `replaces` holds already need not be found again."""
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination}: exists already; remove it first, or choose another destination")
    if not destination.parent.is_dir():
        raise CheckpointError(f"{destination}: the directory {destination.parent} does not exist")
    held = sum(file.stat().st_size for file in replaces.rglob("*") if file.is_file()) if replaces else 0
    free = shutil.disk_usage(destination.parent).free + held
    if nbytes > free:
        raise CheckpointError(f"{destination}: needs {nbytes:,} bytes, but only {free:,} are free on its disk")


def _item_bytes(job: Job) -> int:
    """What one item may hold: with the tensor that is worked on, memory stays below 1.5 of the largest one."""
    return max(_LEAST_ITEM_BYTES, max(map(_nbytes, job.infos.values())) // 2)


def _items(targets: Mapping[str, TensorInfo], limit: int) -> Iterator[tuple[str, list[str]]]:
    """Item names and the tensors of each: one item a layer, one for the head, and one for the rest, cut where they
    exceed `limit`.
    """
    groups: dict[str, list[str]] = {}
    for name in targets:
        match = _LAYER.match(name)
        outside = _HEAD if is_mtp(name) else _OUTSIDE_LAYERS
        groups.setdefault(f"layers.{match[1]}" if match else outside, []).append(name)
    for group, names in groups.items():
        parts: list[list[str]] = [[]]
        held = 0
        for name in names:
            size = _nbytes(targets[name])
            if parts[-1] and held + size > limit:
                parts.append([])
                held = 0
            parts[-1].append(name)
            held += size
        for number, part in enumerate(parts, 1):
            yield group if number == 1 else f"{group}.part{number}", part


def _header(job: Job, texts: Mapping[str, bytes]) -> dict[str, Any]:
    return make_header(
        tier=job.recipe.tier,
        q4_parts=job.q4_parts,
        quantiser=job.quantiser,
        config=job.source.config,
        provenance={
            "source": job.path.resolve().name,
            "kind": _kind(job.source),
            "files": {file.name: _fingerprint(file) for file in _files(job.path)},
            "versions": {
                name: installed.version
                for name in ("gdn-jax", "numpy", "orbax-checkpoint")
                for installed in importlib.metadata.distributions(name=name)
            },
        },
        texts=texts,
    )


def _kind(source: Checkpoint) -> str:
    if isinstance(source, StoreCheckpoint):
        return "orbax"
    return "gguf" if isinstance(source, GgufCheckpoint) else "huggingface"


def _files(source: Path) -> list[Path]:
    """The files that decide what the model is; the manifest of a converted checkpoint has the hashes of the rest."""
    if source.is_file():
        return [source]
    if is_store(source):
        return [source / MANIFEST_FILE]
    return sorted(
        file
        for file in source.iterdir()
        if file.suffix in (".json", ".safetensors") and file.name not in TEXT_FILES and file.is_file()
    )


def _fingerprint(file: Path) -> dict[str, Any]:
    """Size, and SHA-256 of blocks spread evenly over the file: other weights show, a deliberate forgery need not."""
    size = file.stat().st_size
    last = max(0, size - _SAMPLE_BYTES)
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for offset in sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)}):
            stream.seek(offset)
            digest.update(stream.read(_SAMPLE_BYTES))
    return {"bytes": size, "sample_sha256": digest.hexdigest()}


def _gguf_metadata(job: Job) -> dict[str, Any]:
    """What the file says beside the model."""
    own = {TIER_KEY: job.recipe.tier, SOURCE_KEY: job.path.resolve().name}
    for key, value in ((PARTS_KEY, job.q4_parts), (QUANTISER_KEY, job.quantiser)):
        own |= {key: value} if value is not None else {}
    return gguf_extras(job) | own


def gguf_extras(job: Job) -> dict[str, Any]:
    """What a GGUF file takes over from its source beside the model: what a GGUF source says, else the tokenizer.

    Raises:
        CheckpointError: the tokenizer's files are damaged. (Where they are of a kind that the format cannot hold, or
            are not there, a warning says so.)
    """
    if isinstance(job.source, GgufCheckpoint):
        with GgufFile(job.path) as file:
            return {k: v for k, v in file.metadata.items() if k.startswith(_CARRIED) and k not in _NOT_CARRIED}
    config = job.source.config
    ends = end_ids(job.path) | named_ids(config, END_KEYS, str(job.path))
    try:
        return tokenizer_metadata(job.path, vocab=config["vocab_size"], ends=ends)
    except TokenizerKindError as error:
        _log.warning("the GGUF file has no tokenizer: %s", error)
        return {}


def _warn_of_tokenizer(job: Job) -> None:
    """The tokenizer of a GGUF file is no text file."""
    if isinstance(job.source, GgufCheckpoint):
        with GgufFile(job.path) as file:
            if f"{PREFIX}model" in file.metadata:
                _log.warning("%s: its tokenizer stays there; name the file where one is needed (--tokenizer)", job.path)
