"""A file of bytes read at any position: the common ground of the containers."""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from checkpoints.errors import CheckpointError

__all__ = ["ByteFile"]

_MAX_READ = 1 << 30  # one read call moves at most 2 GiB on Linux


class ByteFile:
    """An open file whose bytes are fetched where they are asked for; nothing is read ahead, any thread may read.

    Raises:
        CheckpointError: there is no regular file at `path`.
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not self.path.is_file():  # opening a pipe or a device would block or worse
            raise CheckpointError(f"{self.path}: no such file")
        self._file = self.path.open("rb", buffering=0)

    @property
    def size(self) -> int:
        """The file's size in bytes, now."""
        return os.fstat(self._file.fileno()).st_size

    def fill(self, target: np.ndarray, position: int, what: str) -> None:
        """Fill `target` (uint8, contiguous) with the bytes from `position` on; `what` is named in an error.

        Raises:
            CheckpointError: the file is closed, or ends too early.
        """
        if self._file.closed:
            raise CheckpointError(f"{self.path}: the checkpoint is closed, so {what} cannot be read")
        rest = memoryview(target).cast("B")
        while rest:
            count = os.preadv(self._file.fileno(), [rest[:_MAX_READ]], position)
            if not count:
                raise CheckpointError(f"{self.path}: the file ends inside {what}; it was longer when opened")
            rest, position = rest[count:], position + count

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()
