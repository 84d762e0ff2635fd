"""`gdn convert`: every route gives the same weights, whole or not at all, in bounded memory."""

import json
import shutil
import signal
import subprocess
import sys

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

import gdn_jax as gdn
from checkpoints import CheckpointError, open_checkpoint
from checkpoints.gguf_qwen import write_gguf
from checkpoints.q4_blocks import Q4Codes
from checkpoints.store import open_store
from checkpoints.store_manifest import LARGE_PROJECTIONS
from checkpoints.store_writer import draft_of
from gdn_jax import cli, convert, convert_verify
from gdn_jax.errors import UnsupportedError
from gdn_jax.q4_quantizers import quantize_rows
from tests.support import gguf_files, hf_files, text_files
from tests.support.paths import FIXTURES, MODELS

# F43: 2^-24 where 1 was added in float32, 2^-23 where the log of an exponential was taken.
BOUNDS = {"norm": 2.0**-24, "decay": 2.0**-23}


def run(capsys, *arguments):
    status = cli.main(["convert", *map(str, arguments)])
    return status, *capsys.readouterr()


def is_large(name):
    return ".linear_attn." in name and name.endswith(LARGE_PROJECTIONS)


def is_quantised(name, parts):
    """Of the models here, whose columns all divide by 32."""
    linear = name.endswith("_proj.weight") or name in ("embed_tokens.weight", "lm_head.weight")
    return is_large(name) or (parts == "all" and linear)


def values(path):
    """Every tensor as it is stored: arrays, or codes and scales."""
    with open_checkpoint(path) as checkpoint:
        names = checkpoint.names()
        return {n: checkpoint.read_q4(n) if checkpoint.info(n).dtype == "Q4_0" else checkpoint.read(n) for n in names}


def same(value, expected):
    if isinstance(expected, Q4Codes):
        return isinstance(value, Q4Codes) and all(same(a, b) for a, b in zip(value, expected, strict=True))
    return (value.dtype, value.shape, value.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not same(found[name], expected[name])] == []


def assert_within_gguf(found, expected):
    """Bits for matrices and for vectors widened to float32; norms and decays within their bounds (F43)."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith("A_log"):
            wide = value.astype(np.float64)
            assert np.all(np.abs(found[name] - wide) <= BOUNDS["decay"] * np.maximum(1, np.abs(wide)))
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            wide = value.astype(np.float64)
            assert np.all(np.abs(found[name] - wide) <= BOUNDS["norm"] * np.maximum(1, np.abs(1 + wide)))
        elif isinstance(value, np.ndarray) and (value.ndim == 1 or "conv1d" in name):
            assert same(found[name], value.astype(np.float32))
        else:
            assert same(found[name], value)


def entries(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return hf_files.model(tmp_path_factory.mktemp("hf") / "tiny", ml_dtypes.bfloat16)


# --- routes


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_models_of_transformers_keep_every_bit(tmp_path, model):
    expected = values(FIXTURES / model)
    done = convert.convert(FIXTURES / model, tmp_path / "a")
    assert (done.format, done.tier, done.quantiser, done.tensors) == ("orbax", "f32", None, len(expected))
    assert_same(values(tmp_path / "a"), expected)
    convert.convert(tmp_path / "a", tmp_path / "b")  # F46: nothing is transformed a second time
    assert_same(values(tmp_path / "b"), expected)
    with open_checkpoint(FIXTURES / model) as original, open_store(tmp_path / "b") as store:
        assert store.config == original.config
    ours, theirs = (gdn.load_stack(path) for path in (tmp_path / "b", FIXTURES / model))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), ours, theirs)))
    assert convert_verify.verify(FIXTURES / model, tmp_path / "b").passed


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in MODELS if "next" not in model])
def test_models_of_transformers_go_through_gguf(tmp_path, model):
    expected = values(FIXTURES / model)
    convert.convert(FIXTURES / model, tmp_path / "a.gguf")
    stored = values(tmp_path / "a.gguf")
    assert_within_gguf(stored, expected)
    verdict = convert_verify.verify(FIXTURES / model, tmp_path / "a.gguf")
    assert (verdict.passed, verdict.faults) == (True, ())
    assert 0 < verdict.worst <= 1
    assert verdict.exact + verdict.bounded == len(expected)
    assert verdict.bounded == 4 + 2 * 5 + 1 + 2  # decays, two norms a layer, the final one, q and k
    convert.convert(tmp_path / "a.gguf", tmp_path / "b")
    assert_same(values(tmp_path / "b"), stored)
    assert convert_verify.verify(tmp_path / "a.gguf", tmp_path / "b").passed


def test_what_gguf_cannot_hold_is_refused_before_any_work(tmp_path):
    with pytest.raises(CheckpointError, match=r"only dense Qwen3.5 models"):
        convert.convert(FIXTURES / "qwen3_next-f32", tmp_path / "a.gguf")
    tied = hf_files.model(tmp_path / "tied", tie_word_embeddings=True)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"needs lm_head.weight, which the source lacks"):
        convert.convert(tied, tmp_path / "a.gguf")
    config |= {"attention_bias": True}
    tensors = values(tied) | {"layers.1.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    hf_files.write(tied, config, tensors)
    with pytest.raises(CheckpointError, match=r"has no place for layers.1.self_attn.q_proj.bias"):
        convert.convert(tied, tmp_path / "a.gguf")
    cut = hf_files.model(tmp_path / "cut", linear_value_head_dim=16)
    with pytest.raises(UnsupportedError, match=r"'layers.0.linear_attn.out_proj.weight' cannot be Q4_0 in a GGUF file"):
        convert.convert(cut, tmp_path / "a.gguf", tier="q4")
    assert entries(tmp_path) == ["cut", "tied"]


@pytest.mark.slow
@pytest.mark.parametrize(("quantiser", "parts"), [("absmax", "all"), ("q4_0", "all"), ("mse", "gdn")])
def test_q4_is_the_same_on_every_route(tmp_path, source, quantiser, parts):
    """HF → Orbax, HF → GGUF → Orbax, HF → Orbax → GGUF, and quantising while loading."""
    recipe = {"tier": "q4", "quantiser": quantiser, "q4_parts": parts}
    done = convert.convert(source, tmp_path / "a", **recipe)
    convert.convert(source, tmp_path / "b.gguf", **recipe)
    convert.convert(tmp_path / "b.gguf", tmp_path / "c", **recipe)
    convert.convert(tmp_path / "a", tmp_path / "d.gguf", tier="q4", q4_parts=parts)
    convert.convert(tmp_path / "b.gguf", tmp_path / "e.gguf", tier="q4", q4_parts=parts)
    original, stored = values(source), values(tmp_path / "a")
    for name, value in original.items():
        expected = quantize_rows(value, quantiser) if is_quantised(name, parts) else value
        assert same(stored[name], expected)
    assert_within_gguf(values(tmp_path / "b.gguf"), stored)
    assert_same(values(tmp_path / "c"), values(tmp_path / "b.gguf"))
    assert_same(values(tmp_path / "d.gguf"), values(tmp_path / "b.gguf"))
    assert_within_gguf(values(tmp_path / "e.gguf"), values(tmp_path / "b.gguf"))
    paths = [tmp_path / name for name in ("a", "b.gguf", "c", "d.gguf", "e.gguf")]
    wanted = gdn.load_stack(source, tier="q4", quantiser=quantiser).layers.large
    for path in paths:
        loaded = gdn.load_stack(path, tier="q4").layers.large
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), loaded, wanted)))
    for origin, path in zip([source, source, paths[1], paths[0], paths[1]], paths, strict=True):
        verdict = convert_verify.verify(origin, path)
        assert (verdict.faults, verdict.tier, verdict.q4_parts) == ((), "q4", parts)
        assert verdict.quantiser == (quantiser if origin == source else None)
    quantised = [name for name in original if is_quantised(name, parts)]
    assert sorted(done.quantisation) == sorted(quantised)
    assert (done.q4_parts, done.not_q4) == (parts, ())
    for cost in done.quantisation.values():
        assert cost["max_error"] > 0
        assert 0.05 < cost["rms_relative"] < 0.12
        assert 0 < cost["zero_code_share"] < 0.25
        assert cost["zeroed_rows"] == 0
    with open_store(tmp_path / "a") as store:
        assert {name: store.records[name].quantisation for name in quantised} == done.quantisation


def test_q4_sources_lose_nothing_in_tier_f32(tmp_path, source):
    convert.convert(source, tmp_path / "a", tier="q4")
    convert.convert(tmp_path / "a", tmp_path / "b", tier="f32")
    for name, value in values(tmp_path / "b").items():
        assert isinstance(value, np.ndarray)
        with open_store(tmp_path / "a") as store:
            assert same(value, store.read(name))
    assert convert_verify.verify(tmp_path / "a", tmp_path / "b").passed


@pytest.mark.parametrize("parts", ["all", "gdn"])
def test_every_type_of_a_gguf_file_is_kept_or_widened(tmp_path, parts):
    """Tier q4 keeps the codes of any Q4_0 tensor; what is neither that nor a float becomes float32."""
    text = gguf_files.config()
    kinds = gguf.GGMLQuantizationType
    types = {
        "token_embd.weight": kinds.Q4_0,
        "output.weight": kinds.Q8_0,
        "blk.0.ssm_out.weight": kinds.Q4_0,
        "blk.0.attn_qkv.weight": kinds.Q8_0,
        "blk.0.ssm_alpha.weight": kinds.Q4_0,
        "blk.1.attn_q.weight": kinds.F16,
        "blk.2.attn_gate.weight": kinds.BF16,
    }
    path = gguf_files.write_qwen35(tmp_path / "m.gguf", text, gguf_files.model(text), types)
    original = values(path)
    done = convert.convert(path, tmp_path / "a", tier="q4", q4_parts=parts)
    stored = values(tmp_path / "a")
    for name, value in original.items():
        quantised = is_quantised(name, parts) and isinstance(value, np.ndarray)
        assert same(stored[name], quantize_rows(value) if quantised else value)
        assert quantised == (name in done.quantisation)
    assert isinstance(stored["embed_tokens.weight"], Q4Codes)
    if parts == "gdn":
        assert stored["lm_head.weight"].dtype == np.float32
        assert stored["layers.1.self_attn.q_proj.weight"].dtype == np.float16
    convert.convert(path, tmp_path / "b", tier="f32")
    with open_checkpoint(path) as checkpoint, open_store(tmp_path / "b") as dense:
        assert all(same(dense.read(name), checkpoint.read(name)) for name in checkpoint.names())
    for result in ("a", "b"):
        assert convert_verify.verify(path, tmp_path / result).passed


def test_what_a_gguf_source_says_beside_the_weights_is_carried(tmp_path, source):
    text, tokens = gguf_files.config(), [f"t{i}" for i in range(24)]
    extra = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 3, "general.name": "tiny"}
    write_gguf(tmp_path / "m.gguf", text, gguf_files.model(text).items(), metadata=extra)
    convert.convert(tmp_path / "m.gguf", tmp_path / "q.gguf", tier="q4", quantiser="q4_0")
    fields = gguf.GGUFReader(tmp_path / "q.gguf").fields
    assert {key: fields[key].contents() for key in extra} == extra
    assert fields["gdn_jax.quantiser"].contents() == "q4_0"
    assert fields["general.file_type"].contents() == 2
    assert convert_verify.verify(tmp_path / "m.gguf", tmp_path / "q.gguf").passed


# --- refusals


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"linear_value_head_dim": 8}, r"'layers.0.linear_attn.out_proj.weight' \[32, 48\]"),
        ({"hidden_size": 40}, r"'layers.0.linear_attn.in_proj_qkv.weight' \[224, 40\]"),
    ],
)
@pytest.mark.parametrize("name", ["a", "a.gguf"])
def test_a_layer_is_quantised_whole_or_not_at_all(tmp_path, changes, tensor, name):
    path = hf_files.model(tmp_path / "hf", **changes)
    with pytest.raises(UnsupportedError, match=f"tensor {tensor} cannot be 4-bit.*convert with tier f32"):
        convert.convert(path, tmp_path / name, tier="q4")
    assert entries(tmp_path) == ["hf"]


def test_codes_that_cannot_be_put_in_order_are_refused_in_tier_q4(tmp_path):
    text = gguf_files.config(linear_value_head_dim=16)
    types = {"blk.0.ssm_out.weight": gguf.GGMLQuantizationType.Q4_0}
    path = gguf_files.write_qwen35(tmp_path / "m.gguf", text, gguf_files.model(text), types)
    with pytest.raises(CheckpointError, match=r"'blk.0.ssm_out.weight': reordering"):
        convert.convert(path, tmp_path / "a", tier="q4")
    convert.convert(path, tmp_path / "a", tier="f32")
    assert entries(tmp_path) == ["a", "m.gguf"]


@pytest.mark.parametrize("name", ["a", "a.gguf"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_weights_that_cannot_be_quantised_are_named_and_nothing_is_left(tmp_path, name, bad):
    text = gguf_files.config()
    tensors = gguf_files.model(text)
    tensors["layers.2.linear_attn.in_proj_z.weight"][5, 7] = bad
    path = hf_files.write(tmp_path / "hf", text, tensors)
    with pytest.raises(CheckpointError, match=r"'layers.2.linear_attn.in_proj_z.weight' cannot be quantised: w "):
        convert.convert(path, tmp_path / name, tier="q4")
    assert entries(tmp_path) == ["hf"]


def test_places_and_requests_that_cannot_be_met(tmp_path, source, capsys, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there.gguf").write_bytes(b"mine")
    cases = [
        ((source, tmp_path / "there"), "there: exists already; remove it first"),
        ((source, tmp_path / "there.gguf"), "there.gguf: exists already"),
        ((source, tmp_path / "there", "--resume"), "there: exists already"),
        ((source, tmp_path / "none" / "a"), "none does not exist"),
        ((source, tmp_path / "none" / "a.gguf"), "none does not exist"),
        ((source, "/proc/a"), "/proc/a: cannot be written"),
        ((source, "/proc/a.gguf"), "/proc/a.gguf: cannot be written"),
        ((tmp_path / "none", tmp_path / "a"), "none: no such file or directory"),
        ((tmp_path / "there", tmp_path / "a"), "not a checkpoint of a supported kind"),
        ((source, source), "exists already"),
        ((source, tmp_path / "a.gguf", "--resume"), "cannot be resumed"),
        ((source, tmp_path / "a", "--tier", "f32", "--quantiser", "mse"), "--quantiser belongs to --tier q4"),
        ((source, tmp_path / "a", "--tier", "f32", "--q4-parts", "all"), "--q4-parts belongs to --tier q4"),
        ((source, source, "--verify"), "expected a converted checkpoint or a GGUF file to verify"),
    ]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    for arguments, message in cases:
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, "")
        assert message in err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 10, 10))
    for name in ("a", "a.gguf"):
        status, _, err = run(capsys, source, tmp_path / name)
        assert status == 2
        assert "bytes, but only 10 are free on its disk" in err
    assert entries(tmp_path) == ["there", "there.gguf"]
    assert (tmp_path / "there.gguf").read_bytes() == b"mine"
    for wrong in ({"tier": "bf16"}, {"quantiser": "best"}, {"q4_parts": "some"}, {"format": "zip"}):
        with pytest.raises(ValueError, match="must be one of"):
            convert.convert(source, tmp_path / "a", **wrong)


@pytest.mark.parametrize("name", ["a", "a.gguf"])
def test_linear_layers_that_cannot_be_4_bit_are_kept_as_stored_and_named(tmp_path, caplog, capsys, name):
    path = hf_files.model(tmp_path / "hf", ml_dtypes.bfloat16, intermediate_size=40)
    odd = tuple(f"layers.{layer}.mlp.down_proj.weight" for layer in range(3))
    status, out, _ = run(capsys, path, tmp_path / name, "--tier", "q4", "--verify", "--json")
    report = json.loads(out)
    assert (status, tuple(report["conversion"]["not_q4"])) == (0, odd)
    assert f"kept as stored, because their columns are not a multiple of 32: {odd[0]}" in caplog.text
    stored = values(tmp_path / name)
    for tensor in odd:
        assert same(stored[tensor], values(path)[tensor])
    assert {n for n in stored if isinstance(stored[n], Q4Codes)} == {
        n for n in stored if is_quantised(n, "all") and n not in odd
    }


# --- text files


@pytest.fixture
def with_texts(tmp_path):
    """A model with a tokenizer, a template and settings; its embedding is longer than the vocabulary."""
    path = hf_files.model(tmp_path / "hf", vocab_size=text_files.VOCAB + 3)
    text_files.write_tokenizer(path, add_bos_token=False)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "do_sample": True, "top_k": 5}))
    (path / "merges.txt").write_text("a b\n")
    (path / "README.md").write_text("not a part of the model")
    return path


def test_text_files_go_with_the_model_byte_for_byte(tmp_path, with_texts):
    for source, name in ((with_texts, "a"), (tmp_path / "a", "b")):
        convert.convert(source, tmp_path / name, tier="q4")
        assert convert_verify.verify(source, tmp_path / name).faults == ()
    texts = {"chat_template.jinja", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"}
    for name in ("a", "b"):
        assert set(entries(tmp_path / name)) == {"items", "manifest.json", *texts}
        assert all((tmp_path / name / text).read_bytes() == (with_texts / text).read_bytes() for text in texts)
    (with_texts / "merges.txt").write_text("a c\n")
    (with_texts / "vocab.json").write_text("{}")
    faults = convert_verify.verify(with_texts, tmp_path / "a").faults
    assert faults == ("the text files differ in merges.txt", "the text files differ in vocab.json")
    with pytest.raises(CheckpointError, match=r"another conversion, which differs in texts"):
        convert.convert(with_texts, tmp_path / "a", tier="q4", resume=True)


def test_a_decoder_needs_no_other_tokenizer_than_the_converted_one(tmp_path, with_texts):
    original = gdn.Decoder.load(with_texts)
    for name in ("a", "m.gguf"):
        convert.convert(with_texts, tmp_path / name)
        decoder = gdn.Decoder.load(tmp_path / name)
        assert decoder.tokenizer is not None
        assert decoder.ends == ((2, 7) if name == "a" else (0, 2, 7))  # by their names, GGUF files have both ends
        assert decoder.vision == original.vision
        assert (decoder.sampling == original.sampling) == (name == "a")
        chat = [{"role": "user", "content": "it's é€😀 1 the state"}]
        assert decoder.tokenizer.encode_chat(chat) == original.tokenizer.encode_chat(chat)


def test_other_programs_find_the_tokenizer_in_a_gguf_file(tmp_path, with_texts):
    convert.convert(with_texts, tmp_path / "a", tier="q4")
    for source, name in ((with_texts, "m.gguf"), (tmp_path / "a", "n.gguf"), (tmp_path / "m.gguf", "o.gguf")):
        convert.convert(source, tmp_path / name, tier="q4")
        fields = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / name).fields.items()}
        expected = text_files.gguf_metadata()
        padding = [f"[PAD{text_files.VOCAB + i}]" for i in range(3)]
        expected["tokenizer.ggml.tokens"] += padding
        expected["tokenizer.ggml.token_type"] += [gguf.TokenType.UNUSED] * 3
        expected |= {"tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.eot_token_id": 7}
        expected["tokenizer.ggml.add_bos_token"] = False
        assert {key: value for key, value in fields.items() if key.startswith("tokenizer.")} == expected
        assert convert_verify.verify(source, tmp_path / name).faults == ()
    (with_texts / "chat_template.jinja").write_text("{{ messages }}")
    [fault] = convert_verify.verify(with_texts, tmp_path / "m.gguf").faults
    assert "metadata key tokenizer.chat_template" in fault


def test_a_tokenizer_that_stays_behind_is_said_aloud(tmp_path, source, caplog):
    convert.convert(source, tmp_path / "m.gguf")
    assert "the GGUF file has no tokenizer" in caplog.text
    assert "there is no tokenizer.json" in caplog.text
    caplog.clear()
    convert.convert(tmp_path / "m.gguf", tmp_path / "a")
    assert caplog.text == ""
    text = gguf_files.config(vocab_size=text_files.VOCAB)
    path = tmp_path / "n.gguf"
    write_gguf(path, text, gguf_files.model(text).items(), metadata=text_files.gguf_metadata())
    convert.convert(path, tmp_path / "b")
    assert f"{path}: its tokenizer stays there; name the file where one is needed (--tokenizer)" in caplog.text


# --- interruption


class _Stop(Exception):
    """What the injected failure raises."""


def stopping_at(tensors):
    def progress(state):
        if state.tensors == tensors:
            raise _Stop

    return progress


def test_a_failure_at_any_tensor_leaves_nothing_and_is_resumed_to_the_same_bits(tmp_path, source):
    convert.convert(source, tmp_path / "whole", tier="q4")
    manifest = (tmp_path / "whole" / "manifest.json").read_bytes()
    count = len(values(source))
    for at in range(1, count + 1, 7):
        path = tmp_path / "model"
        for name in ("model", "model.gguf"):
            with pytest.raises(_Stop):
                convert.convert(source, tmp_path / name, tier="q4", progress=stopping_at(at))
        assert entries(tmp_path) == ["whole"]
        with pytest.raises(_Stop):
            convert.convert(source, path, tier="q4", resume=True, progress=stopping_at(at))
        assert entries(tmp_path) == [".model.partial", "whole"]
        done = convert.convert(source, path, tier="q4", resume=True)
        assert done.tensors == count == 3 + 14 + 11 + 14
        # The failure strikes before the item of the last tensor is written: one outside layers, then one a layer.
        assert done.resumed == max(finished for finished in (0, 3, 3 + 14, 3 + 14 + 11) if finished < at)
        assert (path / "manifest.json").read_bytes() == manifest
        assert entries(tmp_path) == ["model", "whole"]
        shutil.rmtree(path)


def test_a_finished_conversion_is_taken_over_whole(tmp_path, source):
    first = convert.convert(source, tmp_path / "a", tier="q4", resume=True)
    again = convert.convert(source, tmp_path / "a", tier="q4", resume=True)
    assert (first.resumed, again.resumed) == (0, first.tensors)
    assert again.quantisation == first.quantisation
    for change in ({"quantiser": "q4_0"}, {"q4_parts": "gdn"}):
        with pytest.raises(CheckpointError, match=f"another conversion, which differs in {next(iter(change))}"):
            convert.convert(source, tmp_path / "a", tier="q4", resume=True, **change)


def test_another_source_of_the_same_name_and_size_is_not_resumed(tmp_path):
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        hf_files.model(tmp_path / str(seed) / "hf", seed=seed)
    with pytest.raises(_Stop):
        convert.convert(tmp_path / "1" / "hf", tmp_path / "a", resume=True, progress=stopping_at(30))
    with pytest.raises(CheckpointError, match=r"another conversion, which differs in provenance.files"):
        convert.convert(tmp_path / "2" / "hf", tmp_path / "a", resume=True)
    assert draft_of(tmp_path / "a").is_dir()


PROGRAM = """
import sys, time
from gdn_jax import cli, convert
real = convert.Job.done
def slow(self, names, resumed=False):
    real(self, names, resumed)
    print("tensor", file=sys.stderr, flush=True)
    time.sleep(0 if resumed else 0.05)
convert.Job.done = slow
sys.exit(cli.main(sys.argv[1:]))
"""


def interrupted(number, *arguments):
    """The command, ended by signal `number` a while after its first tensors."""
    command = [sys.executable, "-c", PROGRAM, "convert", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for _ in range(24):
            process.stderr.readline()
        process.send_signal(number)
        err = process.stderr.read()
        return process.wait(60), err


@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_an_interrupt_leaves_nothing_behind(tmp_path, source, name):
    status, err = interrupted(signal.SIGINT, source, tmp_path / name, "--tier", "q4")
    assert (status, entries(tmp_path)) == (130, [])
    assert "gdn convert: interrupted" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_conversion_goes_on_with_resume(tmp_path, source, capsys, number):
    arguments = (source, tmp_path / "model", "--tier", "q4", "--resume")
    status, err = interrupted(number, *arguments)
    assert status in (130, -signal.SIGKILL)
    assert "Traceback" not in err
    assert entries(tmp_path) == [".model.partial"]
    assert run(capsys, source, tmp_path / "model", "--tier", "q4")[0] == 2
    assert entries(tmp_path) == [".model.partial"]
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    assert json.loads(out)["conversion"]["resumed"] > 0
    assert entries(tmp_path) == ["model"]
    assert convert_verify.verify(source, tmp_path / "model").passed


@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_a_disk_that_refuses_to_write_is_an_error_and_nothing_is_left(tmp_path, source, name):
    """A limit on the size of files stands for a full disk."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
    command = [sys.executable, "-c", limit + PROGRAM, "convert", str(source), str(tmp_path / name)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, entries(tmp_path)) == (2, "", [])
    # Orbax's threads write to the same stream: before it, after it, and in the middle of a line.
    assert "gdn convert: " in ran.stderr


# --- verification


def test_verify_finds_every_kind_of_difference(tmp_path, source):
    """One number of one tensor of each kind is changed in the source; configuration too."""
    text = gguf_files.config()
    tensors = gguf_files.model(text)
    original = hf_files.write(tmp_path / "hf", text, tensors)
    for name in ("a", "a.gguf"):
        convert.convert(original, tmp_path / name, tier="q4")
    names = ("norm.weight", "layers.0.linear_attn.A_log", "layers.0.linear_attn.in_proj_z.weight")
    names += ("layers.0.linear_attn.conv1d.weight", "layers.1.mlp.up_proj.weight", "layers.2.linear_attn.dt_bias")
    names += ("layers.0.linear_attn.in_proj_a.weight", "embed_tokens.weight")
    for name in names:
        changed = tensors[name].copy()
        changed.flat[1] += 1 if is_quantised(name, "all") else 2.0**-18
        other = hf_files.write(tmp_path / "hf", text, tensors | {name: changed})
        for result in ("a", "a.gguf"):
            faults = convert_verify.verify(other, tmp_path / result).faults
            assert len(faults) == 1
            assert repr(name) in faults[0]
    hf_files.write(tmp_path / "hf", text | {"rms_norm_eps": 1e-5}, tensors)
    assert convert_verify.verify(original, tmp_path / "a").faults == ("the configurations differ in rms_norm_eps",)
    [fault] = convert_verify.verify(original, tmp_path / "a.gguf").faults
    assert "layer_norm_rms_epsilon" in fault


def test_verify_only_compares_and_its_verdict_is_the_exit_status(tmp_path, source, capsys):
    status, out, _ = run(capsys, source, tmp_path / "a", "--tier", "q4", "--quantiser", "q4_0", "--verify")
    assert status == 0
    assert out.count("linear_attn") == 6
    assert "verified: " in out
    before = (tmp_path / "a" / "manifest.json").stat().st_mtime_ns
    status, out, _ = run(capsys, source, tmp_path / "a", "--verify", "--json")
    report = json.loads(out)
    assert (status, report["passed"], report["conversion"]) == (0, True, None)
    assert report["verification"]["quantiser"] == "q4_0"
    assert (tmp_path / "a" / "manifest.json").stat().st_mtime_ns == before
    for wrong in (("--tier", "f32"), ("--quantiser", "absmax"), ("--q4-parts", "gdn")):
        status, _, err = run(capsys, source, tmp_path / "a", "--verify", *wrong)
        assert status == 2
        assert f"not {wrong[1]}" in err
    data = max((tmp_path / "a" / "items" / "layers.1").rglob("*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    status, out, _ = run(capsys, source, tmp_path / "a", "--verify")
    assert status == 1
    assert "damaged" in out
    assert "FAILED" in out


def test_a_file_that_does_not_say_how_it_was_made_is_verified_with_what_is_given(tmp_path):
    text = gguf_files.config()
    tensors = gguf_files.model(text)
    source = hf_files.write(tmp_path / "hf", text, tensors)
    types = {
        f"blk.{layer}.{name}.weight": gguf.GGMLQuantizationType.Q4_0
        for layer in (0, 2)
        for name in ("attn_qkv", "attn_gate", "ssm_out")
    }
    path = gguf_files.write_qwen35(tmp_path / "m.gguf", text, tensors, types)
    for recipe in ({}, {"tier": "q4"}):
        with pytest.raises(CheckpointError, match="does not say how it was made"):
            convert_verify.verify(source, path, **recipe)
    assert convert_verify.verify(source, path, tier="q4", quantiser="absmax").faults != ()
    faults = convert_verify.verify(source, path, tier="q4", quantiser="q4_0").faults
    assert [fault for fault in faults if "tensor" in fault] == []


# --- cost


MEASURE = """
import sys
from gdn_jax import cli
status = cli.main(sys.argv[1:])
# The peak that getrusage reports begins with that of the process that started this one.
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1], file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    """180 MB, most of it two tensors: 1.5 times the largest one and 500 MB."""
    changes = {"hidden_size": 1024, "linear_value_head_dim": 128, "linear_key_head_dim": 128, "vocab_size": 40_000}
    text = gguf_files.config(**changes)
    some = np.linspace(-1, 1, 1 << 16, dtype=np.float32).astype(ml_dtypes.bfloat16)
    path = hf_files.write(tmp_path / "hf", text, {n: np.resize(some, s) for n, s in gguf_files.shapes(text).items()})
    with open_checkpoint(path) as checkpoint:
        largest = max(np.prod(checkpoint.info(name).shape) * 2 for name in checkpoint.names())
    for arguments in ((path, tmp_path / "a", "--tier", "q4", "--verify"), (tmp_path / "a", tmp_path / "b.gguf")):
        command = [sys.executable, "-c", MEASURE, "convert", *map(str, arguments)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        peak = int(ran.stderr.splitlines()[-1]) * 1024
        assert largest < peak < 1.5 * largest + 500e6


def test_items_are_cut_where_a_layer_is_too_large_to_hold(tmp_path, source, monkeypatch):
    monkeypatch.setattr(convert, "_LEAST_ITEM_BYTES", 4096)
    convert.convert(source, tmp_path / "a")
    assert_same(values(tmp_path / "a"), values(source))
    names = entries(tmp_path / "a" / "items")
    assert "layers.0.part2" in names
    with open_store(tmp_path / "a") as store:
        sizes = {}
        for name, record in store.records.items():
            sizes.setdefault(record.item, []).append(store.read(name).nbytes)
    largest = max(size for own in sizes.values() for size in own)
    assert all(len(own) == 1 or sum(own) <= max(4096, largest // 2) for own in sizes.values())


def test_many_tensors_are_shown_by_kind(tmp_path, source, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_TABLE_ROWS", 5)
    status, out, _ = run(capsys, source, tmp_path / "a", "--tier", "q4")
    assert status == 0
    with open_store(tmp_path / "a") as store:
        costs = {name: cost for name, record in store.records.items() if (cost := record.quantisation)}
    cells = [line.split() for line in out.splitlines()]
    rows = {row[0]: row[1:] for row in cells if row and row[0].startswith(("layers", "embed", "lm"))}
    assert len(rows) == 2 + 3 + 4 + 3
    worst = max(cost["max_error"] for name, cost in costs.items() if name.endswith("mlp.up_proj.weight"))
    assert float(rows["layers.*.mlp.up_proj.weight"][0]) == pytest.approx(worst, rel=1e-2)


def test_progress_is_printed_and_help_is_there(tmp_path, source, capsys):
    status, _, err = run(capsys, source, tmp_path / "a")
    assert status == 0
    last = err.splitlines()[-1]
    count = len(values(source))
    assert last.startswith(f"converting: {count}/{count} tensors, ")
    assert last.endswith("MB/s")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["convert", "--help"])
    assert stopped.value.code == 0
    assert "--quantiser" in capsys.readouterr().out
