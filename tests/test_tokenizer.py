"""Text to ids and back, in one go and in pieces; chat templates; what files say about both."""

import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from checkpoints.gguf_qwen import write_gguf
from gdn_jax.decoder import decoder, generation_config
from gdn_jax.decoder.chat_template import ChatTemplate
from gdn_jax.decoder.sample import GREEDY, SamplingParams
from gdn_jax.decoder.text_stream import Detokenizer, StopFilter, TextStream
from gdn_jax.decoder.tokenizer import has_tokenizer, load_tokenizer
from gdn_jax.errors import CheckpointError, UnsupportedError
from tests.support import gguf_files, text_files

TEXTS = ["the state is a value", " the\n\nstate  is ", "it's é€😀1 23", "", "é é", "<|im_end|>the<|im_start|>"]
USER = [{"role": "user", "content": "the state"}]


@pytest.fixture
def folder(tmp_path):
    return text_files.write_tokenizer(tmp_path)


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(folder)


def test_a_directory_and_the_file_in_it_name_the_same_tokenizer(folder, tokenizer):
    for other in (tokenizer, load_tokenizer(folder / "tokenizer.json")):
        for text in TEXTS:
            assert other.encode(text) == text_files.backend().encode(text).ids
        assert other.decode(other.encode("it's é€😀 1")) == "it's é€😀 1"
        assert other.decode(other.encode("the<|im_end|>")) == "the"  # special tokens are no text
        assert other.ends == (text_files.backend().token_to_id("<|im_end|>"),)
        assert other.vision == {text_files.backend().token_to_id("<|image_pad|>")}


def test_cutting_and_padding_are_not_taken_over(tmp_path):
    backend = text_files.backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    assert load_tokenizer(tmp_path).encode(TEXTS[0]) == text_files.backend().encode(TEXTS[0]).ids


def write_model_gguf(path, metadata):
    text = gguf_files.config(vocab_size=text_files.VOCAB)
    write_gguf(path, text, gguf_files.model(text).items(), metadata=metadata)
    return path


def test_a_gguf_file_gives_the_same_ids_as_the_directory(tmp_path, tokenizer):
    path = write_model_gguf(tmp_path / "m.gguf", text_files.gguf_metadata())
    assert has_tokenizer(path)
    other = load_tokenizer(path)
    for text in TEXTS:
        assert other.encode(text) == tokenizer.encode(text), text
        assert other.decode(other.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert other.encode_chat(USER) == tokenizer.encode_chat(USER)
    ids = [text_files.backend().token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>")]
    assert other.ends == tuple(sorted(ids))
    assert other.vision == tokenizer.vision


def test_rows_of_the_embedding_without_a_token_are_no_text(tmp_path, tokenizer):
    metadata = text_files.gguf_metadata() | {"tokenizer.ggml.padding_token_id": 0}
    metadata["tokenizer.chat_template"] = "{{ pad_token }}{{ eos_token }}"
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "[PAD96]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 5]
    other = load_tokenizer(write_model_gguf(tmp_path / "m.gguf", metadata))
    assert other.decode([96, *tokenizer.encode("state")]) == "state"
    assert other.encode("[PAD96]") == tokenizer.encode("[PAD96]")
    assert other.require_template().render(USER) == "<|endoftext|><|im_end|>"


def test_the_two_ways_of_cutting_words_differ_in_combining_marks(tmp_path):
    mark = "e\u0323\u0301"  # composes to ẹ and a mark of its own
    paths = {
        split: write_model_gguf(tmp_path / f"{split}.gguf", text_files.gguf_metadata(split))
        for split in ("qwen2", "qwen35")
    }
    cut = {
        split: [piece for piece, _ in load_tokenizer(path)._backend.pre_tokenizer.pre_tokenize_str(f"a{mark}b")]
        for split, path in paths.items()
    }
    assert (len(cut["qwen35"]), len(cut["qwen2"])) == (1, 3)


def test_a_gguf_file_may_ask_for_a_token_at_the_beginning(tmp_path):
    metadata = text_files.gguf_metadata() | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
    tokenizer = load_tokenizer(write_model_gguf(tmp_path / "m.gguf", metadata))
    plain = text_files.backend().encode("the state").ids
    assert tokenizer.encode("the state") == [0, *plain]
    assert tokenizer.encode("the state", add_special_tokens=False) == plain


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (UnsupportedError, "holds no tokenizer.*--tokenizer", {"tokenizer.ggml.model": None}),
        (UnsupportedError, "kind 'llama' cut as 'qwen35'.*--tokenizer", {"tokenizer.ggml.model": "llama"}),
        (UnsupportedError, "kind 'gpt2' cut as 'gpt-4o'", {"tokenizer.ggml.pre": "gpt-4o"}),
        (UnsupportedError, "kind 'gpt2' cut as None", {"tokenizer.ggml.pre": None}),
        (CheckpointError, "ggml.tokens must be a list of text", {"tokenizer.ggml.tokens": [1, 2]}),
        (CheckpointError, "ggml.tokens holds a token twice", {"tokenizer.ggml.tokens": ["a"] * 96}),
        (CheckpointError, "one space between", {"tokenizer.ggml.merges": ["ab"]}),
        (CheckpointError, "one space between", {"tokenizer.ggml.merges": ["a b c"]}),
        (CheckpointError, "make no vocabulary", {"tokenizer.ggml.merges": ["nothing such"]}),
        (CheckpointError, "token_type must give one number", {"tokenizer.ggml.token_type": [1, 3]}),
        (CheckpointError, "eos_token_id must be one of the 96", {"tokenizer.ggml.eos_token_id": 96}),
        (CheckpointError, "the chat template is not valid", {"tokenizer.chat_template": "{% if %}"}),
    ],
)
def test_a_gguf_tokenizer_that_cannot_be_read_says_why(tmp_path, error, message, changes):
    path = write_model_gguf(tmp_path / "m.gguf", text_files.gguf_metadata(**changes))
    with pytest.raises(error, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b'{"model": {"type": "none"}}', b"\xff\xfe"])
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'tokenizer.json'}: not a usable tokenizer")):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer_is_refused_with_what_to_do(tmp_path):
    assert not has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"no tokenizer.json there; .*--tokenizer DIR"):
        load_tokenizer(tmp_path)


def test_without_the_library_a_named_tokenizer_is_refused_and_an_unnamed_one_does_without(monkeypatch, folder):
    monkeypatch.delitem(sys.modules, "gdn_jax.decoder.tokenizer")
    monkeypatch.delattr("gdn_jax.decoder.tokenizer")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert decoder._find_tokenizer(folder, None) is None
    with pytest.raises(UnsupportedError, match="needs the package tokenizers, which is not installed"):
        decoder._find_tokenizer(folder, folder)


# Ends, and recommended settings


def test_every_file_may_name_ends(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 0]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": 9}}))
    assert generation_config.end_ids(folder) == {0, 5, 7, 9}
    assert load_tokenizer(folder).ends == (0, 2, 5, 7, 9)


def test_no_file_need_name_an_end(tmp_path):
    assert generation_config.end_ids(tmp_path) == frozenset()
    text_files.write_tokenizer(tmp_path, eos_token=None)
    assert load_tokenizer(tmp_path).ends == ()


@pytest.mark.parametrize("value", ["2", [1, "2"], -1, True, 1.5, {"id": 2}])
def test_an_end_that_is_no_id_is_refused(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match="eos_token_id must be a token id or a list of token ids"):
        generation_config.end_ids(tmp_path)


def test_recommended_settings(tmp_path):
    assert generation_config.recommended_sampling(tmp_path) == GREEDY
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.7, "top_k": 20}))
    assert generation_config.recommended_sampling(tmp_path) == GREEDY  # nothing is drawn without do_sample
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": None}))
    assert generation_config.recommended_sampling(tmp_path) == SamplingParams(temperature=0.7, top_k=20, top_p=0.8)
    file.write_text(json.dumps({"do_sample": True, "top_p": 2}))
    with pytest.raises(CheckpointError, match=r"generation_config.json: top_p must lie in \(0, 1\]"):
        generation_config.recommended_sampling(tmp_path)


def test_places_for_images_are_found_in_a_nested_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": 90, "video_token_id": 91, "text_config": {}}))
    assert generation_config.vision_ids(tmp_path) == {90, 91}


# Chat templates


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_is_found_in_either_place(tmp_path, where):
    tokenizer = load_tokenizer(text_files.write_tokenizer(tmp_path, where=where))
    text = "<|im_start|>user\nthe state<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.require_template().render(USER) == text
    ids = tokenizer.encode_chat(USER)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == text_files.backend().token_to_id("<|im_start|>")


def test_the_file_outranks_the_setting_and_the_default_outranks_other_templates(tmp_path):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    text_files.write_tokenizer(tmp_path, template=several, where="tokenizer_config.json")
    assert load_tokenizer(tmp_path).require_template().render(USER) == "plain"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).require_template().render(USER) == "file"


def test_no_template_is_an_error_when_one_is_asked_for(tmp_path):
    tokenizer = load_tokenizer(text_files.write_tokenizer(tmp_path, template=None))
    with pytest.raises(UnsupportedError, match="no chat template"):
        tokenizer.encode_chat(USER)


def render(template, messages=USER, **variables):
    return ChatTemplate(template, source="model", specials={"eos_token": "</s>"}).render(messages, **variables)


def test_helpers_that_published_templates_call():
    assert render("{{ eos_token }}{{ messages[0].content }}{{ missing }}") == "</s>the state"
    assert render("{{ {'a': '<é>', 'b': [1, none]} | tojson }}") == '{"a": "<é>", "b": [1, null]}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}{{ 1 + 1 }}{% endgeneration %}b") == "a2b"
    assert render("{{ 'yes' if think is defined and not think else 'no' }}", think=False) == "yes"
    assert render("{{ tools is none }}{{ add_generation_prompt }}", add_generation_prompt=False) == "TrueFalse"
    assert render("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"  # blocks are trimmed
    assert render("{{ messages[::-1][0].role.split('s')[-1] }}{{ messages is sequence }}") == "erTrue"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('system messages are not taken') }}",
        "{{ messages.append(1) }}",  # the sandbox lets nothing be changed
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # and nobody out
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].nothing.at_all }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_an_error(template):
    with pytest.raises(ValueError, match="model: the chat template refuses this conversation"):
        render(template)


def test_a_template_that_is_no_template_is_refused_when_read():
    with pytest.raises(CheckpointError, match="model: the chat template is not valid"):
        ChatTemplate("{% for %}", source="model", specials={})


@pytest.mark.parametrize("content", ["plain", [{"type": "text", "text": "part"}], None])
def test_content_may_be_text_or_parts_of_text(content):
    assert render("{{ messages[0].role }}", [{"role": "user", "content": content}]) == "user"


@pytest.mark.parametrize(
    ("error", "message", "content"),
    [
        (UnsupportedError, "part of type 'image'; this is a text model", [{"type": "image", "image": "cat.png"}]),
        (UnsupportedError, "part of type 'video'", [{"type": "text", "text": "a"}, {"type": "video"}]),
        (UnsupportedError, "part of type 'str'", ["text"]),
        (TypeError, "must be text or a list of parts, got int", 3),
    ],
)
def test_content_of_another_kind_is_refused(error, message, content):
    with pytest.raises(error, match=message):
        render("", [{"role": "user", "content": content}])


@pytest.mark.parametrize("message", ["hello", {"content": "no role"}, {"role": 1, "content": "x"}])
def test_a_message_of_another_form_is_refused(message):
    with pytest.raises(TypeError, match=r"messages\[0\] must be a mapping with a 'role'"):
        render("", [message])


# Text as it comes


def streamed(decode, ids):
    detokenizer = Detokenizer(decode)
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


def byte_level(ids):
    return text_files.backend().decode(ids, skip_special_tokens=True)


def metaspace():
    """A vocabulary whose words carry their space in front, which is dropped at the beginning of a text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=100, initial_alphabet=["▁"], show_progress=False)
    backend.train_from_iterator(text_files.CORPUS, trainer)
    return backend


METASPACE = metaspace()


def words(ids):
    return METASPACE.decode(ids, skip_special_tokens=False)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, text_files.VOCAB - 1), max_size=120))
def test_pieces_make_up_the_text_of_any_tokens(ids):
    """Whatever bytes they are: the fixture's tokens include single bytes of longer characters."""
    assert "".join(streamed(byte_level, ids)) == byte_level(ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, METASPACE.get_vocab_size() - 1), max_size=120))
def test_pieces_make_up_the_text_where_words_carry_spaces(ids):
    assert "".join(streamed(words, ids)) == words(ids)


@pytest.mark.parametrize("text", ["it's é€😀 the state 😀😀", "é" * 100, "the state is " * 30])
def test_no_piece_holds_half_a_character(text):
    ids = text_files.backend().encode(text).ids
    pieces = streamed(byte_level, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > len(set(text)) / 2  # it comes as it grows, not at the end


def test_spaces_between_words_arrive_with_their_words():
    ids = METASPACE.encode("the state is a value").ids
    pieces = streamed(words, ids)
    assert pieces[0] == "the"
    assert "".join(pieces) == "the state is a value"


def test_bytes_that_never_become_a_character_come_out_in_bounded_time():
    """Each new token decodes a window, not the whole text."""
    lone = text_files.backend().token_to_id(pre_tokenizers.ByteLevel.alphabet()[0]) or next(
        token for token in range(text_files.VOCAB) if byte_level([token]) == "\ufffd"
    )
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return byte_level(ids)

    assert "".join(streamed(decode, [lone] * 500)) == byte_level([lone] * 500)
    assert max(decoded) < 40


def stream_of(text, stops):
    stream = TextStream(byte_level, stops)
    pieces = []
    for count, token in enumerate(text_files.backend().encode(text).ids, start=1):
        pieces.append(stream.push(token))
        if stream.stopped:
            return "".join(pieces), count
    return "".join([*pieces, stream.flush()]), None


@pytest.mark.parametrize(
    ("stops", "text", "wanted"),
    [
        (["state"], "the state is", "the "),
        (["is a"], "the state is a value", "the state "),  # across tokens
        (["tat"], "the state is", "the s"),  # inside a token
        (["value", "state"], "the state is a value", "the "),  # the first in the text, not in the list
        (["the"], "the state", ""),
        (["state of"], "the state is", "the state is"),  # only the beginning of one
        (["é€"], "it's é€😀", "it's "),
        (["ss"], "sss", ""),
        ([], "the state", "the state"),
    ],
)
def test_text_is_cut_exactly_before_the_first_stop_string(stops, text, wanted):
    assert stream_of(text, stops)[0] == wanted


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_filter_is_a_search_in_the_whole_text(pieces, stops):
    """And what it has let through never has to be taken back."""
    text, filtered, passed = "", StopFilter(stops), ""
    for piece in pieces:
        text, passed = text + piece, passed + filtered.push(piece)
        found = [text.find(stop) for stop in stops if stop in text]
        assert filtered.stopped == bool(found)
        if found:
            assert passed == text[: min(found)]
            return
        assert text.startswith(passed)
    assert passed + filtered.flush() == text
