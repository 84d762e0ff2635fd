"""A tiny byte-level BPE with a chat template, as files beside a model or inside a GGUF file."""

import functools
import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB = 96
"""The vocabulary of the committed checkpoints, which the tokenizer must not exceed."""
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Besides letters, the bytes of é (2), € (3) and 😀 (4), so that characters come in several tokens.
CORPUS = ["the state is a value and the step is a pure function of it\n", "é€😀 user assistant system, it's 1 2 3."] * 8
TEMPLATE = (
    "{%- if strict is defined and strict %}{{ raise_exception('no') }}{% endif %}"
    "{%- for message in messages %}\n"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\n"
    "{%- if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def _backend_json():
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(SPECIALS), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


def backend():
    """The tokenizer as an object of the library."""
    return Tokenizer.from_str(_backend_json())


def write_tokenizer(folder, *, template=TEMPLATE, where="chat_template.jinja", **settings):
    """`tokenizer.json` and its companions in `folder`; `settings` go into `tokenizer_config.json`."""
    (folder / "tokenizer.json").write_text(_backend_json())
    settings = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}} | settings
    if template is not None and where == "chat_template.jinja":
        (folder / where).write_text(template)
    elif template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def gguf_metadata(split="qwen35", **changes):
    """The same tokenizer as metadata of a GGUF file; a change to None leaves a key out."""
    stored = json.loads(_backend_json())
    vocabulary = stored["model"]["vocab"] | {token["content"]: token["id"] for token in stored["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.eos_token_id": vocabulary["<|im_end|>"],
        "tokenizer.chat_template": TEMPLATE,
    }
    return {key: value for key, value in (values | changes).items() if value is not None}
