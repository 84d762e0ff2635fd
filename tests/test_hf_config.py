"""The text model's configuration: where it lies, what it must say, what is refused."""

import json

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.hf_config import MAX_LAYERS, MODEL_TYPES, GdnDims, gdn_dims, gdn_layers, text_config

GDN_27B = {
    "hidden_size": 5120,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
}
SIZES = tuple(key for key in GDN_27B if key != "rms_norm_eps")
LAYER_COUNT = {"num_hidden_layers": 8}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_flat_and_nested_configurations_give_the_same_text_part(model_type):
    flat = {"model_type": model_type, **GDN_27B}
    assert text_config(flat) == flat
    assert text_config({"model_type": "qwen3_5", "text_config": flat}) == flat


def test_nested_text_part_may_leave_the_model_type_to_the_top():
    assert text_config({"model_type": "qwen3_5", "text_config": GDN_27B}) == {"model_type": "qwen3_5", **GDN_27B}


@pytest.mark.parametrize(("top", "own"), [(True, False), (False, True)])
def test_the_whole_model_decides_whether_embeddings_are_tied(top, own):
    text = {"model_type": "qwen3_5_text", "tie_word_embeddings": own}
    nested = {"model_type": "qwen3_5", "tie_word_embeddings": top, "text_config": text}
    assert text_config(nested)["tie_word_embeddings"] is top
    assert text_config({"model_type": "qwen3_5", "text_config": text})["tie_word_embeddings"] is own


def test_ids_of_the_whole_model_count_where_the_text_part_has_none():
    nested = {"model_type": "qwen3_5", "eos_token_id": [7, 9], "image_token_id": 90, "text_config": GDN_27B}
    assert text_config(nested) == {"model_type": "qwen3_5", "eos_token_id": [7, 9], "image_token_id": 90, **GDN_27B}
    assert text_config(nested | {"text_config": GDN_27B | {"eos_token_id": 5}})["eos_token_id"] == 5


def test_the_given_configuration_is_left_alone():
    nested = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": dict(GDN_27B)}
    before = json.dumps(nested)
    text_config(nested)["hidden_size"] = 0
    assert json.dumps(nested) == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"has no 'model_type'; supported are qwen3_5, .*qwen3_next"),
        ({"model_type": None}, r"has no 'model_type'"),
        ({"model_type": ["qwen3_5"]}, r"model_type \['qwen3_5'\]"),
        ({"model_type": "llama"}, r"model_type 'llama'; supported are"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3"}}, r"text_config has model_type 'qwen3'"),
        ({"model_type": "qwen3_5", "text_config": None}, r"text_config must be a JSON object, got NoneType"),
        ({"model_type": "qwen3_5", "text_config": [1]}, r"text_config must be a JSON object, got list"),
        ([1], r"must be a JSON object, got list"),
    ],
)
def test_other_architectures_are_refused(config, message):
    with pytest.raises(CheckpointError, match=message):
        text_config(config)


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantised_weights_are_refused_by_the_name_of_their_method(method, nested):
    config = {"model_type": "qwen3_5", "quantization_config": {"quant_method": method}}
    with pytest.raises(CheckpointError, match=rf"quantised \(quantization_config: {method}\)"):
        text_config({"model_type": "qwen3_5", "text_config": config} if nested else config)


@pytest.mark.parametrize(("key", "settings"), [("quantization", {"bits": 4}), ("quantization_config", "4bit")])
def test_quantised_weights_of_no_stated_method_are_refused(key, settings):
    with pytest.raises(CheckpointError, match=rf"quantised \({key}: method not stated\)"):
        text_config({"model_type": "qwen3_5", key: settings})


def test_no_quantisation_is_no_objection():
    assert text_config({"model_type": "qwen3_next", "quantization_config": None})["model_type"] == "qwen3_next"


def test_dims_of_the_27b():
    assert gdn_dims(GDN_27B) == GdnDims(5120, 16, 48, 128, 128, 4, 1e-6)
    assert gdn_dims(GDN_27B | {"hidden_act": "silu"}).hidden == 5120


@pytest.mark.parametrize("key", GDN_27B)
def test_a_missing_dimension_is_named_and_never_guessed(key):
    with pytest.raises(CheckpointError, match=rf"lacks '{key}'"):
        gdn_dims({name: value for name, value in GDN_27B.items() if name != key})


@pytest.mark.parametrize("value", [True, 4.0, "4", 0, -1, None, [4]])
@pytest.mark.parametrize("key", SIZES)
def test_a_size_must_be_a_positive_integer(key, value):
    with pytest.raises(CheckpointError, match=rf"{key} must be an integer of at least 1, got"):
        gdn_dims(GDN_27B | {key: value})


@pytest.mark.parametrize("value", [True, "1e-6", 0, 0.0, -1e-6, float("nan"), float("inf"), None])
def test_the_epsilon_must_be_a_positive_number(value):
    with pytest.raises(CheckpointError, match="rms_norm_eps must be a positive finite number, got"):
        gdn_dims(GDN_27B | {"rms_norm_eps": value})


def test_value_heads_must_be_shared_evenly():
    with pytest.raises(CheckpointError, match="multiple of linear_num_key_heads, got 40 and 16"):
        gdn_dims(GDN_27B | {"linear_num_value_heads": 40})


@pytest.mark.parametrize("activation", ["gelu", None])
def test_another_activation_is_refused(activation):
    with pytest.raises(CheckpointError, match=f"hidden_act must be 'silu'.*{activation}"):
        gdn_dims(GDN_27B | {"hidden_act": activation})


def test_layer_types_decide_over_the_interval():
    types = ["linear_attention", "full_attention"] * 4
    assert gdn_layers(LAYER_COUNT | {"layer_types": types, "full_attention_interval": 4}) == (0, 2, 4, 6)


@pytest.mark.parametrize(
    ("interval", "layers"), [(4, (0, 1, 2, 4, 5, 6)), (3, (0, 1, 3, 4, 6, 7)), (1, ()), (9, tuple(range(8)))]
)
def test_every_nth_layer_is_full_attention(interval, layers):
    assert gdn_layers(LAYER_COUNT | {"layer_types": None, "full_attention_interval": interval}) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAYER_COUNT, "neither 'layer_types' nor 'full_attention_interval'"),
        ({"full_attention_interval": 4}, "lacks 'num_hidden_layers'"),
        (LAYER_COUNT | {"full_attention_interval": 0}, "full_attention_interval must be an integer of at least 1"),
        (LAYER_COUNT | {"full_attention_interval": None}, "full_attention_interval must be an integer"),
        (LAYER_COUNT | {"layer_types": ["linear_attention"] * 7}, "one entry per layer, got 7 for 8"),
        (LAYER_COUNT | {"layer_types": "linear_attention"}, "layer_types must be a list, got str"),
        (LAYER_COUNT | {"layer_types": ["linear_attention"] * 7 + ["mamba"]}, r"layer_types\[7\].*got 'mamba'"),
        (LAYER_COUNT | {"layer_types": [["linear_attention"]] * 8}, r"layer_types\[0\] must be one of"),
        ({"num_hidden_layers": MAX_LAYERS + 1, "full_attention_interval": 4}, f"at most {MAX_LAYERS}"),
        ({"num_hidden_layers": True, "full_attention_interval": 4}, "num_hidden_layers must be an integer"),
    ],
)
def test_layers_that_cannot_be_told_apart_are_refused(text, message):
    with pytest.raises(CheckpointError, match=message):
        gdn_layers(text)
