"""GGUF files of Qwen3.5 and Qwen3-Next against files made by the `gguf` package from layouts written out by hand."""

import itertools
import logging
import pathlib
import time
import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.gguf_qwen import open_gguf, write_gguf
from checkpoints.hf import open_hf
from tests.support import gguf_files as files

Q = gguf.GGMLQuantizationType
FIXTURES = pathlib.Path(__file__).parent / "fixtures"

# F43: 2^-24 where 1 was added in float32, 2^-23 where the log of an exponential was taken.
NORM_BOUND = 6e-8
DECAY_BOUND = 1.2e-7

GEOMETRIES = {
    "ratio 1": {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "ratio 2": {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 12},
    "ratio 3": {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
    "ratio 4, odd sizes": {"linear_num_key_heads": 3, "linear_num_value_heads": 12, "linear_value_head_dim": 5},
    "one key head": {"linear_num_key_heads": 1, "linear_num_value_heads": 4},
    "one head": {"linear_num_key_heads": 1, "linear_num_value_heads": 1},
    "width 1": {"linear_conv_kernel_dim": 1},
    "width 2, V < K": {"linear_conv_kernel_dim": 2, "linear_key_head_dim": 40, "linear_value_head_dim": 32},
    "GDN only": {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2},
    "tied": {"tie_word_embeddings": True},
}


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(bits(actual), bits(expected))


def assert_canonical(checkpoint, expected):
    """Every tensor of `expected` comes back: norms and decays within their bounds, the rest bit for bit."""
    assert checkpoint.names() == tuple(sorted(expected))
    for name, array in expected.items():
        read, info = checkpoint.read(name), checkpoint.info(name)
        assert (read.shape, info.shape) == (array.shape, array.shape)
        assert read.flags.c_contiguous
        assert read.flags.writeable
        error = np.abs(read.astype(np.float64) - array.astype(np.float64))
        if name.endswith("A_log"):
            assert np.all(error <= DECAY_BOUND * np.maximum(1, np.abs(array, dtype=np.float64)))
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            assert np.all(error <= NORM_BOUND * np.maximum(1, np.abs(1 + array.astype(np.float64))))
        else:
            assert_same_bits(read, array.astype(read.dtype))
            assert np.all(error == 0)
            assert info.dtype == read.dtype.name


# --- reading


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_qwen35_heads_are_grouped_again_and_numbers_undone(tmp_path, geometry):
    text = files.config(**GEOMETRIES[geometry])
    tensors = files.model(text)
    with open_gguf(files.write_qwen35(tmp_path / "m.gguf", text, tensors)) as checkpoint:
        assert_canonical(checkpoint, tensors)
        assert checkpoint.config == text
        assert checkpoint.skipped == ()
        assert checkpoint.source == str(tmp_path / "m.gguf")


@pytest.mark.parametrize(("joined", "fused"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_qwen3next_keeps_its_head_order_and_interleaves_only_what_it_should(tmp_path, geometry, joined, fused):
    text = files.moe_config(**GEOMETRIES[geometry])
    tensors = files.model(text)
    with open_gguf(files.write_qwen3next(tmp_path / "m.gguf", text, tensors, joined=joined, fused=fused)) as checkpoint:
        assert_canonical(checkpoint, tensors)
        expert_routing = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        assert {key: text.get(key, expert_routing.get(key)) for key in checkpoint.config} == checkpoint.config


def test_qwen35moe_has_tiled_heads_and_experts(tmp_path):
    text = files.moe_config(model_type="qwen3_5_moe_text")
    tensors = files.model(text)
    stored, values = files.stored_qwen35(text, tensors), files.metadata(text, "qwen35moe")
    with open_gguf(files.write(tmp_path / "m.gguf", "qwen35moe", values, stored)) as checkpoint:
        assert_canonical(checkpoint, tensors)
        assert checkpoint.config["model_type"] == "qwen3_5_moe_text"


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0])
def test_stored_types_are_kept_or_dequantised(tmp_path, kind):
    text = files.config()
    tensors = files.model(text)
    stored = files.stored_qwen35(text, tensors)
    matrices = [name for name, array in stored.items() if array.ndim == 2 and "conv1d" not in name]
    path = files.write_qwen35(tmp_path / "m.gguf", text, tensors, dict.fromkeys(matrices, kind))
    with open_gguf(path) as checkpoint:
        for name, array in tensors.items():
            if array.ndim != 2:
                continue
            # Every row is a whole number of groups, so that quantising commutes with the permutations.
            expected = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
            read = checkpoint.read(name)
            np.testing.assert_array_equal(read.astype(np.float32), expected.astype(np.float32))
            dtype = {Q.F16: "float16", Q.BF16: "bfloat16"}.get(kind, "float32")
            assert read.dtype.name == dtype
            assert checkpoint.info(name).dtype == (dtype if kind in (Q.F16, Q.BF16) else kind.name)


def logical(array):
    """Codes and scales of GGUF's own quantiser, taken out of the blocks byte by byte."""
    blocks = gguf.quants.quantize(array, Q.Q4_0)
    rows, groups = array.shape[0], array.shape[1] // 32
    codes, scales = np.empty(array.shape, np.int8), np.empty((rows, groups), np.float16)
    for row in range(rows):
        for group in range(groups):
            block = blocks[row, 18 * group : 18 * group + 18]
            scales[row, group] = block[:2].view(np.float16)[0]
            for j in range(16):
                codes[row, 32 * group + j] = int(block[2 + j] & 15) - 8
                codes[row, 32 * group + 16 + j] = int(block[2 + j] >> 4) - 8
    return codes, scales


@pytest.mark.parametrize("geometry", ["ratio 1", "ratio 2", "ratio 3", "one key head"])
def test_q4_codes_and_scales_come_out_bit_for_bit(tmp_path, geometry):
    text = files.config(**GEOMETRIES[geometry])
    tensors = files.model(text)
    names = ("attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_out.weight")
    types = {f"blk.{layer}.{name}": Q.Q4_0 for layer in (0, 2) for name in names} | {"token_embd.weight": Q.Q4_0}
    with open_gguf(files.write_qwen35(tmp_path / "m.gguf", text, tensors, types)) as checkpoint:
        parts = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_a.weight", "out_proj.weight")
        for name in ("embed_tokens.weight", *(f"layers.2.linear_attn.{part}" for part in parts)):
            codes, scales = logical(tensors[name])
            assert (scales < 0).any()
            read = checkpoint.read_q4(name)
            assert checkpoint.info(name).dtype == "Q4_0"
            assert_same_bits(read.codes, codes)
            assert_same_bits(read.scales, scales)
            expected = codes * np.repeat(scales, 32, axis=1).astype(np.float32)
            np.testing.assert_array_equal(checkpoint.read(name), expected)
        with pytest.raises(CheckpointError, match=r"'blk.0.ssm_beta.weight' is of type F32, expected Q4_0"):
            checkpoint.read_q4("layers.0.linear_attn.in_proj_b.weight")


@pytest.mark.parametrize("joined", [False, True])
def test_q4_of_interleaved_projections_and_of_experts(tmp_path, joined):
    text = files.moe_config()
    tensors = files.model(text)
    names = ["ssm_in.weight"] if joined else ["attn_qkv.weight", "attn_gate.weight"]
    names += ["ssm_ba.weight", "ssm_out.weight", "ffn_gate_up_exps.weight", "ffn_down_exps.weight"]
    path = files.write_qwen3next(
        tmp_path / "m.gguf", text, tensors, {f"blk.0.{name}": Q.Q4_0 for name in names}, joined=joined, fused=True
    )
    with open_gguf(path) as checkpoint:
        quantised = [name for name in checkpoint.names() if checkpoint.info(name).dtype == "Q4_0"]
        assert len(quantised) == 5 + 9
        for name in quantised:
            codes, scales = logical(tensors[name])
            assert_same_bits(checkpoint.read_q4(name).codes, codes)
            assert_same_bits(checkpoint.read_q4(name).scales, scales)


def test_q4_groups_that_a_reordering_would_cut_are_refused_but_can_be_read_dequantised(tmp_path):
    cut = {"linear_num_key_heads": 2, "linear_value_head_dim": 16}
    types = {"blk.0.ssm_out.weight": Q.Q4_0}
    name = "layers.0.linear_attn.out_proj.weight"
    text = files.config(**cut, linear_num_value_heads=4)
    tensors = files.model(text)
    with open_gguf(files.write_qwen35(tmp_path / "cut.gguf", text, tensors, types)) as checkpoint:
        with pytest.raises(CheckpointError, match=r"'blk.0.ssm_out.weight': reordering .* V is not a multiple of 32"):
            checkpoint.read_q4(name)
        assert np.abs(checkpoint.read(name) - tensors[name]).max() < 0.5
    text = files.config(**cut, linear_num_value_heads=2)  # R = 1: nothing is reordered
    tensors = files.model(text)
    with open_gguf(files.write_qwen35(tmp_path / "whole.gguf", text, tensors, types)) as checkpoint:
        assert_same_bits(checkpoint.read_q4(name).codes, logical(tensors[name])[0])


@pytest.mark.parametrize("value", [0.0, 0.5, -np.inf, np.nan])
def test_a_decay_that_is_no_negated_exponential_is_refused(tmp_path, value):
    text = files.config()
    stored = files.stored_qwen35(text, files.model(text))
    stored["blk.2.ssm_a"][3] = value
    path = files.write(tmp_path / "m.gguf", "qwen35", files.metadata(text, "qwen35"), stored)
    with open_gguf(path) as checkpoint, pytest.raises(CheckpointError, match=r"'blk.2.ssm_a': must be -exp\(A_log\)"):
        checkpoint.read("layers.2.linear_attn.A_log")


def test_unknown_names_and_closed_files_are_errors(tmp_path):
    text = files.config()
    checkpoint = open_gguf(files.write_qwen35(tmp_path / "m.gguf", text, files.model(text)))
    for method in (checkpoint.info, checkpoint.read, checkpoint.read_q4):
        with pytest.raises(CheckpointError, match=r"no tensor 'blk.0.ssm_a' among its"):
            method("blk.0.ssm_a")
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.read("norm.weight")


# --- metadata


def read_config(path, text, drop=(), **changes):
    stored = {name: array for name, array in files.stored_qwen35(text, files.model(text)).items() if name not in drop}
    with open_gguf(files.write(path, "qwen35", files.metadata(text, "qwen35", **changes), stored)) as checkpoint:
        return checkpoint.config


def test_layers_follow_the_flags_and_else_the_interval(tmp_path):
    text = files.config(
        num_hidden_layers=5, layer_types=["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"]
    )
    path = tmp_path / "m.gguf"
    flags = [True, True, True, False, True]
    for changes in (
        {"full_attention_interval": 2},  # contradicts the flags, which decide
        {"attention.recurrent_layers": None, "full_attention_interval": 4},
        {"attention.recurrent_layers": None},  # the format's default
        {"attention.recurrent_layers": [int(flag) for flag in flags]},
    ):
        assert read_config(path, text, **changes)["layer_types"] == text["layer_types"]
    with pytest.raises(CheckpointError, match=r"lacks .* tensors"):
        read_config(path, text, **{"attention.recurrent_layers": None, "full_attention_interval": 2})


def test_values_given_per_layer_and_optional_ones(tmp_path):
    text = files.config()
    path = tmp_path / "m.gguf"
    config = read_config(path, text, **{"attention.head_count_kv": [0, 1, 0], "feed_forward_length": [64, 64, 64]})
    assert config == text
    with pytest.raises(CheckpointError, match=r"qwen35.attention.head_count_kv differs between layers \(\[1, 2\]\)"):
        read_config(path, text, **{"attention.head_count_kv": [0, 1, 2]})
    config = read_config(path, text, **{"context_length": None, "rope.freq_base": None, "rope.dimension_count": None})
    assert "max_position_embeddings" not in config
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    config = read_config(path, text, **{f"rope.scaling.{key}": value for key, value in scaling.items()})
    assert config["rope_parameters"] == text["rope_parameters"] | {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = read_config(path, text, **{"rope.dimension_sections": [2, 1, 1, 0]})
    assert config["rope_parameters"]["mrope_section"] == [2, 1, 1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ssm.state_size": None}, "qwen35.ssm.state_size is missing"),
        ({"block_count": None}, "qwen35.block_count is missing"),
        ({"ssm.group_count": 0}, "qwen35.ssm.group_count must be an integer of at least 1, got 0"),
        ({"ssm.group_count": 4}, "linear_num_value_heads must be a multiple"),
        ({"ssm.inner_size": 193}, "qwen35.ssm.inner_size must be a multiple of the 6 value heads, got 193"),
        ({"ssm.time_step_rank": 1 << 30}, "qwen35.ssm.time_step_rank must be at most 4096"),
        ({"ssm.conv_kernel": 2.0}, "qwen35.ssm.conv_kernel must be an integer"),
        ({"embedding_length": "32"}, "qwen35.embedding_length must be an integer"),
        ({"block_count": (1 << 32) - 1}, "qwen35.block_count is 4294967295"),
        ({"nextn_predict_layers": 3}, "qwen35.block_count is 3, of which 3 are for multi-token prediction"),
        ({"attention.recurrent_layers": [True, False]}, "qwen35.attention.recurrent_layers must be 3 bools"),
        ({"attention.recurrent_layers": [2, 0, 1]}, "qwen35.attention.recurrent_layers must be 3 bools"),
        ({"attention.recurrent_layers": "all"}, "qwen35.attention.recurrent_layers must be 3 bools"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon must be a positive number within"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "within float32's range, got nan"),
        ({"attention.value_length": 8}, "qwen35.attention.value_length must equal attention.key_length"),
        ({"rope.dimension_count": 18}, "qwen35.rope.dimension_count must be even and at most the head size 16"),
        ({"rope.scaling.type": [1, 2]}, "qwen35.rope.scaling.type must be a string"),
        ({"ssm.state_size": ["8", "8"]}, "qwen35.ssm.state_size must be an integer of at least 1"),
        ({"ssm.state_size": [[8], [8, 8]]}, "qwen35.ssm.state_size must be an integer of at least 1"),
        ({"rope.dimension_sections": "1,1,2"}, "qwen35.rope.dimension_sections must be integers"),
        ({"expert_count": 4}, r"qwen35.expert_count is 4, which 'blk.0.ffn_gate_inp.weight' of shape \[\] contradicts"),
        ({"ssm.state_size": 9}, r"tensor 'blk.0.attn_qkv.weight': expected shape \[228, 32\], got \[224, 32\]"),
    ],
)
def test_metadata_that_is_missing_or_wrong_is_named(tmp_path, changes, problem):
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_config(tmp_path / "m.gguf", files.config(), **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'm.gguf'}: ")


def test_numbers_of_64_bits_are_read_and_their_excess_refused(tmp_path):
    text = files.config()
    stored = files.stored_qwen35(text, files.model(text))
    for value, theta in ((1e6, 1e6), (1e300, None), (1e-300, None)):
        values = files.metadata(text, "qwen35", **{"rope.freq_base": np.float64(value)})
        files.write(tmp_path / "m.gguf", "qwen35", values, stored)
        if theta is None:
            with pytest.raises(
                CheckpointError, match=r"rope.freq_base must be a positive number within float32's range"
            ):
                open_gguf(tmp_path / "m.gguf")
        else:
            with open_gguf(tmp_path / "m.gguf") as checkpoint:
                assert checkpoint.config["rope_parameters"]["rope_theta"] == theta


def test_absurd_expert_counts_are_refused_before_tables_are_built(tmp_path):
    text = files.moe_config()
    stored = files.stored_qwen3next(text, files.model(text))
    values = files.metadata(text, "qwen3next", expert_count=1 << 31)
    with pytest.raises(CheckpointError, match=r"expert_count is 2147483648, which .* of shape \[3, 32\] contradicts"):
        open_gguf(files.write(tmp_path / "m.gguf", "qwen3next", values, stored))
    values = files.metadata(text, "qwen3next", expert_count=1 << 15)
    stored["blk.0.ffn_gate_inp.weight"] = np.zeros((1 << 15, 32), np.float32)
    with pytest.raises(CheckpointError, match=r"expert_count times the number of layers must be at most 65536"):
        open_gguf(files.write(tmp_path / "m.gguf", "qwen3next", values, stored))


def test_many_layers_and_heads_are_refused_or_read_soon_and_in_little_memory(tmp_path):
    """A header of some 300 kB that claims 4096 layers of 4096 heads; one more of either is refused."""
    blocks = {f"blk.{layer}.a": np.zeros(1, np.float32) for layer in range(4096)}
    stored = blocks | {"token_embd.weight": np.zeros((2, 32), np.float32)}
    many = {"block_count": 4096, "attention.recurrent_layers": None, "ssm.group_count": 2, "ssm.inner_size": 4096}
    values = files.metadata(files.config(), "qwen35", **many, **{"ssm.time_step_rank": 4096})
    path = files.write(tmp_path / "m.gguf", "qwen35", values, stored)
    tracemalloc.start()
    try:
        start = time.thread_time()
        with pytest.raises(CheckpointError, match=r"the file lacks \d+ tensors"):
            open_gguf(path)
        assert time.thread_time() - start < 10
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    values["qwen35.block_count"] = 4097
    with pytest.raises(CheckpointError, match=r"qwen35.block_count is 4097, .* at most 4096, with 4097 tensors"):
        open_gguf(files.write(tmp_path / "m.gguf", "qwen35", values, stored))


def test_norm_weights_that_are_no_numbers_stay_so_without_a_warning(tmp_path):
    text = files.config()
    tensors = files.model(text)
    patterns = np.array([0x7F800001, 0x7FC00000, 0x7F800000, 0xFF800000], np.uint32)  # signalling, quiet, ±inf
    tensors["norm.weight"][:4] = patterns.view(np.float32)
    write_gguf(tmp_path / "m.gguf", text, tensors.items())
    with open_gguf(tmp_path / "m.gguf") as checkpoint:
        read = checkpoint.read("norm.weight")
    assert np.isnan(read[:2]).all()
    assert read[2:4].tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "clip"])
def test_other_architectures_are_refused(tmp_path, architecture):
    path = files.write(tmp_path / "m.gguf", architecture, {}, {"a": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match=f"general.architecture is '{architecture}'; supported are qwen35"):
        open_gguf(path)


# --- which tensors


def with_draft_block(text):
    """Stored tensors of a file whose last block is for multi-token prediction, and with a vision tensor."""
    stored = files.stored_qwen35(text, files.model(text))
    draft = {name.replace("blk.1.", "blk.3."): array for name, array in stored.items() if name.startswith("blk.1.")}
    draft |= {f"blk.3.nextn.{name}.weight": np.ones(32, np.float32) for name in ("enorm", "hnorm", "shared_head_norm")}
    draft["blk.3.nextn.eh_proj.weight"] = np.ones((32, 64), np.float32)
    return stored, draft | {"v.patch_embd.weight": np.ones((4, 4), np.float32)}


@pytest.mark.parametrize("flags", [[True, False, True, False], [True, False, True], None])
def test_draft_blocks_are_counted_in_block_count_and_skipped_aloud(tmp_path, caplog, flags):
    text = files.config()
    changes = {"block_count": 4, "nextn_predict_layers": 1, "attention.recurrent_layers": flags}
    if flags is None:
        changes["full_attention_interval"] = 2
    stored, outside = with_draft_block(text)
    path = files.write(tmp_path / "m.gguf", "qwen35", files.metadata(text, "qwen35", **changes), stored | outside)
    with caplog.at_level(logging.WARNING), open_gguf(path) as checkpoint:
        assert_canonical(checkpoint, files.model(text))
        assert checkpoint.config == text
        assert checkpoint.skipped == tuple(sorted(outside))
    [record] = caplog.records
    assert f"{len(outside)} tensors outside the text model" in record.getMessage()
    assert f"{len(outside) - 1} multi-token-prediction, 1 vision" in record.getMessage()


def test_a_draft_block_that_the_metadata_does_not_announce_is_unknown(tmp_path):
    text = files.config()
    stored, outside = with_draft_block(text)
    path = files.write(tmp_path / "m.gguf", "qwen35", files.metadata(text, "qwen35"), stored | outside)
    with pytest.raises(CheckpointError, match=r"15 tensors have no place in this model: blk.3.attn_k.weight, "):
        open_gguf(path)


@pytest.mark.parametrize("name", sorted(files.stored_qwen35(files.config(), files.model(files.config()))))
def test_every_missing_or_misshapen_tensor_is_named(tmp_path, name):
    text = files.config()
    stored = files.stored_qwen35(text, files.model(text))
    array = stored.pop(name)
    values = files.metadata(text, "qwen35")
    if name == "output.weight":  # its absence has a meaning
        with open_gguf(files.write(tmp_path / "m.gguf", "qwen35", values, stored)) as checkpoint:
            assert checkpoint.config["tie_word_embeddings"]
    else:
        with pytest.raises(CheckpointError, match=f"lacks .*{name}"):
            open_gguf(files.write(tmp_path / "m.gguf", "qwen35", values, stored))
    if name == "token_embd.weight":  # its rows define the vocabulary, so only its columns can be wrong
        array = array.T
    shape = [*array.shape[:-1], array.shape[-1] + 1]
    stored[name] = np.zeros(shape, np.float32)
    with pytest.raises(CheckpointError, match=r"tensor '.*': expected shape \[") as caught:
        open_gguf(files.write(tmp_path / "m.gguf", "qwen35", values, stored))
    assert f"{shape}" in str(caught.value)


def test_unknown_tensors_and_a_second_layout_are_named(tmp_path):
    text = files.config()
    stored = files.stored_qwen35(text, files.model(text))
    values = files.metadata(text, "qwen35")
    for extra in ("blk.0.attn_q.weight", "blk.0.ssm_ba.weight", "rope_freqs.weight", "blk.999999999999.ssm_a"):
        more = stored | {extra: np.zeros(4, np.float32)}
        with pytest.raises(CheckpointError, match=f"1 tensors have no place in this model: {extra}"):
            open_gguf(files.write(tmp_path / "m.gguf", "qwen35", values, more))


def test_types_that_cannot_be_read_are_refused_in_gdn_layers_and_otherwise_when_read(tmp_path):
    text = files.config()
    tensors = files.model(text)
    with pytest.raises(CheckpointError, match=r"'blk.2.ssm_out.weight' is of type Q5_0; supported are F32, F16"):
        open_gguf(files.write_qwen35(tmp_path / "m.gguf", text, tensors, {"blk.2.ssm_out.weight": Q.Q5_0}))
    path = files.write_qwen35(tmp_path / "m.gguf", text, tensors, {"output.weight": Q.Q5_0})
    with open_gguf(path) as checkpoint:
        assert checkpoint.info("lm_head.weight").dtype == "Q5_0"
        with pytest.raises(CheckpointError, match=r"'output.weight' is of type Q5_0, which is not supported"):
            checkpoint.read("lm_head.weight")


def test_axes_of_length_one_may_be_dropped_or_added(tmp_path):
    text = files.config(linear_num_key_heads=1, linear_num_value_heads=1, linear_conv_kernel_dim=1)
    tensors = files.model(text)
    stored = files.stored_qwen35(text, tensors)
    stored["blk.0.ssm_beta.weight"] = stored["blk.0.ssm_beta.weight"][0]
    stored["blk.0.ssm_conv1d.weight"] = stored["blk.0.ssm_conv1d.weight"][:, None]
    stored["output_norm.weight"] = stored["output_norm.weight"][None]
    path = files.write(tmp_path / "m.gguf", "qwen35", files.metadata(text, "qwen35"), stored)
    with open_gguf(path) as checkpoint:
        assert_canonical(checkpoint, tensors)


# --- writing


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_written_file_holds_what_a_converter_would_have_put_there(tmp_path, geometry, dtype):
    text = files.config(**GEOMETRIES[geometry])
    tensors = {name: array.astype(dtype) for name, array in files.model(text).items()}
    write_gguf(tmp_path / "m.gguf", text, tensors.items())
    expected = files.stored_qwen35(text, {name: array.astype(np.float64) for name, array in tensors.items()})
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert {tensor.name for tensor in reader.tensors} == set(expected)
    for tensor in reader.tensors:
        array = expected[tensor.name]
        assert tuple(tensor.shape[::-1]) == array.shape
        matrix = array.ndim == 2 and "conv1d" not in tensor.name
        kind = {np.float32: Q.F32, np.float16: Q.F16, ml_dtypes.bfloat16: Q.BF16}[dtype] if matrix else Q.F32
        assert tensor.tensor_type == kind
        np.testing.assert_array_equal(gguf.quants.dequantize(tensor.data, kind), array.astype(np.float32))
    values = {key: field.contents() for key, field in reader.fields.items() if key.startswith("qwen35.")}
    for key, value in files.metadata(text, "qwen35").items():
        assert values.pop(key) == (np.float32(value) if isinstance(value, float) else value)
    assert values.pop("qwen35.vocab_size") == text["vocab_size"]
    assert values.pop("qwen35.rope.dimension_sections") == [2, 1, 1, 0]
    interval = values.pop("qwen35.full_attention_interval")
    assert text["layer_types"] == [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(len(text["layer_types"]))
    ]
    assert values == {}
    with open_gguf(tmp_path / "m.gguf") as checkpoint:
        assert_canonical(checkpoint, tensors)
        assert checkpoint.config["rope_parameters"].pop("mrope_section") == [2, 1, 1]
        assert checkpoint.config["rope_parameters"].pop("mrope_interleaved") is True
        assert checkpoint.config == text


@pytest.mark.parametrize("fixture", ["qwen3_5-f32", "qwen3_5-bf16-sharded", "qwen3_5-f16-nested"])
def test_models_saved_by_transformers_survive_the_way_there_and_back(tmp_path, fixture):
    with open_hf(FIXTURES / fixture) as source:
        tensors = {name: source.read(name) for name in source.names()}
        config = source.config
    write_gguf(tmp_path / "m.gguf", config, tensors.items())
    with open_gguf(tmp_path / "m.gguf") as checkpoint:
        assert_canonical(checkpoint, tensors)
        assert {key: config[key] for key in checkpoint.config} == checkpoint.config


def test_an_irregular_layer_pattern_has_flags_and_no_interval(tmp_path):
    text = files.config(layer_types=["full_attention", "linear_attention", "linear_attention"])
    tensors = files.model(text)
    write_gguf(tmp_path / "m.gguf", text, tensors.items())
    assert "qwen35.full_attention_interval" not in gguf.GGUFReader(tmp_path / "m.gguf").fields
    with open_gguf(tmp_path / "m.gguf") as checkpoint:
        assert_canonical(checkpoint, tensors)


def test_norms_and_decays_settle_after_one_way_there_and_back(tmp_path):
    """F46: what was read from GGUF and is converted again changes no more."""
    text = files.config(hidden_size=4096, linear_num_value_heads=512, linear_value_head_dim=1)
    rng = np.random.default_rng(3)
    tensors = files.model(text)
    norms = np.concatenate([rng.normal(0, 3, 2048), rng.normal(0, 0.01, 1024), 10.0 ** rng.uniform(-12, 3, 1024)])
    tensors["norm.weight"] = norms.astype(np.float32)
    tensors["layers.0.linear_attn.A_log"] = rng.uniform(-87, 88, 512).astype(np.float32)
    tensors["layers.2.linear_attn.A_log"] = rng.normal(0, 2, 512).astype(np.float32)
    path, again = tmp_path / "m.gguf", tmp_path / "again.gguf"
    write_gguf(path, text, tensors.items())
    with open_gguf(path) as first:
        assert_canonical(first, tensors)
        write_gguf(again, first.config, ((name, first.read(name)) for name in first.names()))
        with open_gguf(again) as second:
            assert second.config == first.config
            for name in first.names():
                assert_same_bits(second.read(name), first.read(name))


def test_q4_goes_in_and_comes_out_bit_for_bit(tmp_path):
    """F54: GGUF blocks -> logical form -> GGUF blocks, signs, zeros and subnormals of the scales included."""
    text = files.config()
    tensors = files.model(text)
    quantised = [name for name, array in tensors.items() if array.ndim == 2]
    values = dict(tensors)
    for seed, name in enumerate(quantised):
        rng = np.random.default_rng(seed)
        rows, columns = tensors[name].shape
        scales = rng.integers(0, 1 << 16, (rows, columns // 32), np.uint16)
        scales[(scales & 0x7C00) == 0x7C00] &= 0x83FF  # no inf or NaN, but subnormals instead
        values[name] = (rng.integers(-8, 8, (rows, columns), np.int8), scales.view(np.float16))
    write_gguf(tmp_path / "a.gguf", text, values.items())
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    with open_gguf(tmp_path / "a.gguf") as checkpoint:
        for name in quantised:
            codes, scales = values[name]
            assert_same_bits(checkpoint.read_q4(name).codes, codes)
            assert_same_bits(checkpoint.read_q4(name).scales, scales)
        copied = {name: checkpoint.read_q4(name) if name in quantised else tensors[name] for name in tensors}
        write_gguf(tmp_path / "b.gguf", checkpoint.config, copied.items())
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_the_permutation_in_a_written_q4_file_is_that_of_the_numbers(tmp_path):
    text = files.config()
    tensors = files.model(text)
    name = "layers.0.linear_attn.out_proj.weight"
    write_gguf(tmp_path / "m.gguf", text, (tensors | {name: logical(tensors[name])}).items())
    [stored] = [
        tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors if tensor.name == "blk.0.ssm_out.weight"
    ]
    expected = np.ascontiguousarray(files.stored_qwen35(text, tensors)["blk.0.ssm_out.weight"])
    np.testing.assert_array_equal(stored.data, gguf.quants.quantize(expected, Q.Q4_0))


def test_further_metadata_is_carried_and_may_not_contradict_the_model(tmp_path):
    text = files.config()
    tokenizer = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 1, "general.name": "tiny"}
    write_gguf(tmp_path / "m.gguf", text, files.model(text).items(), metadata=tokenizer)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert {key: fields[key].contents() for key in tokenizer} == tokenizer
    with open_gguf(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config["eos_token_id"] == 1
    for key in ("general.architecture", "qwen35.block_count", "qwen35.anything", "general.alignment"):
        with pytest.raises(CheckpointError, match=f"metadata must not set {key}"):
            write_gguf(tmp_path / "other.gguf", text, (), metadata={key: 1})
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def failing(tensors):
    yield from itertools.islice(tensors.items(), 5)
    raise KeyboardInterrupt


WRONG = {
    "missing": (lambda tensors: itertools.islice(tensors.items(), 5), r"\d+ tensors of this model did not come"),
    "unknown": (lambda tensors: [("mtp.fc.weight", np.zeros(3))], "'mtp.fc.weight' has no place in this model"),
    "twice": (lambda tensors: [*tensors.items(), next(iter(tensors.items()))], "'embed_tokens.weight' came twice"),
    "shape": (lambda tensors: [("norm.weight", np.zeros(3, np.float32))], r"'norm.weight': .* \[32\], got \[3\]"),
    "dtype": (lambda tensors: [("norm.weight", np.zeros(32))], "'norm.weight': dtype must be one of .* got float64"),
    "decay too large": (
        lambda tensors: [("layers.0.linear_attn.A_log", np.full(6, 89, np.float32))],
        r"'layers.0.linear_attn.A_log': must lie in -87.3 … 88.7",
    ),
    "decay too small": (
        lambda tensors: [("layers.0.linear_attn.A_log", np.full(6, -88, np.float32))],
        "must lie in -87.3 … 88.7",
    ),
    "decay NaN": (
        lambda tensors: [("layers.0.linear_attn.A_log", np.full(6, np.nan, np.float32))],
        "must lie in -87.3 … 88.7",
    ),
    "no array": (
        lambda tensors: [("norm.weight", [1.0] * 32)],
        "'norm.weight': must be a numpy array, or a tuple of two",
    ),
    "q4 of a vector": (
        lambda tensors: [("norm.weight", (np.zeros(32, np.int8), np.zeros(1, np.float16)))],
        "'norm.weight': only matrices can be Q4_0",
    ),
    "q4 scales": (
        lambda tensors: [("embed_tokens.weight", (np.zeros((24, 32), np.int8), np.zeros((24, 2), np.float16)))],
        r"'embed_tokens.weight': scales must have shape \[24, 1\], got \[24, 2\]",
    ),
    "q4 codes": (
        lambda tensors: [("embed_tokens.weight", (np.full((24, 32), 8, np.int8), np.zeros((24, 1), np.float16)))],
        "'embed_tokens.weight': codes must lie in -8",
    ),
    "q4 infinite": (
        lambda tensors: [("embed_tokens.weight", (np.zeros((24, 32), np.int8), np.full((24, 1), np.inf, np.float16)))],
        "'embed_tokens.weight': .*inf",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("previous", [None, b"previous"])
def test_a_failed_write_names_the_tensor_and_leaves_nothing_behind(tmp_path, case, previous):
    path = tmp_path / "m.gguf"
    if previous is not None:
        path.write_bytes(previous)
    text = files.config()
    make, problem = WRONG[case]
    with pytest.raises(CheckpointError, match=problem):
        write_gguf(path, text, make(files.model(text)))
    assert [entry.name for entry in tmp_path.iterdir()] == ([] if previous is None else ["m.gguf"])
    assert previous is None or path.read_bytes() == previous


def test_an_interrupted_write_leaves_nothing_behind_and_a_whole_one_replaces(tmp_path):
    text = files.config()
    tensors = files.model(text)
    path = tmp_path / "m.gguf"
    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, text, failing(tensors))
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"previous")
    write_gguf(path, text, tensors.items())
    open_gguf(path).close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
    with pytest.raises(CheckpointError, match="is a directory"):
        write_gguf(tmp_path, text, tensors.items())
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_gguf(tmp_path / "none" / "m.gguf", text, tensors.items())


def test_q4_groups_that_a_reordering_would_cut_are_not_written(tmp_path):
    text = files.config(linear_value_head_dim=16)
    name = "layers.0.linear_attn.out_proj.weight"
    value = (np.zeros((32, 96), np.int8), np.zeros((32, 3), np.float16))
    with pytest.raises(CheckpointError, match=f"'{name}': cannot be Q4_0: reordering its value heads would cut groups"):
        write_gguf(tmp_path / "m.gguf", text, [(name, value)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "qwen3_next"}, "only dense Qwen3.5 models"),
        ({"num_experts": 4}, "only dense Qwen3.5 models"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"intermediate_size": 0}, "intermediate_size must be an integer of at least 1"),
        ({"rope_parameters": {"rope_theta": 1e7}}, "partial_rotary_factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' cannot be written"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' cannot be written"),
        ({"rope_parameters": [1]}, "rope_parameters must be a JSON object, got list"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.3}}, "must be an even number, got 4.8"),
        ({"rope_parameters": files.config()["rope_parameters"] | {"mrope_section": "1"}}, "mrope_section must be"),
        ({"linear_num_value_heads": 5}, "must be a multiple"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"rms_norm_eps": 1e-60}, "rms_norm_eps must be a positive number within float32's range, got 1e-60"),
    ],
)
def test_configurations_that_cannot_be_written_are_refused_before_any_work(tmp_path, changes, problem):
    with pytest.raises(CheckpointError, match=problem):
        write_gguf(tmp_path / "m.gguf", files.config(**changes), ())
    assert list(tmp_path.iterdir()) == []
