"""The tokenizer of a Hugging Face directory as metadata of a GGUF file.

| key | value |
|---|---|
| tokenizer.ggml.model, .pre | "gpt2", byte-level BPE; the name of how text is cut before merging, see `SPLITS` |
| tokenizer.ggml.tokens | a token for every row of the embedding, by id |
| tokenizer.ggml.token_type | per token: 1 plain, 3 control (special), 4 user-defined (added), 5 unused (padding) |
| tokenizer.ggml.merges | pairs of tokens with a space between them, in order of rank |
| tokenizer.ggml.*_token_id | the roles of `SPECIAL_IDS`; further ends of a text are `eot` and `eom` |
| tokenizer.chat_template | as it is |

The format has no place for other settings, so a tokenizer that has them is not written at all: one that cuts text a
little differently is worse than none.
"""

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.strict_json import json_object
from checkpoints.text_files import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    chat_template,
    read_text_file,
    special_tokens,
)

__all__ = ["CONTROL", "NAMED_ENDS", "PREFIX", "SPECIAL_IDS", "SPLITS", "UNUSED", "USER_DEFINED", "TokenizerKindError",
           "tokenizer_metadata"]  # fmt: skip

_log = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
PLAIN, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Values of `token_type`: ordinary, meaning something to the model alone, whole words added later, and no token."""

SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
"""The keys that name the tokens of a role."""

NAMED_ENDS = ("<|im_end|>", "<|endoftext|>")
"""Tokens that programs of this format take for an end of text because of their name."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
}
"""`tokenizer.ggml.pre` -> how text is cut before merging: words with their mark or space, single digits, the rest."""


class TokenizerKindError(CheckpointError):
    """There is no tokenizer, or none that the format has a place for."""


def tokenizer_metadata(folder: Path, *, vocab: int, ends: Collection[int]) -> dict[str, Any]:
    """The metadata for the tokenizer in `folder`, for an embedding of `vocab` rows.

    `ends` are the ids that end a text beside the `eos_token` of `tokenizer_config.json`.

    Raises:
        TokenizerKindError: there is no `tokenizer.json`, or it is not a byte-level BPE of the kind above.
        CheckpointError: a file is damaged, or names tokens that do not fit each other or the embedding.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise TokenizerKindError(f"{folder}: there is no {TOKENIZER_FILE}")
    whole = json_object(read_text_file(file), str(file))
    if odd := next(_odd_settings(whole), None):
        raise TokenizerKindError(f"{file}: {odd}")
    split = _split_name(file, whole)
    tokens, types = _tokens(file, whole, vocab)
    settings_file = folder / TOKENIZER_CONFIG_FILE
    settings = json_object(read_text_file(settings_file), str(settings_file)) if settings_file.is_file() else {}
    template = chat_template(folder, settings)
    return {
        f"{PREFIX}model": "gpt2",
        f"{PREFIX}pre": split,
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": types,
        f"{PREFIX}merges": _merges(file, whole["model"]),
        f"{PREFIX}add_bos_token": False,
        **_special_ids(file, tokens, special_tokens(settings), ends),
        **({} if template is None else {"tokenizer.chat_template": _encodable(template.source, template.text)}),
    }


def _odd_settings(whole: Mapping[str, Any]) -> Iterator[str]:
    """What the format has no place for, in words."""
    model = whole.get("model")
    if not isinstance(model, Mapping) or model.get("type") != "BPE":
        yield "its model is not a BPE"
        return
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            yield f"its BPE has {key} {model[key]!r:.40}"
    for key in ("fuse_unk", "byte_fallback", "ignore_merges"):
        if model.get(key):
            yield f"its BPE has {key} set"
    for key, known in (("normalizer", ("NFC",)), ("decoder", ("ByteLevel",)), ("post_processor", (None, "ByteLevel"))):
        kind = _kind(whole.get(key))
        if kind not in known:
            yield f"its {key} is {kind}, and not {' or '.join(str(name) for name in known if name)}"


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else part


def _split_name(file: Path, whole: Mapping[str, Any]) -> str:
    """The name of how the tokenizer cuts text."""
    names = {json.dumps(_pre_tokenizer(pattern), sort_keys=True): name for name, pattern in SPLITS.items()}
    steps = whole.get("pre_tokenizer")
    steps = steps.get("pretokenizers") if isinstance(steps, Mapping) else None
    # `trim_offsets` concerns the positions of tokens in the text, not the tokens.
    stated = [{k: v for k, v in step.items() if k != "trim_offsets"} for step in steps or () if isinstance(step, dict)]
    name = names.get(json.dumps(stated, sort_keys=True))
    if name is None:
        raise TokenizerKindError(f"{file}: it cuts text in another way than {' and '.join(SPLITS)}")
    return name


def _pre_tokenizer(pattern: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ]


def _tokens(file: Path, whole: Mapping[str, Any], vocab: int) -> tuple[list[str], list[int]]:
    """Every token and its type, by id."""
    plain, added = whole["model"].get("vocab"), whole.get("added_tokens") or []
    if not isinstance(plain, dict) or not isinstance(added, list):
        raise CheckpointError(f"{file}: expected the model's vocab to be an object, and added_tokens to be a list")
    by_id: dict[int, tuple[str, int]] = {}
    for token, number in plain.items():
        _place(file, by_id, number, token, PLAIN, vocab)
    for entry in added:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise CheckpointError(f"{file}: an added token must be an object with content and id, got {entry!r:.80}")
        if odd := [key for key in ("lstrip", "rstrip", "single_word") if entry.get(key)]:
            raise TokenizerKindError(f"{file}: the added token {entry['content']!r:.40} has {odd[0]} set")
        kind = CONTROL if entry.get("special") else USER_DEFINED
        _place(file, by_id, entry.get("id"), entry["content"], kind, vocab)
    # Embeddings are often longer than the vocabulary, and readers of the format want a token for every row.
    pairs = [by_id.get(number, (f"[PAD{number}]", UNUSED)) for number in range(vocab)]
    if len({token for token, _ in pairs}) != vocab:
        raise CheckpointError(f"{file}: a token has two ids")
    return [token for token, _ in pairs], [kind for _, kind in pairs]


def _place(file: Path, by_id: dict[int, tuple[str, int]], number: Any, token: str, kind: int, vocab: int) -> None:
    if type(number) is not int or not 0 <= number < vocab:
        raise CheckpointError(
            f"{file}: token {token!r:.40} must have an id below {vocab}, the rows of the embedding, got {number!r:.40}"
        )
    if by_id.get(number, (token, kind))[0] != token:
        raise CheckpointError(f"{file}: tokens {by_id[number][0]!r:.40} and {token!r:.40} both have the id {number}")
    by_id[number] = (_encodable(str(file), token), kind)


def _merges(file: Path, model: Mapping[str, Any]) -> list[str]:
    """The merges as "first second"; newer files have pairs of their own."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{file}: expected the model's merges to be a list")
    return [_encodable(str(file), _merge(file, merge)) for merge in merges]


def _merge(file: Path, merge: Any) -> str:
    pair = merge.split(" ") if isinstance(merge, str) else merge
    halves = isinstance(pair, list) and len(pair) == 2 and all(isinstance(half, str) for half in pair)
    if not halves or not all(pair) or any(" " in half for half in pair):
        raise CheckpointError(f"{file}: a merge must be two tokens without spaces, got {merge!r:.40}")
    return " ".join(pair)


def _special_ids(file: Path, tokens: list[str], specials: Mapping[str, str], ends: Collection[int]) -> dict[str, int]:
    """The ids of the roles, and of further ends that readers would not know by their name.

    Roles and ends that are none of the tokens have no id here, and the model can never produce them.
    """
    number = {token: i for i, token in enumerate(tokens)}
    ids = {SPECIAL_IDS[role]: number[token] for role, token in specials.items() if token in number}
    rest = sorted(end for end in ends if end < len(tokens) and end != ids.get("eos_token_id"))
    if "eos_token_id" not in ids and rest:
        ids["eos_token_id"] = rest.pop(0)
    rest = [end for end in rest if tokens[end] not in NAMED_ENDS]
    if len(rest) > 2:
        _log.warning("%s: a GGUF file has no place for the ends of text %s", file, rest[2:])
    ids |= dict(zip(("eot_token_id", "eom_token_id"), rest, strict=False))
    return {PREFIX + key: value for key, value in ids.items()}


def _encodable(source: str, text: str) -> str:
    """Text that UTF-8 can hold: JSON can spell halves of surrogate pairs, which are no characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{source}: {text!r:.40} is not valid Unicode: {error.reason}") from None
    return text
