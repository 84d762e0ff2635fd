"""What a model's JSON files say about generating: where texts end, what stands for images, how to draw tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.strict_json import read_json
from gdn_jax.decoder.sample import GREEDY, SamplingParams
from gdn_jax.errors import CheckpointError

__all__ = ["END_KEYS", "VISION_KEYS", "end_ids", "named_ids", "recommended_sampling", "token_ids", "vision_ids"]

GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"

END_KEYS = ("eos_token_id",)
VISION_KEYS = ("image_token_id", "video_token_id")

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def end_ids(folder: Path) -> frozenset[int]:
    """Every id that `generation_config.json` or `config.json` in `folder` calls `eos_token_id`.

    A model may end its turns with one and its documents with another, so none of the files outranks another. Files
    that are not there say nothing.

    Raises:
        CheckpointError: an `eos_token_id` is neither an id nor a list of ids.
    """
    ends: set[int] = set()
    for name in (GENERATION_FILE, MODEL_FILE):
        ends |= _named(folder / name, END_KEYS)
    return frozenset(ends)


def vision_ids(folder: Path) -> frozenset[int]:
    """The ids that stand for images and videos, according to `config.json` in `folder`.

    Raises:
        CheckpointError: such an id is not an id.
    """
    return frozenset(_named(folder / MODEL_FILE, VISION_KEYS))


def recommended_sampling(folder: Path) -> SamplingParams:
    """The settings that `generation_config.json` in `folder` recommends: greedy unless it says `do_sample`.

    Raises:
        CheckpointError: a setting is of the wrong kind or out of range.
    """
    settings = _settings(folder / GENERATION_FILE)
    if settings.get("do_sample") is not True:
        return GREEDY
    chosen = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
    try:
        return SamplingParams(**chosen)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / GENERATION_FILE}: {error}") from error


def token_ids(what: str, value: Any) -> set[int]:
    """An id, a list of ids or None as a set; `what` names it in the error.

    Raises:
        CheckpointError: something else.
    """
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token < 0 for token in values):
        raise CheckpointError(f"{what} must be a token id or a list of token ids, got {value!r:.80}")
    return set(values)


def named_ids(settings: Mapping[str, Any], keys: tuple[str, ...], source: str) -> set[int]:
    """The ids under `keys`; `source` names the settings in the error.

    Raises:
        CheckpointError: a value is neither an id nor a list of ids.
    """
    return {i for key in keys for i in token_ids(f"{source}: {key}", settings.get(key))}


def _named(file: Path, keys: tuple[str, ...]) -> set[int]:
    """The ids under `keys`, on the top level of `file` and in its text part."""
    settings = _settings(file)
    levels = (settings, settings.get("text_config"))
    return {i for level in levels if isinstance(level, Mapping) for i in named_ids(level, keys, str(file))}


def _settings(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
