"""JSON objects from files that nobody vouches for."""

import json
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError

__all__ = ["MAX_JSON_BYTES", "json_object", "read_json"]

# The largest published index is a few MB; the bound keeps a damaged length from deciding how much memory is taken.
MAX_JSON_BYTES = 100_000_000


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises:
        CheckpointError: the file is missing, too large, or not one JSON object with distinct keys.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: {size} bytes are no plausible JSON file; at most {MAX_JSON_BYTES} are read")
    return json_object(path.read_bytes(), str(path))


def json_object(data: bytes, source: str) -> dict[str, Any]:
    """The JSON object in `data`; `source` names it in errors.

    Raises:
        CheckpointError: `data` is not UTF-8, not JSON, not an object, or repeats a key.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: expected a JSON object, got {type(value).__name__}")
    return value


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A repeated key would let two readers of one file see two different checkpoints."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result
