"""Text to token ids and back, and what a model's files say about its text: ends, special tokens, chat template.

| found in | vocabulary | chat template | ends of a text |
|---|---|---|---|
| a directory | `tokenizer.json` | `chat_template.jinja`, else `tokenizer_config.json` | every `eos_token(_id)` |
| a GGUF file | `tokenizer.ggml.*`: byte-level BPE as Qwen's | `tokenizer.chat_template` | `…e[os,ot,om]_token_id` |
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from checkpoints.gguf_file import GgufFile
from checkpoints.gguf_qwen import is_gguf
from checkpoints.gguf_tokenizer import CONTROL, NAMED_ENDS, PREFIX, SPECIAL_IDS, SPLITS, UNUSED, USER_DEFINED
from checkpoints.strict_json import read_json
from checkpoints.text_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, chat_template, special_tokens
from gdn_jax.decoder.chat_template import ChatTemplate
from gdn_jax.decoder.generation_config import end_ids, token_ids
from gdn_jax.errors import CheckpointError, UnsupportedError

__all__ = ["Tokenizer", "has_tokenizer", "load_tokenizer"]

# The names of the tokens that stand for images and videos in Qwen's models. A configuration of text only does not list
# their ids, but the vocabulary has them.
_VISION = ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")

_GGUF_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Tokenizer:
    """A vocabulary with what belongs to it.

    `ends`: ids after which a text is over. `template`: the chat template, None where the model has none. `vision`: ids
    that stand for images or videos. `source` names the files in errors.
    """

    def __init__(
        self, backend: Backend, *, source: str, ends: Sequence[int] = (), template: ChatTemplate | None = None
    ):
        # A file may ask for cutting or padding, which belongs to training.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.source = source
        self.ends = tuple(sorted(set(ends)))
        self.template = template
        self.vision = frozenset(i for name in _VISION if (i := backend.token_to_id(name)) is not None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Special tokens written out in it count as such; `add_special_tokens` puts in the further
        ones that the vocabulary's files ask for at the beginning or end of a text.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens; U+FFFD stands for bytes that are no character."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The ids of a conversation, up to where the answer begins; see `ChatTemplate.render`.

        Raises:
            UnsupportedError: there is no chat template. Others: as `ChatTemplate.render`.
        """
        return self.encode(self.require_template().render(messages, **variables), add_special_tokens=False)

    def require_template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            UnsupportedError: there is none.
        """
        if self.template is None:
            raise UnsupportedError(f"{self.source}: there is no chat template with it; use plain text (--raw)")
        return self.template


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Whether the model at `path` comes with a tokenizer that `load_tokenizer` reads."""
    location = Path(path)
    if not is_gguf(location):
        return (location / TOKENIZER_FILE).is_file()
    with GgufFile(location) as file:
        return file.metadata.get(f"{PREFIX}model") == "gpt2" and file.metadata.get(f"{PREFIX}pre") in SPLITS


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer of a model: a directory with `tokenizer.json`, that file itself, or a GGUF file.

    Raises:
        CheckpointError: nothing is there, or it is damaged. UnsupportedError: a GGUF file with another vocabulary than
            a byte-level BPE cut as Qwen's.
    """
    location = Path(path)
    if is_gguf(location):
        with GgufFile(location) as file:
            return _from_gguf(str(location), file.metadata)
    file = location / TOKENIZER_FILE if location.is_dir() else location
    if not file.is_file():
        raise CheckpointError(
            f"{location}: no {TOKENIZER_FILE} there; name the directory that has it (--tokenizer DIR)"
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{file}: not a usable tokenizer: {error}") from error
    folder = file.parent
    settings = read_json(folder / TOKENIZER_CONFIG_FILE) if (folder / TOKENIZER_CONFIG_FILE).is_file() else {}
    specials = special_tokens(settings)
    end = backend.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
    ends = end_ids(folder) | token_ids(f"{file}: the end", end)
    found = chat_template(folder, settings)
    template = None if found is None else ChatTemplate(found.text, source=found.source, specials=specials)
    return Tokenizer(backend, source=str(file), ends=sorted(ends), template=template)


def _from_gguf(source: str, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes, with the normalisation (NFC) that Qwen's own files prescribe."""
    kind, split = metadata.get(f"{PREFIX}model"), metadata.get(f"{PREFIX}pre")
    if kind is None:
        raise UnsupportedError(
            f"{source}: the file holds no tokenizer; name a directory that has one (--tokenizer DIR)"
        )
    if kind != "gpt2" or split not in SPLITS:
        raise UnsupportedError(
            f"{source}: its tokenizer is of kind {kind!r} cut as {split!r}; read are 'gpt2' cut as "
            f"{' or '.join(map(repr, SPLITS))}. Name a directory with a {TOKENIZER_FILE} (--tokenizer DIR)"
        )
    tokens, merges = (_strings(source, metadata, key) for key in ("tokens", "merges"))
    types = metadata.get(f"{PREFIX}token_type", np.ones(len(tokens), np.int32))
    if not isinstance(types, np.ndarray) or types.shape != (len(tokens),):
        raise CheckpointError(f"{source}: {PREFIX}token_type must give one number for each of {len(tokens)} tokens")
    backend = _bpe(source, tokens, merges, SPLITS[split], padding=frozenset(np.flatnonzero(types == UNUSED).tolist()))
    for number, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [AddedToken(tokens[i], special=special, normalized=False) for i in np.flatnonzero(types == number)]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
    if metadata.get(f"{PREFIX}add_bos_token"):
        begin = _token(source, metadata, "bos_token_id", tokens)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[begin]} $A", special_tokens=[(tokens[begin], begin)]
        )
    named = {role: key for role, key in SPECIAL_IDS.items() if f"{PREFIX}{key}" in metadata}
    specials = {role: tokens[_token(source, metadata, key, tokens)] for role, key in named.items()}
    text = metadata.get("tokenizer.chat_template")
    template = ChatTemplate(text, source=source, specials=specials) if isinstance(text, str) else None
    return Tokenizer(backend, source=source, ends=sorted(_gguf_ends(source, metadata, tokens)), template=template)


def _bpe(source: str, tokens: list[str], merges: list[str], split: str, padding: frozenset[int]) -> Backend:
    """The vocabulary without what only fills the rows of an embedding, and stands for no text."""
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{source}: {PREFIX}tokens holds a token twice")
    vocabulary = {token: i for i, token in enumerate(tokens) if i not in padding}
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    if any(not second or " " in second for _, second in pairs):
        raise CheckpointError(f"{source}: {PREFIX}merges must be pairs of tokens with one space between them")
    try:
        backend = Backend(models.BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:  # the library raises nothing more specific: a merge of unknown tokens, broken text
        raise CheckpointError(f"{source}: its tokens and merges make no vocabulary: {error}") from error
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _gguf_ends(source: str, metadata: Mapping[str, Any], tokens: Sequence[str]) -> set[int]:
    """Files name one end, or two; the model may use the other as well, so those with the usual names count too."""
    stated = {_token(source, metadata, key, tokens) for key in _GGUF_ENDS if f"{PREFIX}{key}" in metadata}
    return stated | {i for i, token in enumerate(tokens) if token in NAMED_ENDS}


def _strings(source: str, metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(f"{PREFIX}{key}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{source}: {PREFIX}{key} must be a list of text")
    return values


def _token(source: str, metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> int:
    value = metadata.get(f"{PREFIX}{key}")
    if type(value) is not int or not 0 <= value < len(tokens):
        raise CheckpointError(f"{source}: {PREFIX}{key} must be one of the {len(tokens)} token ids, got {value!r:.80}")
    return value
