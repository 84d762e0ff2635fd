"""Writing converted checkpoints: built item by item beside the destination, moved there when complete.

The draft is a hidden sibling of the destination, `.NAME.partial`. Its journal holds the header of the conversion in the
first line and then one line per finished item, so that an interrupted conversion can go on where it stopped. The
manifest is written when all items are there, and the rename that follows is the only moment in which anything appears
under the final name.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from checkpoints.base import TensorInfo
from checkpoints.durable import sync_folder, write_file
from checkpoints.errors import CheckpointError
from checkpoints.names import listed
from checkpoints.orbax_item import Arrays, OrbaxItem, Value, arrays_of, content_hash, info_of, save_item
from checkpoints.store import ITEMS_FOLDER, read_tensor
from checkpoints.store_manifest import MANIFEST_FILE, Manifest, Record
from checkpoints.strict_json import json_object

__all__ = ["ItemBuilder", "StoreWriter", "draft_of", "require_same_conversion"]

_JOURNAL = "journal.jsonl"


def draft_of(path: Path) -> Path:
    """Where a checkpoint for `path` is built."""
    return path.with_name(f".{path.name}.partial")


class StoreWriter:
    """Builds the converted checkpoint of `header` (see `make_header`) for `path`; a context manager.

    With `resumable`, a draft that an earlier run of the same conversion left is continued, and an error or an
    interrupt leaves the finished items to a later run. Otherwise a draft in the way is refused, and nothing is left
    behind. A draft is locked while a process works on it.

    Raises:
        CheckpointError: something is at `path`; its directory is missing or cannot be written; a draft is in the way,
            in use, or that of another conversion.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any], *, resumable: bool = False):
        self.path = Path(path)
        self._draft = draft_of(self.path)
        self._header = dict(header)
        self._resumable = resumable
        self._records: dict[str, Record] = {}
        self._check_place()
        try:
            self._draft.mkdir(exist_ok=resumable)
            (self._draft / ITEMS_FOLDER).mkdir(exist_ok=resumable)
            self._journal = (self._draft / _JOURNAL).open("a+b")
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written ({error.strerror})") from error
        try:
            self._lock()
            self._finished = self._read_journal()
            self._remove_leftovers()
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._journal.close()
        if not self._resumable and self._draft.exists():
            shutil.rmtree(self._draft)

    def keep(self, item: str, infos: Mapping[str, TensorInfo]) -> bool:
        """Whether an earlier run finished `item`, with the tensors of `infos` and content that still has its hashes.

        If so it is taken over; if not it must be added.
        """
        records = self._finished.pop(item, {})
        folder = self._draft / ITEMS_FOLDER / item
        if {name: record.info for name, record in records.items()} == infos and _is_intact(folder, records):
            self._records |= records
            return True
        if folder.exists():
            shutil.rmtree(folder)
        return False

    @contextlib.contextmanager
    def item(self, name: str) -> Iterator["ItemBuilder"]:
        """The item `name` to put tensors into; it is written, and noted as finished, when the block ends.

        Raises:
            CheckpointError: the item cannot be written.
        """
        builder = ItemBuilder(name)
        yield builder
        save_item(self._draft / ITEMS_FOLDER / name, builder.arrays)
        self._log({"item": name, "tensors": {name: record.as_json() for name, record in builder.records.items()}})
        self._records |= builder.records

    def finish(self, texts: Mapping[str, bytes]) -> dict[str, Record]:
        """Write the text files of the header and the manifest, and move the checkpoint to its place.

        Returns the records of all its tensors.

        Raises:
            CheckpointError: the tensors are not those of a whole model in its tier, something came to be at `path`, or
                a file cannot be written.
        """
        data = Manifest(self._header, self._records).encoded()
        Manifest.decoded(data, str(self.path))
        try:
            for name, content in {**texts, MANIFEST_FILE: data}.items():
                write_file(self._draft / name, content)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written ({error.strerror})") from error
        self._check_absent()
        self._draft.rename(self.path)
        sync_folder(self.path.parent)
        # Only now: a draft whose journal is gone could not be resumed, should the machine stop before the rename.
        (self.path / _JOURNAL).unlink()
        return self._records

    def _check_place(self) -> None:
        self._check_absent()
        if not self.path.parent.is_dir():
            raise CheckpointError(f"{self.path}: the directory {self.path.parent} does not exist")
        if not self._resumable and self._draft.exists():
            raise CheckpointError(
                f"{self._draft}: an unfinished conversion is there or running; resume it, or remove this directory"
            )

    def _check_absent(self) -> None:
        if self.path.exists() or self.path.is_symlink():
            raise CheckpointError(f"{self.path}: exists already; remove it first, or choose another destination")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{self._draft}: another process is working on this conversion") from None

    def _read_journal(self) -> dict[str, dict[str, Record]]:
        """The finished items of an earlier run; what follows a line that was cut off or damaged is dropped."""
        self._journal.seek(0)
        lines, finished = self._journal.readlines(), {}
        good = len(lines[0]) if lines and self._is_own_header(lines[0]) else 0
        for line in lines[1:] if good else ():
            try:
                entry = json_object(line, str(self._draft))
                finished[entry["item"]] = {name: Record.from_json(e) for name, e in entry["tensors"].items()}
            except (CheckpointError, KeyError, TypeError, AttributeError):
                break
            good += len(line)
        self._journal.truncate(good)
        if not good:
            self._log(self._header)
        return finished

    def _is_own_header(self, line: bytes) -> bool:
        """False where the line is damaged: then nothing is known of the draft, and it starts afresh."""
        try:
            header = json_object(line, str(self._draft))
        except CheckpointError:
            return False
        require_same_conversion(header, self._header, self._draft)
        return True

    def _remove_leftovers(self) -> None:
        """What an item that was being written has left."""
        for entry in (self._draft / ITEMS_FOLDER).iterdir():
            if entry.name not in self._finished:
                shutil.rmtree(entry)

    def _log(self, entry: Mapping[str, Any]) -> None:
        self._journal.write(json.dumps(entry).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())


class ItemBuilder:
    """Collects the tensors of one item, each in the form in which it is stored."""

    def __init__(self, name: str):
        self.name = name
        self.arrays: dict[str, Arrays] = {}
        self.records: dict[str, Record] = {}

    def put(self, name: str, value: Value, quantisation: Mapping[str, float] | None = None) -> None:
        """Add one tensor; `quantisation` says what quantising it cost, and goes into its record.

        Raises:
            CheckpointError: it is of a kind that cannot be stored.
        """
        try:
            arrays = arrays_of(value)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from error
        self.arrays[name] = arrays
        self.records[name] = Record(*info_of(value), self.name, content_hash(arrays), quantisation)


def require_same_conversion(found: Mapping[str, Any], wanted: Mapping[str, Any], where: Path) -> None:
    """Refuse a checkpoint or a draft that another conversion made.

    Raises:
        CheckpointError: the headers differ; the message says in what.
    """
    found, wanted = _flat(found), _flat(wanted)
    if odd := sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)):
        key = odd[0]
        raise CheckpointError(
            f"{where}: belongs to another conversion, which differs in {listed(odd)} "
            f"({key} is {found.get(key)!r:.80} there and {wanted.get(key)!r:.80} here); remove it, or convert elsewhere"
        )


def _flat(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header with the entries of its provenance beside the others, through JSON, as it is compared."""
    values = json.loads(json.dumps(header))
    provenance = values.pop("provenance", None)
    return values | ({f"provenance.{k}": v for k, v in provenance.items()} if isinstance(provenance, dict) else {})


def _is_intact(folder: Path, records: Mapping[str, Record]) -> bool:
    try:
        item = OrbaxItem(folder, {name: record.info for name, record in records.items()})
        for name, record in records.items():
            read_tensor(item, name, record.sha256)
    except CheckpointError:
        return False
    return True
