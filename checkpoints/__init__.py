"""Checkpoint files in, named numpy tensors out."""

import os
from pathlib import Path

from checkpoints.base import Checkpoint, TensorInfo
from checkpoints.errors import CheckpointError, GdnError
from checkpoints.gguf_qwen import is_gguf, open_gguf
from checkpoints.hf import CONFIG_FILE, open_hf
from checkpoints.store import is_store, open_store

__all__ = ["Checkpoint", "CheckpointError", "GdnError", "TensorInfo", "open_checkpoint"]

_SUPPORTED = f"a Hugging Face directory ({CONFIG_FILE} beside safetensors weights), a GGUF file, a converted checkpoint"


def open_checkpoint(path: str | os.PathLike[str], *, mtp: bool = False) -> Checkpoint:
    """Open the checkpoint at `path` with the reader of its kind: a Hugging Face directory, a GGUF file or
    a converted checkpoint.

    With `mtp` the tensors of a multi-token-prediction head are offered too, as `Checkpoint.mtp_names`, where there is
    one; otherwise they are skipped.

    Raises:
        CheckpointError: there is nothing at `path`, it is of no supported kind, or its reader refuses it. With `mtp`: a
            head that is incomplete, or of another kind than those of these models.
    """
    location = Path(path)
    if not location.exists():
        raise CheckpointError(f"{location}: no such file or directory")
    if (location / CONFIG_FILE).is_file():
        return open_hf(location, mtp=mtp)
    if is_gguf(location):
        return open_gguf(location, mtp=mtp)
    if is_store(location):
        return open_store(location, mtp=mtp)
    raise CheckpointError(f"{location}: not a checkpoint of a supported kind; supported: {_SUPPORTED}")
