"""What every reader offers: canonical names, shapes without reading data, one tensor at a time."""

import abc
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

__all__ = ["Checkpoint", "TensorInfo"]

_log = logging.getLogger(__name__)


class TensorInfo(NamedTuple):
    """Canonical `shape` and stored `dtype` (numpy's name for it, such as "bfloat16") of one tensor."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(abc.ABC):
    """An open checkpoint: a context manager that names its tensors and reads them one by one.

    Names and layouts are canonical whatever the file format: those of Qwen3.5's text model in Hugging Face, without a
    prefix (`layers.0.linear_attn.in_proj_qkv.weight` [C, D]).

    `source` is where it was read from, `config` the flat text configuration. `skipped` lists, under their stored
    names, the tensors that belong to the model but not to its text part; they are logged as one warning.
    """

    source: str
    config: dict[str, Any]
    skipped: tuple[str, ...]

    def __init__(self, source: str, config: Mapping[str, Any], skipped: Mapping[str, Sequence[str]]):
        """`skipped` maps a kind ("vision") to the stored names of that kind."""
        self.source = source
        self.config = dict(config)
        self.skipped = tuple(sorted(name for names in skipped.values() for name in names))
        if self.skipped:
            counts = ", ".join(f"{len(names)} {kind}" for kind, names in sorted(skipped.items()) if names)
            _log.warning(
                "%s: skipped %d tensors outside the text model (%s), such as %s",
                source,
                len(self.skipped),
                counts,
                self.skipped[0],
            )

    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """All canonical names, sorted."""

    @abc.abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of the tensor `name`, without touching its data.

        Raises:
            CheckpointError: there is no such tensor.
        """

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The tensor `name` in canonical layout and stored dtype: C-contiguous, in memory of its own.

        Raises:
            CheckpointError: there is no such tensor, its data cannot be had any more, or the checkpoint is closed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the files. Arrays already read stay valid; closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()
