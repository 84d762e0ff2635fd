"""Named arrays under a header, which can be saved anew at any time: a reader finds those before or those after, whole.

    state.json     format, version, header, arrays (name -> shape, dtype, sha256), folder; see `sealed_json`
    arrays.N/      the arrays, an Orbax item (see `orbax_item`); empty ones have no place in it

A save writes its arrays beside those that are there, and then renames its manifest over the one before: the only moment
at which anything changes for a reader. Only then are the earlier arrays removed. What an interrupted save leaves behind
is removed by the next one. Two saves at once are not possible; the second is refused.

Every array is hashed when it is read, and compared with the manifest.
"""

import contextlib
import fcntl
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoints.base import TensorInfo
from checkpoints.durable import sync_folder, write_file
from checkpoints.errors import CheckpointError
from checkpoints.orbax_item import PLAIN_DTYPES, Arrays, OrbaxItem, content_hash, save_item
from checkpoints.sealed_json import decode_sealed, encode_sealed
from checkpoints.strict_json import MAX_JSON_BYTES, read_json

__all__ = ["load_arrays", "save_arrays"]

MANIFEST_FILE = "state.json"
FORMAT = "gdn-jax sequence state"
VERSION = 1

_DRAFT_FILE = ".state.json.partial"
_FOLDER, _FOLDER_NAME = "arrays.", re.compile(r"arrays\.([1-9][0-9]{0,14})")
_KEYS = frozenset({"format", "version", "header", "arrays", "folder"})
_RECORD_KEYS = frozenset({"shape", "dtype", "sha256"})
_MAX_ELEMENTS = 1 << 38

Check = Callable[[Mapping[str, Any], Mapping[str, TensorInfo]], None]


def save_arrays(path: str | os.PathLike[str], header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Save `arrays` (float32, float16, bfloat16, int32, uint8) and `header` (JSON) as the directory `path`.

    What was saved there before is replaced when all is written, and stays whole otherwise.

    Raises:
        CheckpointError: something else is at `path`, another save is under way there, or it cannot be written.
    """
    folder = Path(path)
    is_new = _make(folder)
    try:
        with _locked(folder):
            _replace(folder, header, arrays)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # not empty: another process has begun to use it
                folder.rmdir()
        raise


def load_arrays(path: str | os.PathLike[str], check: Check) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays that were saved at `path`, each array in memory of its own.

    `check(header, infos)` raises what it likes about them before any array is read.

    Raises:
        CheckpointError: nothing was saved there; another version; anything is missing or damaged.
    """
    folder = Path(path)
    while True:
        data = _manifest_bytes(folder)
        manifest = _Manifest.decoded(data, str(folder / MANIFEST_FILE))
        check(manifest.header, manifest.infos)
        try:
            return manifest.header, _read(folder, manifest)
        except CheckpointError:
            # A save that ended meanwhile has removed what this manifest names; its own is read instead.
            if _manifest_bytes(folder) == data:
                raise


class _Manifest(NamedTuple):
    """What was saved: the header, each array's shape, dtype and hash, and the folder that holds them."""

    header: Mapping[str, Any]
    infos: Mapping[str, TensorInfo]
    hashes: Mapping[str, str]
    folder: str

    def encoded(self) -> bytes:
        """The file's bytes."""
        arrays = {
            name: {"shape": list(info.shape), "dtype": info.dtype, "sha256": self.hashes[name]}
            for name, info in self.infos.items()
        }
        head = {"format": FORMAT, "version": VERSION, "header": dict(self.header)}
        return encode_sealed({**head, "arrays": arrays, "folder": self.folder})

    @classmethod
    def decoded(cls, data: bytes, source: str) -> "_Manifest":
        """The inverse of `encoded`. Raises CheckpointError."""
        body = decode_sealed(
            data, source, kind="saved state", format=FORMAT, version=VERSION, remedy="start the sequence anew"
        )
        if body.keys() != _KEYS or not isinstance(body["arrays"], dict) or not isinstance(body["header"], dict):
            raise CheckpointError(f"{source}: expected the keys {', '.join(sorted(_KEYS))}")
        if not isinstance(body["folder"], str) or not _FOLDER_NAME.fullmatch(body["folder"]):
            raise CheckpointError(f"{source}: folder must be {_FOLDER}N, got {body['folder']!r:.100}")
        arrays = body["arrays"]
        infos = {name: _info(entry, f"{source}: array {name!r:.100}") for name, entry in arrays.items()}
        return cls(body["header"], infos, {name: arrays[name]["sha256"] for name in infos}, body["folder"])


def _info(entry: Any, where: str) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != _RECORD_KEYS:
        raise CheckpointError(f"{where} must have the keys {', '.join(sorted(_RECORD_KEYS))}, got {entry!r:.100}")
    shape, dtype = entry["shape"], entry["dtype"]
    if not isinstance(shape, list) or len(shape) > 8 or any(type(n) is not int or n < 0 for n in shape):
        raise CheckpointError(f"{where} must have a shape of at most 8 sizes, got {shape!r:.100}")
    if math.prod(shape) > _MAX_ELEMENTS:
        raise CheckpointError(f"{where} must have at most {_MAX_ELEMENTS} elements, got {shape}")
    if not isinstance(dtype, str) or dtype not in PLAIN_DTYPES:
        raise CheckpointError(f"{where} must be one of {', '.join(PLAIN_DTYPES)}, got {dtype!r:.100}")
    return TensorInfo(tuple(shape), dtype)


def _manifest_bytes(folder: Path) -> bytes:
    file = folder / MANIFEST_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder}: no saved state, or one whose save was never finished: no {MANIFEST_FILE}")
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: larger than {MAX_JSON_BYTES} bytes, which is no plausible manifest")
    return data


def _read(folder: Path, manifest: _Manifest) -> dict[str, np.ndarray]:
    stored = {name: info for name, info in manifest.infos.items() if math.prod(info.shape)}
    item = OrbaxItem(folder / manifest.folder, stored)
    arrays = {}
    for name, info in manifest.infos.items():
        held: Arrays = item.read(name) if name in stored else {"": np.empty(info.shape, PLAIN_DTYPES[info.dtype])}
        if content_hash(held) != manifest.hashes[name]:
            raise CheckpointError(f"{item.path}: array {name!r} is damaged: its content does not have its sha256")
        arrays[name] = held[""]
    return arrays


def _make(folder: Path) -> bool:
    """Make the directory unless it is there; whether it was made. What is not ours is refused."""
    if not folder.parent.is_dir():
        raise CheckpointError(f"{folder}: the directory {folder.parent} does not exist")
    try:
        folder.mkdir()
    except FileExistsError:
        _require_own(folder)
        return False
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error
    return True


def _require_own(folder: Path) -> None:
    """A directory that holds a saved state, or what an interrupted save has left; never anything else."""
    if folder.is_dir():
        names = {entry.name for entry in folder.iterdir()}
        others = {name for name in names - {MANIFEST_FILE, _DRAFT_FILE} if not name.startswith(_FOLDER)}
        if not others and (MANIFEST_FILE not in names or read_json(folder / MANIFEST_FILE).get("format") == FORMAT):
            return
    raise CheckpointError(f"{folder}: something else is there; remove it first, or choose another place for the state")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{folder}: another save is under way there; save again when it is done") from None
        yield
    finally:
        os.close(descriptor)


def _replace(folder: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    before = {entry.name for entry in folder.iterdir()} - {_DRAFT_FILE}
    numbers = [int(match[1]) for name in before if (match := _FOLDER_NAME.fullmatch(name))]
    name = f"{_FOLDER}{max(numbers, default=0) + 1}"
    held: dict[str, Arrays] = {key: {"": np.ascontiguousarray(array)} for key, array in arrays.items()}
    infos = {key: TensorInfo(array.shape, array.dtype.name) for key, array in arrays.items()}
    manifest = _Manifest(header, infos, {key: content_hash(array) for key, array in held.items()}, name).encoded()
    try:
        save_item(folder / name, {key: array for key, array in held.items() if array[""].size})
        write_file(folder / _DRAFT_FILE, manifest)
        (folder / _DRAFT_FILE).replace(folder / MANIFEST_FILE)
        sync_folder(folder)
    except BaseException as error:
        if not _holds(folder / MANIFEST_FILE, manifest):  # an interrupt may come just after the rename
            _remove(folder, keep=before)
        if isinstance(error, OSError):
            raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error
        raise
    _remove(folder, keep={MANIFEST_FILE, name})


def _holds(file: Path, content: bytes) -> bool:
    return file.is_file() and file.read_bytes() == content


def _remove(folder: Path, *, keep: set[str]) -> None:
    """Remove all but `keep`. What cannot be removed does no harm, and is tried again by the next save."""
    for entry in folder.iterdir():
        if entry.name not in keep:
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
