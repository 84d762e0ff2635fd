"""The files beside a model's weights that say how text becomes tokens, how a conversation is written, when it ends."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints.errors import CheckpointError
from checkpoints.strict_json import MAX_JSON_BYTES

__all__ = [
    "SPECIAL_TOKENS",
    "TEMPLATE_FILE",
    "TEXT_FILES",
    "TOKENIZER_CONFIG_FILE",
    "TOKENIZER_FILE",
    "TemplateText",
    "chat_template",
    "digest",
    "read_text_file",
    "read_texts",
    "special_tokens",
]

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

TEXT_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    TEMPLATE_FILE,
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""What goes with a model wherever it goes; its `config.json` does not, because every format has its own."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""The roles that `tokenizer_config.json` gives to tokens, and that chat templates know them by."""


class TemplateText(NamedTuple):
    """A chat template, and the file that it stands in."""

    text: str
    source: str


def read_texts(folder: Path) -> dict[str, bytes]:
    """The contents of those of `TEXT_FILES` that lie in `folder`, by name; none where it is no directory.

    Raises:
        CheckpointError: a file is too large to be what its name says.
    """
    return {name: read_text_file(folder / name) for name in TEXT_FILES if (folder / name).is_file()}


def read_text_file(file: Path) -> bytes:
    """The contents of one such file.

    Raises:
        CheckpointError: it is missing, or too large to be what its name says.
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    with file.open("rb") as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: larger than {MAX_JSON_BYTES} bytes, which is no plausible text file of a model")
    return data


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal digits, as manifests record it."""
    return hashlib.sha256(data).hexdigest()


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that the contents of `tokenizer_config.json` name, by role: plain text, or objects with `content`."""
    stated = {role: settings.get(role) for role in SPECIAL_TOKENS}
    plain = {role: token.get("content") if isinstance(token, Mapping) else token for role, token in stated.items()}
    return {role: token for role, token in plain.items() if isinstance(token, str)}


def chat_template(folder: Path, settings: Mapping[str, Any]) -> TemplateText | None:
    """The template of the model in `folder`, whose `tokenizer_config.json` holds `settings`; None where it has none.

    A file of its own outranks the setting; of several templates the one called "default" is taken.

    Raises:
        CheckpointError: the file is not UTF-8, or the setting is not text.
    """
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            return TemplateText(read_text_file(file).decode("utf-8"), str(file))
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file}: not UTF-8: {error}") from error
    text, source = settings.get("chat_template"), str(folder / TOKENIZER_CONFIG_FILE)
    if isinstance(text, list):  # several, by name
        text = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, Mapping)}.get("default")
    if text is None:
        return None
    if not isinstance(text, str):
        raise CheckpointError(f"{source}: chat_template must be text, got {type(text).__name__}")
    return TemplateText(text, source)
