"""Checked access to settings that come out of a file: a configuration's keys, or a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError

__all__ = ["Settings"]

_LEAST_FLOAT, _GREATEST_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Settings:
    """Checked access to a mapping of settings whose keys all start with `prefix`."""

    def __init__(self, values: Mapping[str, Any], prefix: str = ""):
        self._values = values
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._values

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`. Given per layer, it must be the same wherever it is not 0."""
        value = self.value(key, default)
        if isinstance(value, np.ndarray):
            value = self._common(key, value)
        if type(value) is not int or value < least:
            raise self.error(key, f"must be an integer of at least {least}, got {value!r:.80}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number that float32, the format's own width, holds without overflow or loss of digits."""
        value = self.value(key, default)
        if type(value) not in (int, float) or not _LEAST_FLOAT <= value <= _GREATEST_FLOAT:
            raise self.error(key, f"must be a positive number within float32's range, got {value!r:.80}")
        return float(value)

    def value(self, key: str, default: Any = None) -> Any:
        """Whatever is there, else `default`; a key without a default must be there."""
        value = self._values.get(self._prefix + key, default)
        if value is None:
            raise self.error(key, "is missing and has no safe default")
        return value

    def error(self, key: str, problem: str) -> CheckpointError:
        """The error that says what is wrong with `key`."""
        return CheckpointError(f"{self._prefix}{key} {problem}")

    def _common(self, key: str, values: np.ndarray) -> Any:
        distinct = np.unique(values[values != 0])
        if len(distinct) > 1:
            raise self.error(key, f"differs between layers ({distinct[:4].tolist()}), which is not supported")
        return distinct[0].item() if len(distinct) else 0
