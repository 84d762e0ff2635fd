"""Files that are on the disk when the call returns, so that what is renamed into place after them is never empty."""

import os
from pathlib import Path

__all__ = ["sync_folder", "write_file"]


def write_file(file: Path, content: bytes) -> None:
    """Write a file, and make it last."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
