"""What every reader offers: canonical names, shapes without reading data, one tensor at a time."""

import abc
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.q4_blocks import Q4Codes, Q4Words, pack_words

__all__ = ["Checkpoint", "TensorInfo"]

_log = logging.getLogger(__name__)


class TensorInfo(NamedTuple):
    """Canonical `shape` and stored `dtype` of one tensor: numpy's name ("bfloat16") or a block format's ("Q4_0")."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(abc.ABC):
    """An open checkpoint: a context manager that names its tensors and reads them one by one.

    Names and layouts are canonical whatever the file format: those of Qwen3.5's text model in Hugging Face, without a
    prefix (`layers.0.linear_attn.in_proj_qkv.weight` [C, D]).

    `source` is where it was read from, `config` the flat text configuration. `skipped` lists, under their stored
    names, the tensors that belong to the model but were not asked for, as not of its text part; they are logged as one
    warning.
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
        """All canonical names of the text model, sorted."""

    def mtp_names(self) -> tuple[str, ...]:
        """Those of the multi-token-prediction head, `mtp.…`, sorted: none where there is none, or none was asked for.

        The other methods take them too.
        """
        return ()

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

    def read_q4(self, name: str) -> Q4Codes:
        """The tensor `name` as int8 codes [N, I] and float16 scales [N, I/32], as stored, where it is stored in 4 bits.

        `info(name).dtype` is then "Q4_0". Experts that share a tensor are codes [E, N, I] and scales [E, N, I/32].

        Raises:
            CheckpointError: as `read`, or the tensor is stored in another type.
        """
        return self._refuse_q4(name)

    def read_words(self, name: str) -> Q4Words:
        """`read_q4` with the codes as device words, uint32 [N, I/8].

        Raises:
            CheckpointError: as `read_q4`.
        """
        codes, scales = self.read_q4(name)
        return Q4Words(pack_words(codes), scales)

    def _refuse_q4(self, name: str) -> NoReturn:
        raise CheckpointError(f"{self.source}: tensor {name!r} is stored as {self.info(name).dtype}, not in 4 bits")

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the files. Arrays already read stay valid; closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()
