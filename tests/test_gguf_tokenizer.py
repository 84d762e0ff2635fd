"""Tokenizers as metadata of GGUF files: what the format can hold is written, and nothing else."""

import json

import pytest

from checkpoints import CheckpointError
from checkpoints.gguf_tokenizer import TokenizerKindError, tokenizer_metadata
from tests.support import text_files

VOCAB = text_files.VOCAB


@pytest.fixture
def folder(tmp_path):
    return text_files.write_tokenizer(tmp_path)


def metadata(folder, **changes):
    return tokenizer_metadata(folder, **({"vocab": VOCAB, "ends": ()} | changes))


def edit(folder, change):
    """The tokenizer's file after `change` of its contents."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    change(whole)
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def test_merges_may_be_texts_or_pairs(folder):
    stored = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in stored]
    for merges in (pairs, [" ".join(pair) for pair in pairs]):
        edit(folder, lambda whole, merges=merges: whole["model"].update(merges=merges))
        assert metadata(folder)["tokenizer.ggml.merges"] == [" ".join(pair) for pair in pairs]


def test_words_added_later_are_of_a_type_of_their_own(folder):
    added = {"id": VOCAB, "content": "<think>", "special": False, "normalized": False}
    edit(folder, lambda whole: whole["added_tokens"].append(added))
    found = metadata(folder, vocab=VOCAB + 2)
    assert found["tokenizer.ggml.tokens"][VOCAB:] == ["<think>", f"[PAD{VOCAB + 1}]"]
    assert found["tokenizer.ggml.token_type"][VOCAB:] == [4, 5]


@pytest.mark.parametrize(
    ("ends", "ids"),
    [
        ((), {"eos": 2}),
        ((2,), {"eos": 2}),
        ((0, 2), {"eos": 2}),  # <|endoftext|> is known by its name
        ((9, 2), {"eos": 2, "eot": 9}),
        ((9, 8, 2, VOCAB), {"eos": 2, "eot": 8, "eom": 9}),  # what is no token never comes
    ],
)
def test_every_end_of_text_has_a_place(folder, ends, ids):
    found = metadata(folder, ends=ends)
    names = ("eos", "eot", "eom")
    keys = {name: f"tokenizer.ggml.{name}_token_id" for name in names}
    assert {name: found[key] for name, key in keys.items() if key in found} == ids


def test_more_ends_than_places_are_said_aloud_and_the_settings_need_name_none(tmp_path, caplog):
    text_files.write_tokenizer(tmp_path, eos_token=None)
    found = metadata(tmp_path, ends=(5, 6, 7, 8))
    places = [found[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert places == [5, 6, 7]
    assert "no place for the ends of text [8]" in caplog.text
    (tmp_path / "tokenizer_config.json").unlink()
    assert "tokenizer.ggml.eos_token_id" not in metadata(tmp_path)


def part(name, **changes):
    return lambda whole: whole[name].update(changes)


KINDS = {
    "another model": (part("model", type="Unigram"), "its model is not a BPE"),
    "no model": (lambda whole: whole.update(model=None), "its model is not a BPE"),
    "dropout": (part("model", dropout=0.1), "its BPE has dropout 0.1"),
    "prefix": (part("model", continuing_subword_prefix="##"), "continuing_subword_prefix '##'"),
    "bytes": (part("model", byte_fallback=True), "byte_fallback set"),
    "whole words": (part("model", ignore_merges=True), "ignore_merges set"),
    "normalizer": (part("normalizer", type="NFKC"), "its normalizer is NFKC, and not NFC"),
    "no normalizer": (lambda whole: whole.update(normalizer=None), "its normalizer is None"),
    "decoder": (part("decoder", type="Metaspace"), "its decoder is Metaspace"),
    "post": (lambda whole: whole.update(post_processor={"type": "TemplateProcessing"}), "its post_processor is Temp"),
    "no split": (lambda whole: whole.update(pre_tokenizer=None), "cuts text in another way than qwen2 and qwen35"),
    "split": (lambda whole: whole["pre_tokenizer"]["pretokenizers"][0].update(invert=True), "cuts text in another way"),
    "pattern": (
        lambda whole: whole["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\w+"}),
        "cuts text in another way",
    ),
    "spaces": (
        lambda whole: whole["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        "cuts text in another way",
    ),
    "stripping": (lambda whole: whole["added_tokens"][0].update(lstrip=True), "'<|endoftext|>' has lstrip set"),
}


@pytest.mark.parametrize("case", KINDS)
def test_settings_that_the_format_cannot_hold_are_named(folder, case):
    change, message = KINDS[case]
    edit(folder, change)
    with pytest.raises(TokenizerKindError, match=message):
        metadata(folder)


DAMAGE = {
    "vocabulary a list": (part("model", vocab=["a"]), "vocab to be an object"),
    "added an object": (lambda whole: whole.update(added_tokens={"a": 1}), "added_tokens to be a list"),
    "added no object": (lambda whole: whole["added_tokens"].append("a"), "must be an object with content and id"),
    "merges": (part("model", merges=None), "merges to be a list"),
    "merge of three": (part("model", merges=[["a", "b", "c"]]), r"two tokens without spaces, got \['a', 'b', 'c'\]"),
    "merge of spaces": (part("model", merges=[["a ", "b"]]), "two tokens without spaces"),
    "merge with nothing": (part("model", merges=["a "]), "two tokens without spaces"),
    "merge of numbers": (part("model", merges=[[1, 2]]), "two tokens without spaces"),
    "an id twice": (lambda whole: whole["model"]["vocab"].update(zz=5), "'zz' both have the id 5"),
    "a token twice": (
        lambda whole: whole["added_tokens"].append({"id": VOCAB - 1, "content": "<|im_end|>"}),
        f"both have the id {VOCAB - 1}",
    ),
    "an id beyond": (lambda whole: whole["model"]["vocab"].update(zz=VOCAB), f"'zz' must have an id below {VOCAB}"),
    "an id of text": (lambda whole: whole["model"]["vocab"].update(zz="1"), "'zz' must have an id below"),
    "half a character": (part("model", vocab={"\ud800": 50}), "is not valid Unicode"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_an_error_and_no_other_kind_of_tokenizer(folder, case):
    change, message = DAMAGE[case]
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        metadata(folder)
    assert not isinstance(raised.value, TokenizerKindError)


def test_a_token_with_two_ids_is_refused(folder):
    edit(folder, lambda whole: whole["added_tokens"].append({"id": VOCAB, "content": "<|im_end|>"}))
    with pytest.raises(CheckpointError, match="a token has two ids"):
        metadata(folder, vocab=VOCAB + 1)


def test_no_tokenizer_is_a_kind_of_its_own(tmp_path):
    with pytest.raises(TokenizerKindError, match=r"there is no tokenizer.json"):
        metadata(tmp_path)
