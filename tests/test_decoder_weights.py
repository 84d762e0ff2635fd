"""A decoder's configuration and weights: out of every kind of file, and what is refused."""

import copy
import dataclasses
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
import gdn_jax as gdn
from checkpoints.names import is_linear
from gdn_jax.convert import convert
from gdn_jax.decoder import weights as decoder_weights
from gdn_jax.decoder.config import DECODERS, DecoderConfig, LayerPlan, MoeConfig
from gdn_jax.decoder.weights import TIERS, abstract_decoder, check_decoder_weights, load_decoder, read_decoder, table
from gdn_jax.errors import CheckpointError, UnsupportedError
from gdn_jax.q4 import Q4Tensor, dequantize, quantize, quantize_words
from tests.support import decoders, gguf_files, hf_files
from tests.support.paths import FIXTURES, MODELS

TIED, SMALL = decoders.TIED, decoders.SMALL


def config_of(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


# Configurations.


def test_published_sizes():
    """Sizes of the 27B model as published, and the parameters that all of them come to (text part, without MTP)."""
    cfg = DECODERS["qwen3.5-27b"]
    assert (cfg.layers, cfg.count("linear_attention"), cfg.count("full_attention")) == (64, 48, 16)
    assert (cfg.hidden, cfg.ffn, cfg.vocab, cfg.tied) == (5120, 17408, 248320, False)
    assert (cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.rotary_dim, cfg.rope_theta) == (24, 4, 256, 64, 1e7)
    billions = {
        name: round(sum(leaf.size for leaf in jax.tree.leaves(abstract_decoder(cfg))) / 1e9, 1)
        for name, cfg in DECODERS.items()
    }
    assert billions == {
        "qwen3.5-0.8b": 0.8,
        "qwen3.5-2b": 1.9,
        "qwen3.5-4b": 4.2,
        "qwen3.5-9b": 9.0,
        "qwen3.5-27b": 26.9,
        "qwen3-next-80b": 79.7,
    }
    assert all((cfg.period, cfg.gdn) == (4, gdn.GEOMETRIES[name].cfg) for name, cfg in DECODERS.items())


@pytest.mark.parametrize("name", [*MODELS, TIED])
def test_configuration_of_a_checkpoint(name):
    cfg = DecoderConfig.from_hf(config_of(name))
    assert cfg.gdn == gdn.load_config(FIXTURES / name)
    assert (cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.rotary_dim, cfg.rope_theta) == (4, 2, 16, 4, 1e7)
    assert cfg.layers == (8 if name == TIED else 5)
    assert cfg.tied == (name in (TIED, "qwen3_5-bf16-sharded"))
    experts = MoeConfig(experts=4, experts_per_token=2, ffn=20, shared_ffn=12)
    assert cfg.moe == (experts if name == "qwen3_next-f32" else None)


def test_layers_are_counted_by_kind_and_repeat_with_the_least_period():
    assert SMALL.period == 2
    assert SMALL.plan()[2:] == (
        LayerPlan("linear_attention", 1, "dense", 1),
        LayerPlan("full_attention", 1, "moe", 1),
    )
    uneven = dataclasses.replace(SMALL, layer_types=("full_attention", "full_attention", "linear_attention"),
                                 mlp_types=("dense", "moe", "moe"))  # fmt: skip
    assert uneven.period == 3


def test_older_configurations_keep_the_rotary_settings_at_the_top():
    """And may say `rope_scaling`, or the type "mrope", which for text is the plain one."""
    config = config_of("qwen3_5-f32")
    want = DecoderConfig.from_hf(config)
    rope = config.pop("rope_parameters")
    flat = {**config, "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    assert DecoderConfig.from_hf(flat) == want
    assert DecoderConfig.from_hf(flat | {"rope_scaling": None}) == want
    assert DecoderConfig.from_hf(flat | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}}) == want


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "llama3", "longrope", 7])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_stretched_positions_are_refused(kind, place):
    config = config_of("qwen3_5-f32")
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    config[place] = (config["rope_parameters"] if place == "rope_parameters" else {}) | scaling
    if place == "rope_scaling":
        del config["rope_parameters"]["rope_type"]
    with pytest.raises(UnsupportedError, match=f"rope_type {kind!r}: stretched rotary positions are not implemented"):
        DecoderConfig.from_hf(config)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "rms_norm_eps",
        "intermediate_size",
        "linear_num_key_heads",
    ],
)
def test_a_missing_or_senseless_size_is_named(key):
    config = config_of("qwen3_5-f32")
    for wrong in ("8", -1, 0, True, None, float("nan")):
        with pytest.raises(CheckpointError, match=key):
            DecoderConfig.from_hf(config | {key: wrong})
    del config[key]
    with pytest.raises(CheckpointError, match=key):
        DecoderConfig.from_hf(config)


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor"])
def test_a_missing_or_senseless_rotary_setting_is_named(key):
    config = config_of("qwen3_5-f32")
    for wrong in (None, 0, -1.0, "1e4", 0.3, 1.5) if key == "partial_rotary_factor" else (None, 0, -1.0, "1e4"):
        bad = copy.deepcopy(config)
        bad["rope_parameters"][key] = wrong
        with pytest.raises(CheckpointError, match=key):
            DecoderConfig.from_hf(bad)
    del config["rope_parameters"][key]
    with pytest.raises(CheckpointError, match=key):
        DecoderConfig.from_hf(config)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "qwen3"}, CheckpointError, "model_type 'qwen3'; supported are"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"attn_output_gate": False}, UnsupportedError, "attn_output_gate must be true"),
        ({"tie_word_embeddings": "no"}, CheckpointError, "tie_word_embeddings must be true or false, got 'no'"),
        ({"num_attention_heads": 3}, CheckpointError, "heads must be a multiple of kv_heads, got 3 and 2"),
        ({"hidden_act": "gelu"}, CheckpointError, "hidden_act must be 'silu'"),
        ({"layer_types": ["sliding_attention"] * 5}, CheckpointError, r"layer_types\[0\] must be one of"),
        ({"rope_parameters": [1]}, CheckpointError, "rope_parameters must be a JSON object, got list"),
        ({"num_experts": 4}, CheckpointError, "num_experts_per_tok"),
    ],
)
def test_a_model_of_another_kind_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        DecoderConfig.from_hf(config_of("qwen3_5-f32") | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but num_experts is 4"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list"),
        ({"num_experts": 1 << 14}, "num_experts is 16384, too many"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer of at least 1"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
    ],
)
def test_senseless_experts_are_refused(change, words):
    with pytest.raises(CheckpointError, match=words):
        DecoderConfig.from_hf(config_of("qwen3_next-f32") | change)
    config = config_of("qwen3_next-f32")
    del config["num_experts"]  # no experts at all is another model than experts that are not counted
    with pytest.raises(CheckpointError, match="num_experts is missing"):
        DecoderConfig.from_hf(config)


def test_experts_may_be_in_some_layers():
    config = config_of("qwen3_next-f32") | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert DecoderConfig.from_hf(config).mlp_types == ("dense", "moe", "dense", "dense", "dense")
    cfg = DecoderConfig.from_hf(config | {"mlp_only_layers": list(range(5))})
    assert (cfg.mlp_types, cfg.moe) == (("dense",) * 5, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ("linear_attention",)}, "1 layer_types do not go with 4 mlp_types"),
        ({"layer_types": ()}, "layer_types must be one of"),
        ({"mlp_types": ("dense", "sparse") * 2}, "mlp_types must be one of dense, moe per layer"),
        ({"moe": None}, r"moe must be given if and only if there are moe layers \(2 here\)"),
        ({"gdn": None}, "gdn must be given"),
        ({"mlp_types": ("dense",) * 4}, r"moe must be given if and only if there are moe layers \(0 here\)"),
        ({"rotary_dim": 3}, "rotary_dim must be even and at most head_dim=16, got 3"),
        ({"rotary_dim": 18}, "rotary_dim must be even"),
        ({"hidden": 64}, "gdn must have hidden=64"),
        ({"vocab": 0}, "vocab must be at least 1"),
        ({"rope_theta": 0.0}, "rope_theta must be positive"),
    ],
)
def test_configurations_that_cannot_be_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **change)


# Weights.


@pytest.mark.parametrize("tier", TIERS)
def test_weights_have_the_shapes_and_types_that_the_configuration_says(tier):
    weights = decoders.small(tier)
    chex.assert_trees_all_equal_shapes_and_dtypes(weights, abstract_decoder(SMALL, tier=tier))
    check_decoder_weights(weights, SMALL)
    assert weights.tier == tier
    assert weights.moe.router.dtype == weights.norm.dtype == weights.gdn.layers.b.dtype == jnp.float32


def test_every_tensor_lands_in_its_place():
    weights, tensors = decoders.small(), decoders.draw(SMALL, "tests/small")
    for field in table(SMALL):
        found = np.asarray(field.of(weights))
        names = [field.name]
        if field.is_stack:
            places = [(layer, e) for layer in field.layers(SMALL) for e in range(field.experts(SMALL))]
            names = [field.name.format(layer=layer, expert=expert) for layer, expert in places]
            assert len(found) == len(names)
        for entry, name in zip(found if field.is_stack else found[None], names, strict=True):
            np.testing.assert_array_equal(entry, tensors.pop(name).reshape(entry.shape), err_msg=name)
    assert not tensors


def test_bf16_rounds_and_q4_quantises_the_matrices_only():
    exact, rounded, quantised = (decoders.small(tier) for tier in TIERS)
    for field in table(SMALL):
        wide = field.of(exact)
        if not field.is_matrix:
            chex.assert_trees_all_equal(field.of(rounded), wide)
            chex.assert_trees_all_equal(field.of(quantised), wide)
            continue
        chex.assert_trees_all_equal(field.of(rounded), wide.astype(jnp.bfloat16))
        chex.assert_trees_all_equal(field.of(quantised), quantize(wide, "absmax"))


def test_narrow_files_widen_exactly():
    name = "qwen3_5-bf16-sharded"
    _, wide = decoders.load(name)
    _, kept = decoders.load(name, "bf16")
    for field in table(decoders.load(name)[0]):
        chex.assert_trees_all_equal(field.of(kept).astype(jnp.float32), field.of(wide))
    cfg, half = decoders.load("qwen3_5-f16-nested")
    stored = load_file(FIXTURES / "qwen3_5-f16-nested" / "model.safetensors")
    up = stored["model.language_model.layers.3.mlp.up_proj.weight"]
    np.testing.assert_array_equal(half.mlp.up[3], up.astype(np.float32))
    assert cfg.layer_types[3] == "full_attention"
    q = stored["model.language_model.layers.3.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(half.attention.q[0], q.astype(np.float32))


@pytest.mark.parametrize("tier", TIERS)
def test_large_fields_are_filled_on_the_device_with_the_same_bits(tier, monkeypatch):
    whole = decoders.small(tier)
    monkeypatch.setattr(decoder_weights, "_MOVED_WHOLE", 20_000)
    held = decoders.Held(decoders.hf_config(SMALL), decoders.draw(SMALL, "tests/small"))
    _, piecewise = read_decoder(held, tier=tier)
    chex.assert_trees_all_equal(piecewise, whole)
    broken = decoders.Held(held.config, held.tensors | {"lm_head.weight": np.full((96, 32), np.inf, np.float32)})
    with pytest.raises(CheckpointError, match="lm_head"):
        read_decoder(broken, tier=tier)


def assert_same(field, got, want, *, rounded):
    """Bit for bit but, where `rounded`, for what a GGUF file holds as 1 + w or -exp(A_log)."""
    by_number = field.name.endswith(("norm.weight", "A_log")) and "linear_attn.norm" not in field.name
    tolerance = 2.4e-7 if rounded and by_number else 0
    chex.assert_trees_all_close(field.of(got), field.of(want), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def routes(tmp_path_factory):
    """One model as it was saved, as GGUF and converted, whole and in 4 bits."""
    folder = tmp_path_factory.mktemp("routes")
    found = {("hf", tier): FIXTURES / TIED for tier in ("f32", "q4")}
    for tier in ("f32", "q4"):
        for route, name in (("gguf", "model.gguf"), ("orbax", "store")):
            found[route, tier] = folder / f"{tier}-{name}"
            convert(FIXTURES / TIED, found[route, tier], tier=tier)
    return found


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("route", ["gguf", "orbax"])
def test_every_route_gives_the_same_weights(routes, route, tier):
    cfg, want = decoders.load(TIED, tier)
    found, weights = load_decoder(routes[route, "q4" if tier == "q4" else "f32"], tier=tier)
    assert found == cfg
    for field in table(cfg):
        assert_same(field, weights, want, rounded=route == "gguf")


@pytest.mark.parametrize("fused", [False, True])
def test_a_gguf_file_of_a_qwen3_next(tmp_path, fused):
    text = gguf_files.moe_config()
    tensors = gguf_files.model(text)
    stored = tmp_path / "model.gguf"
    gguf_files.write_qwen3next(stored, text, tensors, fused=fused)
    for tier in TIERS:
        cfg, want = read_decoder(decoders.Held(text, tensors), tier=tier)
        found, weights = load_decoder(stored, tier=tier)
        assert found == cfg
        for field in table(cfg):
            assert_same(field, weights, want, rounded=True)


def test_a_gguf_file_of_mixed_types(tmp_path):
    """4-bit matrices keep their codes; other blocks are dequantised first; a small tensor in 4 bits becomes float32."""
    text = gguf_files.config()
    tensors = gguf_files.model(text)
    types = {
        "token_embd.weight": gguf_files.Q.Q8_0,
        "blk.1.attn_q.weight": gguf_files.Q.Q4_0,
        "blk.0.ssm_alpha.weight": gguf_files.Q.Q4_0,
    }
    path = gguf_files.write_qwen35(tmp_path / "model.gguf", text, tensors, types)
    with checkpoints.open_checkpoint(path) as checkpoint:
        embedding = checkpoint.read("embed_tokens.weight")
        codes, scales = checkpoint.read_q4("layers.1.self_attn.q_proj.weight")
        gate = checkpoint.read("layers.0.linear_attn.in_proj_a.weight")
    _, weights = load_decoder(path, tier="q4")
    chex.assert_trees_all_equal(weights.embed, quantize(embedding))
    first = jax.tree.map(lambda leaf: leaf[0], weights.attention.q)
    chex.assert_trees_all_equal(first, Q4Tensor.from_logical(codes, scales))
    np.testing.assert_array_equal(weights.gdn.layers.a[0], gate)


def test_stored_codes_are_taken_as_they_are_and_dequantised_for_other_tiers(routes):
    _, codes = decoders.load(TIED, "q4")
    for route in ("gguf", "orbax"):
        _, wide = load_decoder(routes[route, "q4"], tier="f32")
        np.testing.assert_array_equal(wide.gdn.layers.large.qkv, dequantize(codes.gdn.layers.large.qkv))


@pytest.mark.parametrize("parts", ["all", "gdn"])
@pytest.mark.parametrize("route", ["a.gguf", "a"])
def test_a_converted_model_is_loaded_in_4_bits_without_quantising(tmp_path, monkeypatch, route, parts):
    """Embedding, head, attention, MLPs and all: bit for bit what quantising while loading gives."""
    _, want = decoders.load(TIED, "q4")
    convert(FIXTURES / TIED, tmp_path / route, tier="q4", q4_parts=parts)
    quantised = []

    def counting(w, method):
        quantised.append(w.shape)
        return quantize_words(w, method)

    monkeypatch.setattr(decoder_weights, "quantize_words", counting)
    cfg, weights = load_decoder(tmp_path / route, tier="q4")
    assert bool(quantised) == (parts == "gdn")
    for field in table(cfg):
        assert_same(field, weights, want, rounded=route == "a.gguf")


def joined_experts(tensors):
    """The experts of `SMALL` in one tensor per layer, as in models that `transformers` 5 saves: the gate's rows first,
    then those of up.
    """
    tensors = dict(tensors)
    for layer in (1, 3):
        parts = {
            m: np.stack([tensors.pop(f"layers.{layer}.mlp.experts.{e}.{m}_proj.weight") for e in range(3)])
            for m in ("gate", "up", "down")
        }
        tensors[f"layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[f"layers.{layer}.mlp.experts.down_proj"] = parts["down"]
    return tensors


@pytest.mark.parametrize("joined", [False, True])
def test_a_converted_mixture_of_experts_is_loaded_in_4_bits_without_quantising(tmp_path, monkeypatch, joined):
    tensors = decoders.draw(SMALL, "tests/small")
    tensors = joined_experts(tensors) if joined else tensors
    source = hf_files.write(tmp_path / "hf", decoders.hf_config(SMALL), tensors)
    done = convert(source, tmp_path / "a", tier="q4")
    assert done.not_q4 == ()
    assert set(done.quantisation) == {name for name in tensors if is_linear(name)}
    want = decoders.small("q4")
    monkeypatch.delattr(decoder_weights, "quantize_words")
    cfg, weights = load_decoder(tmp_path / "a", tier="q4")
    assert cfg == SMALL
    chex.assert_trees_all_equal(weights, want)
    _, wide = load_decoder(tmp_path / "a", tier="f32")
    chex.assert_trees_all_equal(wide.moe.experts.up, dequantize(want.moe.experts.up))


def test_the_linear_layers_are_the_matrices_of_the_weights():
    for cfg in (SMALL, decoders.load(TIED)[0]):
        for field in table(cfg):
            assert is_linear(field.name.format(layer=3, expert=12)) == field.is_matrix, field.name


def test_experts_may_lie_in_one_tensor_per_layer():
    tensors = joined_experts(decoders.draw(SMALL, "tests/small"))
    for tier in TIERS:
        _, weights = read_decoder(decoders.Held(decoders.hf_config(SMALL), tensors), tier=tier)
        chex.assert_trees_all_equal(weights, decoders.small(tier))
    tensors["layers.3.mlp.experts.gate_up_proj"] = tensors["layers.3.mlp.experts.gate_up_proj"][:, 1:]
    with pytest.raises(CheckpointError, match=r"gate_up_proj' must have shape \[3, 64, 32\], got \[3, 63, 32\]"):
        read_decoder(decoders.Held(decoders.hf_config(SMALL), tensors))


def test_progress_is_told_of_every_tensor():
    told = []
    held = decoders.Held(decoders.hf_config(SMALL), decoders.draw(SMALL, "tests/small"))
    _, weights = read_decoder(held, tier="q4", progress=told.append)
    assert [progress.tensors for progress in told] == list(range(1, len(held.names()) + 1))
    last = told[-1]
    assert last.tensors == last.all_tensors
    assert last.nbytes == last.all_nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight",
        "lm_head.weight",
        "norm.weight",
        "layers.2.input_layernorm.weight",
        "layers.0.linear_attn.out_proj.weight",
        "layers.3.self_attn.k_norm.weight",
        "layers.1.self_attn.q_proj.weight",
        "layers.2.mlp.down_proj.weight",
        "layers.3.mlp.gate.weight",
        "layers.1.mlp.experts.2.up_proj.weight",
        "layers.1.mlp.shared_expert_gate.weight",
    ],
)
def test_a_missing_misshapen_or_senseless_tensor_is_named(name):
    tensors, config = decoders.draw(SMALL, "tests/small"), decoders.hf_config(SMALL)
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensors of this model: {name}"):
        read_decoder(decoders.Held(config, without))
    with pytest.raises(CheckpointError, match=rf"'{name}' must have shape \[.*\], got \["):
        read_decoder(decoders.Held(config, tensors | {name: tensors[name][..., :-1]}))
    with pytest.raises(CheckpointError, match=rf"'{name}' must be float32, float16, bfloat16 or 4-bit, got float64"):
        read_decoder(decoders.Held(config, tensors | {name: tensors[name].astype(np.float64)}))
    bad = tensors[name].copy()
    bad.flat[-1] = np.nan
    for tier in ("f32", "q4"):
        with pytest.raises(CheckpointError, match=rf"'{name}' (holds NaN or inf|cannot be quantised)"):
            read_decoder(decoders.Held(config, tensors | {name: bad}), tier=tier)


def test_a_tensor_that_has_no_place_is_named():
    tensors, config = decoders.draw(SMALL, "tests/small"), decoders.hf_config(SMALL)
    stray = {"layers.0.self_attn.q_proj.weight": tensors["layers.1.self_attn.q_proj.weight"]}
    with pytest.raises(CheckpointError, match=r"1 tensors have no place in this model: layers.0.self_attn.q_proj"):
        read_decoder(decoders.Held(config, tensors | stray))


def test_a_head_beside_a_tied_embedding_must_be_equal_to_it(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(FIXTURES / TIED, path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, path / "model.safetensors")
    cfg, weights = load_decoder(path)
    assert weights.head is None
    chex.assert_trees_all_equal((cfg, weights), decoders.load(TIED))
    save_file(tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is set, but 'lm_head.weight' is not equal"):
        load_decoder(path)


def test_what_cannot_be_4_bit_is_refused_before_any_work():
    with pytest.raises(UnsupportedError, match=r"out_proj.weight' is \[32, 120\]; use tier 'bf16' or 'f32'"):
        load_decoder(FIXTURES / "qwen3_5-f32", tier="q4")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"tier": "q8"}, "tier must be one of f32, bf16, q4"), ({"quantiser": "best"}, "quantiser must be one of")],
)
def test_unknown_tiers_and_quantisers_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        load_decoder(FIXTURES / TIED, **wrong)
