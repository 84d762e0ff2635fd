"""Converted checkpoints: a directory of Orbax items, one per model layer, under a manifest.

    manifest.json      see `store_manifest`
    tokenizer.json …   the model's text files, see `text_files`
    items/layers.0/    the tensors of layer 0, see `orbax_item`
    items/model/       the tensors outside layers
    items/mtp/         those of the multi-token-prediction head, if there is one

Where the tensors of a layer (or those outside) are too many to be held in memory at once, they go on in further items,
`layers.0.part2` and so on; only the manifest says what lies where.

Every tensor is hashed each time it is read, and compared with the manifest: damage that the file format itself does not
notice is an error, never a wrong number. On one core that takes 0.9 s per GB, close to half of the time of reading. The
text files are compared when the checkpoint is opened.
"""

import os
from pathlib import Path
from typing import Any, override

import numpy as np

from checkpoints.base import Checkpoint, TensorInfo
from checkpoints.errors import CheckpointError
from checkpoints.names import MTP_KIND, is_mtp
from checkpoints.orbax_item import OrbaxItem, content_hash, value_of
from checkpoints.q4_blocks import GROUP, Q4Codes, Q4Words, unpack_words
from checkpoints.store_manifest import MANIFEST_FILE, Manifest, Record, item_infos
from checkpoints.strict_json import MAX_JSON_BYTES
from checkpoints.text_files import digest, read_text_file

__all__ = ["ITEMS_FOLDER", "StoreCheckpoint", "is_store", "open_store", "read_tensor"]

ITEMS_FOLDER = "items"


class StoreCheckpoint(Checkpoint):
    """A converted checkpoint. Tensors whose `info(name).dtype` is "Q4_0" can also be had as codes and scales.

    `tier` is "f32" or "q4", `q4_parts` what is in 4 bits in tier q4, `quantiser` the rule that quantised it (None: none
    did), `provenance` what it was made from, `texts` the SHA-256 of the text files beside it, `records` what the
    manifest says of each tensor, those of a head that was not asked for included.
    """

    def __init__(self, path: Path, manifest: Manifest, *, mtp: bool = False):
        head = sorted(filter(is_mtp, manifest.tensors))
        super().__init__(str(path), manifest.header["config"], {} if mtp else {MTP_KIND: head})
        self._mtp_names = tuple(head) if mtp else ()
        self.tier: str = manifest.header["tier"]
        self.q4_parts: str | None = manifest.header["q4_parts"]
        self.quantiser: str | None = manifest.header["quantiser"]
        self.texts: dict[str, str] = manifest.header["texts"]
        self.provenance: dict[str, Any] = manifest.header["provenance"]
        self.header = manifest.header
        self.records = manifest.tensors
        self._infos = item_infos(manifest.tensors)
        self._folder = path / ITEMS_FOLDER
        self._items: dict[str, OrbaxItem] = {}
        self._closed = False
        for item in self._infos:
            if not (self._folder / item).is_dir():
                raise CheckpointError(f"{self._folder / item}: no such directory; the checkpoint is incomplete")
        for name, sha256 in self.texts.items():
            if digest(read_text_file(path / name)) != sha256:
                raise CheckpointError(f"{path / name}: does not have the recorded sha256: damaged or edited")

    @override
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.records if not is_mtp(name)))

    @override
    def mtp_names(self) -> tuple[str, ...]:
        return self._mtp_names

    @override
    def info(self, name: str) -> TensorInfo:
        return self._record(name).info

    @override
    def read(self, name: str) -> np.ndarray:
        value = self._value(name)
        return _dequantized(_codes(value)) if isinstance(value, Q4Words) else value

    @override
    def read_q4(self, name: str) -> Q4Codes:
        return _codes(self.read_words(name))

    @override
    def read_words(self, name: str) -> Q4Words:
        value = self._value(name)
        return value if isinstance(value, Q4Words) else self._refuse_q4(name)

    def check(self, name: str) -> None:
        """Compare the content of the tensor `name` with its hash.

        Raises:
            CheckpointError: as `read`.
        """
        self._value(name)

    @override
    def close(self) -> None:
        self._items.clear()
        self._closed = True

    def _value(self, name: str) -> np.ndarray | Q4Words:
        record = self._record(name)
        if self._closed:
            raise CheckpointError(f"{self.source}: the checkpoint is closed, so {name!r} cannot be read")
        if record.item not in self._items:
            self._items[record.item] = OrbaxItem(self._folder / record.item, self._infos[record.item])
        return read_tensor(self._items[record.item], name, record.sha256)

    def _record(self, name: str) -> Record:
        if name not in self.records:
            raise CheckpointError(f"{self.source}: no tensor {name!r} among its {len(self.records)} canonical names")
        return self.records[name]


def is_store(path: Path) -> bool:
    """Whether a converted checkpoint lies at `path`, judged by the presence of a manifest."""
    return (path / MANIFEST_FILE).is_file()


def open_store(path: str | os.PathLike[str], *, mtp: bool = False) -> StoreCheckpoint:
    """Open a converted checkpoint, reading nothing but its manifest and its text files; `mtp` as in `open_checkpoint`.

    Raises:
        CheckpointError: the manifest is missing, damaged, of another version, or not that of a whole model in its tier;
            an item is missing; a text file is missing, or not what it was. Damage inside an item is found when a tensor
            of it is read.
    """
    folder = Path(path)
    file = folder / MANIFEST_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder}: not a converted checkpoint, or an unfinished one: it has no {MANIFEST_FILE}")
    with file.open("rb") as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: larger than {MAX_JSON_BYTES} bytes, which is no plausible manifest")
    return StoreCheckpoint(folder, Manifest.decoded(data, str(file)), mtp=mtp)


def read_tensor(item: OrbaxItem, name: str, sha256: str) -> np.ndarray | Q4Words:
    """The tensor `name` of `item`, whose content must have the hash `sha256`.

    Raises:
        CheckpointError: it cannot be read, or has other content.
    """
    arrays = item.read(name)
    if content_hash(arrays) != sha256:
        raise CheckpointError(f"{item.path}: tensor {name!r} is damaged: its content does not have the recorded sha256")
    try:
        return value_of(arrays)
    except CheckpointError as error:
        raise CheckpointError(f"{item.path}: tensor {name!r}: {error}") from None


def _codes(q4: Q4Words) -> Q4Codes:
    return Q4Codes(unpack_words(q4.words), q4.scales)


def _dequantized(q4: Q4Codes) -> np.ndarray:
    """code · scale as float32 [..., N, I], exact; in place, because the matrix may be as large as memory allows."""
    weights = q4.codes.astype(np.float32)
    groups = weights.reshape(*q4.scales.shape, GROUP)
    groups *= q4.scales.astype(np.float32)[..., None]
    return weights
