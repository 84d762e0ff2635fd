"""Hugging Face directories: canonical names and layouts, exact bits, lazy reads, and what is refused."""

import gc
import json
import logging
import os
import random
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import Checkpoint, CheckpointError, TensorInfo, open_checkpoint
from checkpoints.hf import open_hf
from checkpoints.hf_config import GdnDims, gdn_dims
from checkpoints.names import gdn_shapes

BF16 = np.dtype(ml_dtypes.bfloat16)
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.")
LAYERS = 4
INDEX = "model.safetensors.index.json"


def make_config(*, key_heads=2, ratio=3, key_dim=4, value_dim=6, width=4, hidden=8, **more):
    return {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": LAYERS,
        "full_attention_interval": LAYERS,
        "hidden_size": hidden,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * ratio,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": width,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        **more,
    }


def random_bits(rng, shape, dtype=BF16):
    """Any bit pattern at all: NaNs, infinities and subnormals must come back as they are."""
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def make_tensors(config, dtype=BF16, seed=0):
    """Random canonical tensors of a whole small model, without a prefix."""
    rng = np.random.default_rng(seed)
    hidden, ffn = config["hidden_size"], 10
    shapes = {"embed_tokens.weight": (16, hidden), "norm.weight": (hidden,), "lm_head.weight": (16, hidden)}
    for layer in range(config["num_hidden_layers"]):
        if (layer + 1) % config["full_attention_interval"]:
            mixer = {f"linear_attn.{name}": shape for name, shape in gdn_shapes(gdn_dims(config)).items()}
        else:
            mixer = {f"self_attn.{name}_proj.weight": (12, hidden) for name in "qkv"}
            mixer |= {"self_attn.o_proj.weight": (hidden, 6)}
            mixer |= {"self_attn.q_norm.weight": (3,), "self_attn.k_norm.weight": (3,)}
        common = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        common |= {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
        common |= {"mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in (mixer | common).items()}
    return {name: random_bits(rng, shape, np.dtype(dtype)) for name, shape in shapes.items()}


def interleave(tensors, dims: GdnDims):
    """Qwen3-Next's layout of canonical tensors, put together one key head at a time."""
    result = dict(tensors)
    ratio = dims.value_heads // dims.key_heads
    for layer in range(LAYERS):
        prefix = f"layers.{layer}.linear_attn.in_proj_"
        if f"{prefix}qkv.weight" not in tensors:
            continue
        qkv, z, b, a = (result.pop(f"{prefix}{part}.weight") for part in ("qkv", "z", "b", "a"))
        keys = dims.key_heads * dims.key_dim
        q = qkv[:keys].reshape(dims.key_heads, dims.key_dim, -1)
        k = qkv[keys : 2 * keys].reshape(dims.key_heads, dims.key_dim, -1)
        v = qkv[2 * keys :].reshape(dims.value_heads, dims.value_dim, -1)
        z = z.reshape(dims.value_heads, dims.value_dim, -1)
        qkvz, ba = [], []
        for g in range(dims.key_heads):
            own = range(g * ratio, (g + 1) * ratio)
            qkvz += [q[g], k[g], *(v[h] for h in own), *(z[h] for h in own)]
            ba += [*(b[h] for h in own), *(a[h] for h in own)]
        result[f"{prefix}qkvz.weight"] = np.concatenate(qkvz)
        result[f"{prefix}ba.weight"] = np.stack(ba)
    return result


def write(folder: Path, config, tensors, prefix="model.", shards=1):
    """A directory as `save_pretrained` leaves it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    named = {name if name.startswith("lm_head") else prefix + name: tensor for name, tensor in tensors.items()}
    named = {name: np.array(tensor, order="C") for name, tensor in named.items()}
    if shards == 1:
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model.safetensors-{shard + 1:05}-of-{shards:05}.safetensors"
        own = {name: tensor for i, (name, tensor) in enumerate(named.items()) if i % shards == shard}
        save_file(own, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def assert_same_bits(checkpoint: Checkpoint, tensors):
    assert checkpoint.names() == tuple(sorted(tensors))
    for name, expected in tensors.items():
        got = checkpoint.read(name)
        assert checkpoint.info(name) == TensorInfo(expected.shape, expected.dtype.name)
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.tobytes() == expected.tobytes()
        assert got.flags.owndata
        assert got.flags.c_contiguous
        assert got.flags.writeable


@pytest.fixture
def count_bytes(monkeypatch):
    """A list of the byte counts of all reads from weight files."""
    counts = []
    real = os.preadv

    def counting(*args):
        counts.append(real(*args))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    return counts


# Names, layouts, bits.


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_prefix_gives_canonical_names_and_exact_bits(tmp_path, prefix, shards):
    config = make_config()
    tensors = make_tensors(config)
    with open_checkpoint(write(tmp_path, config, tensors, prefix, shards)) as checkpoint:
        assert checkpoint.source == str(tmp_path)
        assert checkpoint.config == config
        assert checkpoint.skipped == ()
        assert_same_bits(checkpoint, tensors)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_every_dtype_is_read_bit_by_bit(tmp_path, dtype):
    config = make_config()
    tensors = make_tensors(config, dtype)
    patterns = np.arange(1 << 16, dtype=np.uint16)
    patterns = (
        patterns.view(dtype) if np.dtype(dtype).itemsize == 2 else (patterns.astype(np.uint32) * 65537).view(dtype)
    )
    tensors["embed_tokens.weight"] = patterns.reshape(-1, 8)
    with open_hf(write(tmp_path, config, tensors)) as checkpoint:
        assert_same_bits(checkpoint, tensors)


def test_dtypes_may_differ_between_tensors(tmp_path):
    config = make_config()
    tensors = make_tensors(config)
    for layer in range(LAYERS - 1):
        tensors[f"layers.{layer}.linear_attn.A_log"] = np.arange(6, dtype=np.float32)
    with open_hf(write(tmp_path, config, tensors)) as checkpoint:
        assert_same_bits(checkpoint, tensors)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("key_heads", [1, 3])
def test_interleaved_projections_are_told_by_their_tensors_and_taken_apart(tmp_path, ratio, key_heads, model_type):
    config = make_config(ratio=ratio, key_heads=key_heads, key_dim=5, value_dim=3, model_type=model_type)
    tensors = make_tensors(config)
    folder = write(tmp_path, config, interleave(tensors, gdn_dims(config)))
    with open_hf(folder) as checkpoint:
        assert_same_bits(checkpoint, tensors)


def test_layers_may_differ_in_layout(tmp_path):
    config = make_config()
    tensors = make_tensors(config)
    mixed = interleave(tensors, gdn_dims(config))
    for name in list(mixed):
        if name.startswith("layers.1.linear_attn."):
            del mixed[name]
    mixed |= {name: tensor for name, tensor in tensors.items() if name.startswith("layers.1.linear_attn.")}
    with open_hf(write(tmp_path, config, mixed)) as checkpoint:
        assert_same_bits(checkpoint, tensors)


def test_a_converted_checkpoint_is_converted_no_further(tmp_path):
    config = make_config(model_type="qwen3_next")
    tensors = make_tensors(config)
    original = write(tmp_path / "interleaved", config, interleave(tensors, gdn_dims(config)))
    with open_hf(original) as checkpoint:
        converted = {name: checkpoint.read(name) for name in checkpoint.names()}
    with open_hf(write(tmp_path / "converted", config, converted, prefix="")) as checkpoint:
        assert_same_bits(checkpoint, tensors)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_squeezed_convolution_gets_its_middle_axis_back(tmp_path, width):
    config = make_config(width=width)
    tensors = make_tensors(config)
    squeezed = {name: tensor[:, 0] if "conv1d" in name else tensor for name, tensor in tensors.items()}
    with open_hf(write(tmp_path, config, squeezed)) as checkpoint:
        assert_same_bits(checkpoint, tensors)


def test_a_square_squeezed_convolution_is_ambiguous(tmp_path):
    config = make_config(key_heads=1, ratio=1, key_dim=1, value_dim=2, width=4)
    tensors = make_tensors(config)
    squeezed = {name: tensor[:, 0] if "conv1d" in name else tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"conv1d.weight': expected shape \[4, 1, 4\], got \[4, 4\]"):
        open_hf(write(tmp_path, config, squeezed))


def test_nested_configuration_and_layer_types(tmp_path):
    text = make_config(layer_types=["linear_attention"] * 3 + ["full_attention"])
    tensors = make_tensors(text)
    nested = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}
    with open_hf(write(tmp_path, nested, tensors, "model.language_model.")) as checkpoint:
        assert checkpoint.config == text | {"tie_word_embeddings": True}
        assert_same_bits(checkpoint, tensors)


def test_mixture_of_experts_and_attention_biases_have_their_names(tmp_path):
    config = make_config(model_type="qwen3_next", attention_bias=True)
    tensors = make_tensors(config)
    small = np.ones((2, 3), np.float32)
    for part in (
        *("mlp.gate.weight", "mlp.shared_expert_gate.weight", "mlp.shared_expert.down_proj.weight"),
        *("mlp.experts.0.gate_proj.weight", "mlp.experts.511.down_proj.weight"),
        *("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ):
        tensors[f"layers.0.{part}"] = small
    tensors |= {f"layers.3.self_attn.{name}_proj.bias": small for name in "qkvo"}
    with open_hf(write(tmp_path, config, tensors)) as checkpoint:
        assert_same_bits(checkpoint, tensors)


def test_other_parts_of_the_model_are_skipped_aloud(tmp_path, caplog):
    config = make_config()
    tensors = make_tensors(config)
    folder = write(tmp_path, config, tensors)
    outside = (
        "mtp.fc.weight",
        "model.mtp.norm.weight",
        "visual.patch_embed.proj.bias",
        "model.visual.pos_embed.weight",
    )
    stored = {f"model.{name}": tensor for name, tensor in tensors.items()}
    # A dtype that the text model may not have: what is skipped is not judged.
    save_file(stored | {name: np.ones(3, np.int64) for name in outside}, folder / "model.safetensors")
    with caplog.at_level(logging.WARNING), open_hf(folder) as checkpoint:
        assert checkpoint.skipped == tuple(sorted(outside))
        assert_same_bits(checkpoint, tensors)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}: skipped 4 tensors outside the text model (2 multi-token-prediction, 2 vision), "
        "such as model.mtp.norm.weight"
    )


def test_symbolic_links_are_followed(tmp_path):
    config = make_config()
    tensors = make_tensors(config)
    blobs = write(tmp_path / "blobs", config, tensors, shards=2)
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate(sorted(blobs.iterdir())):
        blob = file.rename(blobs / f"{number:064x}")
        (tmp_path / "snapshot" / file.name).symlink_to(blob)
    with open_checkpoint(tmp_path / "snapshot") as checkpoint:
        assert_same_bits(checkpoint, tensors)


# Laziness.


def test_opening_reads_the_header_and_reading_reads_one_tensor(tmp_path, count_bytes):
    config = make_config()
    tensors = make_tensors(config)
    folder = write(tmp_path, config, interleave(tensors, gdn_dims(config)))
    with (folder / "model.safetensors").open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    with open_hf(folder) as checkpoint:
        assert sum(count_bytes) == 8 + header
        for name in checkpoint.names():
            checkpoint.info(name)
        assert sum(count_bytes) == 8 + header
        for name, tensor in tensors.items():
            count_bytes.clear()
            checkpoint.read(name)
            assert sum(count_bytes) == tensor.nbytes


def write_sparse(path: Path, shapes):
    """A BF16 safetensors file of zeros that takes next to no disk space."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    blob = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(blob).to_bytes(8, "little") + blob)
        file.truncate(8 + len(blob) + offset)


def test_a_file_of_the_27b_is_opened_and_read_by_the_part(tmp_path, count_bytes):
    config = make_config(key_heads=16, key_dim=128, value_dim=128, hidden=5120, num_hidden_layers=64)
    tensors = {"model.language_model.embed_tokens.weight": (248320, 5120), "lm_head.weight": (248320, 5120)}
    for layer in range(64):
        prefix = f"model.language_model.layers.{layer}."
        if (layer + 1) % config["full_attention_interval"]:
            tensors |= {f"{prefix}linear_attn.{name}": shape for name, shape in gdn_shapes(gdn_dims(config)).items()}
        tensors |= {f"{prefix}mlp.{name}_proj.weight": (17408, 5120) for name in ("gate", "up")}
        tensors |= {f"{prefix}mlp.down_proj.weight": (5120, 17408)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_sparse(tmp_path / "model.safetensors", tensors)
    assert (tmp_path / "model.safetensors").stat().st_size > 45e9
    with open_hf(tmp_path) as checkpoint:
        assert sum(count_bytes) < 200_000
        assert checkpoint.info("layers.62.linear_attn.in_proj_qkv.weight") == TensorInfo((10240, 5120), "bfloat16")
        count_bytes.clear()
        assert checkpoint.read("layers.62.linear_attn.norm.weight").shape == (128,)
        assert sum(count_bytes) == 256


def test_short_reads_are_continued(tmp_path, monkeypatch):
    config = make_config()
    tensors = make_tensors(config)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    with open_hf(write(tmp_path, config, interleave(tensors, gdn_dims(config)))) as checkpoint:
        assert_same_bits(checkpoint, tensors)


# Life of the open files.


def test_closed_checkpoints_read_nothing_more_and_arrays_stay(tmp_path):
    config = make_config()
    tensors = make_tensors(config)
    with open_hf(write(tmp_path, config, tensors)) as checkpoint:
        norm = checkpoint.read("norm.weight")
    checkpoint.close()
    assert norm.tobytes() == tensors["norm.weight"].tobytes()
    with pytest.raises(
        CheckpointError, match=r"safetensors: the checkpoint is closed, so tensor 'model\.norm\.weight'"
    ):
        checkpoint.read("norm.weight")


def test_a_file_cut_after_opening_is_noticed(tmp_path):
    config = make_config()
    folder = write(tmp_path, config, make_tensors(config))
    with open_hf(folder) as checkpoint:
        os.truncate(folder / "model.safetensors", 9)
        with pytest.raises(CheckpointError, match=r"safetensors: the file ends inside tensor .*; it was longer"):
            checkpoint.read("norm.weight")


def test_an_unknown_name_is_an_error_naming_it(tmp_path):
    config = make_config()
    with open_hf(write(tmp_path, config, make_tensors(config))) as checkpoint:
        for ask in (checkpoint.info, checkpoint.read):
            with pytest.raises(CheckpointError, match=r"no tensor 'model\.norm\.weight'"):
                ask("model.norm.weight")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files through /proc")
def test_a_refused_directory_leaves_no_file_open(tmp_path):
    config = make_config()
    folder = write(tmp_path, config, make_tensors(config), shards=3)
    last = sorted(folder.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError, match=last.name):
        open_hf(folder)
    assert os.listdir("/proc/self/fd") == before


# What the dispatcher refuses.


def test_a_path_of_no_known_kind_is_told_what_is_supported(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(CheckpointError, match="supported: a Hugging Face directory"):
            open_checkpoint(path)
    with pytest.raises(CheckpointError, match="no such file or directory"):
        open_checkpoint(str(tmp_path / "absent"))


# Tensors that do not fit the configuration.

L1 = "layers.1.linear_attn."


def dropped(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def added(**tensors):
    return lambda given: given | tensors


def renamed(old, new):
    return lambda tensors: {new if name == old else name: tensor for name, tensor in tensors.items()}


def replaced(name, change):
    return lambda tensors: tensors | {name: change(tensors[name])}


ONES = np.ones(3, np.float32)
BAD_TENSORS = {
    "unknown": (added(**{"rotary.inv_freq": ONES}), r"1 tensors have no place.*'model\.rotary\.inv_freq' \(unknown"),
    "many unknown": (added(**{f"x{i}": ONES for i in range(9)}), r"9 tensors have no place.*'model\.x0'.* and 5 more"),
    "unknown part": (added(**{"layers.0.mlp.up_proj.bias": ONES}), r"layers\.0\.mlp\.up_proj\.bias' \(unknown name"),
    "newline": (added(**{"norm.weight\n": ONES}), r"'model\.norm\.weight\\n' \(unknown name"),
    "leading zero": (added(**{"layers.01.mlp.up_proj.weight": ONES}), r"layers\.01\..*\(unknown name"),
    "huge layer": (added(**{f"layers.{'9' * 5000}.mlp.up_proj.weight": ONES}), r"\(unknown name"),
    "layer too many": (added(**{"layers.4.mlp.up_proj.weight": ONES}), r"layers\.4\..*configuration has 4 layers"),
    "gdn in full layer": (
        added(**{"layers.3.linear_attn.dt_bias": ONES}),
        r"dt_bias' \(the configuration says full_att",
    ),
    "attention in gdn layer": (added(**{"layers.1.self_attn.q_proj.weight": ONES}), r"q_proj.*says linear_attention"),
    "bias not announced": (added(**{"layers.3.self_attn.q_proj.bias": ONES}), r"q_proj\.bias' \(attention_bias is not"),
    "two prefixes": (
        added(**{"language_model.norm.weight": ONES}),
        r"'model\.\S*norm\.weight' and 'model\.\S*norm\.weight' are both 'norm\.weight'",
    ),
    "integers": (
        replaced("norm.weight", lambda t: t.view(np.int16)),
        r"'model\.norm\.weight': dtype I16; supported are",
    ),
    "float64": (replaced(L1 + "A_log", lambda t: t.astype(np.float64)), r"linear_attn\.A_log': dtype F64"),
    "missing": (dropped(L1 + "A_log"), r"layer 1 lacks linear_attn\.A_log \[6\]$"),
    "missing two": (
        dropped(L1 + "A_log", L1 + "out_proj.weight"),
        r"A_log \[6\], linear_attn\.out_proj\.weight \[8, 36\]",
    ),
    "misspelt": (renamed(L1 + "A_log", L1 + "a_log"), r"linear_attn\.a_log' \(unknown name"),
    "transposed": (
        replaced(L1 + "out_proj.weight", np.transpose),
        r"out_proj.*expected shape \[8, 36\], got \[36, 8\]",
    ),
    "flattened": (replaced(L1 + "out_proj.weight", np.ravel), r"out_proj.*expected shape \[8, 36\], got \[288\]"),
    "scalar": (replaced(L1 + "dt_bias", lambda t: t[0].reshape(())), r"dt_bias': expected shape \[6\], got \[\]"),
    "conv transposed": (
        replaced(L1 + "conv1d.weight", lambda t: t[:, 0].T),
        r"conv1d\.weight': expected shape \[52, 1, 4\], got \[4, 52\]",
    ),
    "conv frames first": (
        replaced(L1 + "conv1d.weight", lambda t: t.transpose(0, 2, 1)),
        r"conv1d\.weight': expected shape \[52, 1, 4\], got \[52, 4, 1\]",
    ),
}
BAD_INTERLEAVED = {
    "half": (dropped(L1 + "in_proj_ba.weight"), r"layer 1 lacks linear_attn\.in_proj_ba\.weight \[12, 8\]$"),
    "other half": (dropped(L1 + "in_proj_qkvz.weight"), r"layer 1 lacks linear_attn\.in_proj_qkvz\.weight \[88, 8\]$"),
    "both": (
        added(**{L1 + "in_proj_z.weight": ONES}),
        r"layer 1 holds interleaved projections \(model\.layers\.1\.linear_attn\.in_proj_qkvz\.weight, .*in_proj_ba"
        r"\.weight\) and separate ones \(model\.layers\.1\.linear_attn\.in_proj_z\.weight\)",
    ),
    "both halves": (
        renamed(L1 + "in_proj_ba.weight", L1 + "in_proj_b.weight"),
        r"interleaved projections \(\S+in_proj_qkvz\.weight\) and separate ones \(\S+in_proj_b\.weight\)",
    ),
    "misshapen": (
        replaced(L1 + "in_proj_qkvz.weight", lambda t: t[:-1]),
        r"in_proj_qkvz\.weight': expected shape \[88, 8\], got \[87, 8\]",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    config = make_config()
    folder = write(tmp_path, config, change(make_tensors(config)))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path)) + "(?s:.*)" + message):
        open_hf(folder)


@pytest.mark.parametrize(("change", "message"), BAD_INTERLEAVED.values(), ids=BAD_INTERLEAVED)
def test_interleaved_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    config = make_config()
    folder = write(tmp_path, config, change(interleave(make_tensors(config), gdn_dims(config))))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path)) + "(?s:.*)" + message):
        open_hf(folder)


def test_checkpoints_converted_by_mlx_are_refused(tmp_path):
    config = make_config()
    folder = write(tmp_path, config, make_tensors(config))
    save_file(make_tensors(config), folder / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(CheckpointError, match=r"saved by MLX.*adds 1 to the norm weights"):
        open_hf(folder)


# Directories whose files are missing or disagree.


def edit_index(change):
    def edit(folder):
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def first_shard(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def overwrite(file, data):
    return lambda folder: (folder / file).write_bytes(data)


def copy_a_tensor_to_the_last_shard(folder):
    with open_hf(folder) as checkpoint:
        norm = checkpoint.read("norm.weight")
    save_file({"model.norm.weight": norm}, folder / "extra.safetensors")
    edit_index(lambda weights: weights.update({"model.extra": "extra.safetensors"}))(folder)


def keep_only(suffix):
    def edit(folder):
        (folder / INDEX).unlink()
        for file in folder.glob("*.safetensors"):
            file.rename(file.with_suffix(suffix))

    return edit


def elsewhere(shard):
    return edit_index(lambda weights: weights.update({"model.norm.weight": shard}))


REFUSED_NAME = r"index\.json: tensor 'model\.norm\.weight': expected a \.safetensors file in the same directory, got"
BAD_DIRECTORIES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json: no such file"),
    "config no json": (overwrite("config.json", b"{"), r"config\.json: not valid JSON"),
    "config a list": (overwrite("config.json", b"[]"), r"config\.json: expected a JSON object, got list"),
    "config not utf-8": (overwrite("config.json", b"\xff{}"), r"config\.json: not valid JSON"),
    "config repeats a key": (overwrite("config.json", b'{"a": 1, "a": 2}'), r"the key 'a' occurs twice"),
    "config too deep": (overwrite("config.json", b'{"a":' * 100_000), r"config\.json: not valid JSON"),
    "config of another model": (overwrite("config.json", b'{"model_type": "llama"}'), r"config\.json: .*'llama'"),
    "config without sizes": (
        overwrite("config.json", b'{"model_type": "qwen3_next"}'),
        r"config\.json: .*'hidden_size'",
    ),
    "index no json": (overwrite(INDEX, b"nope"), r"index\.json: not valid JSON"),
    "index without a map": (overwrite(INDEX, b'{"weights": {}}'), r"index\.json: expected 'weight_map'"),
    "index empty": (overwrite(INDEX, b'{"weight_map": {}}'), r"index\.json: expected 'weight_map'"),
    "shard absent": (lambda folder: first_shard(folder).unlink(), r"missing shards of .*00001-of-00002.*complete\?"),
    "shard a directory": (lambda f: (first_shard(f).unlink(), (f / "x.safetensors").mkdir()), r"missing shards"),
    "shard truncated": (
        lambda f: os.truncate(first_shard(f), first_shard(f).stat().st_size - 5),
        r"00001-of.*: tensor '\S+': truncated: it ends",
    ),
    "shard up": (elsewhere("../model.safetensors"), REFUSED_NAME),
    "shard absolute": (elsewhere("/etc/model.safetensors"), REFUSED_NAME),
    "shard below": (elsewhere("sub/model.safetensors"), REFUSED_NAME),
    "shard backslash": (elsewhere("..\\model.safetensors"), REFUSED_NAME),
    "shard drive": (elsewhere("c:model.safetensors"), REFUSED_NAME),
    "shard dots": (elsewhere(".."), REFUSED_NAME),
    "shard pickled": (elsewhere("model.bin"), REFUSED_NAME),
    "shard no string": (elsewhere(7), REFUSED_NAME),
    "shard with a null": (elsewhere("a\0.safetensors"), r"missing shards"),
    "tensor not in shard": (
        edit_index(lambda weights: weights.update({"model.ghost": weights["model.norm.weight"]})),
        r"tensor 'model\.ghost' is listed in model\S+ and found in no shard",
    ),
    "tensor not in index": (
        edit_index(lambda weights: weights.pop("model.norm.weight")),
        r"tensor 'model\.norm\.weight' is listed in no shard and found in model\S+",
    ),
    "tensor in another shard": (
        edit_index(lambda weights: weights.update({"model.norm.weight": weights["lm_head.weight"]})),
        r"tensor 'model\.norm\.weight' is listed in \S+-00001-of\S+ and found in \S+-00002-of",
    ),
    "tensor in two shards": (
        copy_a_tensor_to_the_last_shard,
        r"'model\.norm\.weight' is in both extra\.saf\S+ and model",
    ),
    "stale single file": (overwrite("model.safetensors", b""), r"does not mention model\.safetensors; remove"),
    "index lost": (lambda folder: (folder / INDEX).unlink(), r"expected model\.safetensors.*found .* without an index"),
    "only pickles": (keep_only(".bin"), r"only pickled weights \(model\S+\.bin, .*save as safetensors"),
    "only .pt": (keep_only(".pt"), r"only pickled weights"),
    "no weights": (keep_only(".gone"), r"no weights: expected model\.safetensors, or shards with"),
}


@pytest.mark.parametrize(("damage", "message"), BAD_DIRECTORIES.values(), ids=BAD_DIRECTORIES)
def test_directories_that_do_not_hold_together_are_refused(tmp_path, damage, message):
    config = make_config()
    folder = write(tmp_path, config, make_tensors(config), shards=2)
    damage(folder)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path)) + "(?s:.*)" + message):
        open_hf(folder)


# Headers that lie.


def entry(shape=(2, 2), start=0, end=16, dtype="F32", **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end], **more}


def encoded(header):
    return header if isinstance(header, bytes) else json.dumps(header).encode()


def file_of(header, data=16):
    blob = encoded(header)
    return len(blob).to_bytes(8, "little") + blob + bytes(data)


W = r"tensor 'w': "
BAD_HEADERS = {
    "empty": (b"", "0 bytes are too few"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "7 bytes are too few"),
    "absurd length": (b"\xff" * 8 + b"{}", "not a safetensors file.* 18446744073709551615 bytes"),
    "length beyond the end": (file_of({})[:9], "truncated: the header takes 2 bytes and the file has 9"),
    "no header": (bytes(8), "header: not valid JSON"),
    "a web page": (b"<!DOCTYPE html><html>", "not a safetensors file"),
    "a pointer": (b"version https://git-lfs.example/spec/v1\n", "not a safetensors file"),
    "no json": (file_of(b"{w}"), "header: not valid JSON"),
    "not utf-8": (file_of('{"ä": 1}'.encode("latin-1")), "header: not valid JSON"),
    "utf-16": (file_of("{}".encode("utf-16")), "header: not valid JSON"),
    "long integer": (file_of(b'{"w": ' + b"9" * 5000 + b"}"), "header: not valid JSON"),
    "deep": (file_of(b'{"w": ' + b"[" * 100_000), "header: not valid JSON"),
    "array": (file_of([]), "header: expected a JSON object, got list"),
    "twice": (file_of(b'{"w": 1, "w": 2}'), "the key 'w' occurs twice"),
    "metadata a list": (file_of({"__metadata__": [], "w": entry()}), "__metadata__ must map"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}, "w": entry()}), "__metadata__ must map"),
    "entry no object": (file_of({"w": 5}), W + "expected the keys dtype, shape and data_offsets, got int"),
    "entry without shape": (file_of({"w": {"dtype": "F32", "data_offsets": [0, 16]}}), W + "expected the keys"),
    "entry with more": (file_of({"w": entry(strides=[1])}), W + "expected the keys .*strides"),
    "dtype no string": (file_of({"w": entry(dtype=["F32"])}), W + "dtype must be a string"),
    "shape no list": (file_of({"w": entry(shape=4)}), W + "shape must be"),
    "negative dimensions": (file_of({"w": entry(shape=(-2, -2))}), W + r"shape must be .* got \[-2, -2\]"),
    "zero dimension": (file_of({"w": entry(shape=(0,), end=0)}, 0), W + "shape must be"),
    "fractional dimension": (file_of({"w": entry(shape=(4.0,))}), W + "shape must be"),
    "boolean dimension": (file_of({"w": entry(shape=(True, 4))}), W + "shape must be"),
    "nan dimension": (file_of(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}'), W + "shape must be"),
    "too many dimensions": (file_of({"w": entry(shape=(1,) * 65, end=4)}, 4), W + "shape must be at most 64"),
    "overflowing shape": (file_of({"w": entry(shape=(1 << 62, 4))}), W + r"F32 \[4611686018427387904, 4\] takes 7378"),
    "wrapping shape": (file_of({"w": entry(shape=((1 << 62) + 1, 4))}), W + "F32 .* but data_offsets span 16"),
    "short": (file_of({"w": entry(shape=(2, 3))}), W + r"F32 \[2, 3\] takes 24 bytes, but data_offsets span 16"),
    "half the item size": (file_of({"w": entry(dtype="BF16")}), W + r"BF16 \[2, 2\] takes 8 bytes"),
    "offsets no list": (file_of({"w": entry() | {"data_offsets": "0:16"}}), W + "data_offsets must be"),
    "one offset": (file_of({"w": entry() | {"data_offsets": [16]}}), W + "data_offsets must be"),
    "three offsets": (file_of({"w": entry() | {"data_offsets": [0, 8, 16]}}), W + "data_offsets must be"),
    "negative offset": (file_of({"w": entry(start=-16, end=0)}), W + "data_offsets must be"),
    "reversed offsets": (file_of({"w": entry(start=16, end=0)}), W + "data_offsets must be"),
    "boolean offset": (file_of({"w": entry(start=False)}), W + "data_offsets must be"),
    "beyond the end": (file_of({"w": entry()}, 15), W + r"truncated: it ends at byte \d+ and the file has"),
    "far beyond": (file_of({"w": entry(shape=(1 << 60,), end=1 << 62)}), W + "truncated"),
    "gap before": (file_of({"w": entry(start=4, end=20)}, 20), W + "leaves a gap before it"),
    "gap between": (file_of({"v": entry(), "w": entry(start=20, end=36)}, 36), W + "leaves a gap before it"),
    "overlap": (file_of({"v": entry(), "w": entry(start=12, end=28)}, 28), W + "overlaps the tensor before it"),
    "same place": (file_of({"v": entry(), "w": entry()}), W + "overlaps the tensor before it"),
    "trailing": (file_of({"w": entry()}, 19), "3 bytes at the end belong to no tensor"),
    "trailing only": (file_of({}, 3), "3 bytes at the end belong to no tensor"),
}


@pytest.mark.parametrize(("content", "message"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_headers_that_lie_are_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_text(json.dumps(make_config()))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "model.safetensors")) + ".*" + message):
        open_hf(tmp_path)


def test_a_pipe_in_place_of_the_weights_does_not_hang(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(make_config()))
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_hf(tmp_path)


def test_random_damage_is_refused_or_harmless(tmp_path):
    """Whatever happens to a file's header, the answer is a CheckpointError or a checkpoint that reads as promised."""
    config = make_config(num_hidden_layers=2)
    folder = write(tmp_path, config, make_tensors(config))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            damaged[draw.randrange(header)] = draw.choice((draw.randrange(256), *b'0129-,:"[]{}'))
        file.write_bytes(damaged[: draw.randrange(len(whole))] if draw.random() < 0.1 else damaged)
        try:
            with open_hf(folder) as checkpoint:
                for name in checkpoint.names():
                    assert checkpoint.read(name).shape == checkpoint.info(name).shape
        except CheckpointError:
            refused += 1
    assert refused > 1000
