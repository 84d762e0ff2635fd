"""What a Hugging Face `config.json` says about the text model: which architecture, which geometry, which layers."""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from checkpoints.errors import CheckpointError

__all__ = ["GdnDims", "gdn_dims", "gdn_layers", "rope_settings", "text_config"]

MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
LAYER_TYPES = ("linear_attention", "full_attention")

# Stated for the whole model, these hold for its text part as well.
_SHARED_IDS = ("bos_token_id", "eos_token_id", "image_token_id", "video_token_id")

# The layer list is built in memory, so a damaged or hostile count must not decide how much.
MAX_LAYERS = 1 << 16


class GdnDims(NamedTuple):
    """Geometry of one GDN layer.

    D `hidden`, G `key_heads`, H `value_heads`, K `key_dim`, V `value_dim`, W `conv_width`; `norm_eps` is the epsilon
    of the gated RMSNorm.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's configuration as one flat dict, out of a nested (`text_config`) or an already flat one.

    A nested configuration states `tie_word_embeddings` for the whole model at the top, where it outranks the text
    part's own. Ids of tokens may stand at the top too, and count where the text part has none. Everything else comes
    from the text part.

    Raises:
        CheckpointError: not a mapping, an unsupported or missing `model_type`, or quantised weights.
    """
    whole = _checked_level(config, "the configuration")
    if "text_config" not in whole:
        return whole
    text = _checked_level(whole["text_config"], "text_config", model_type=whole["model_type"])
    if "tie_word_embeddings" in whole:
        text["tie_word_embeddings"] = whole["tie_word_embeddings"]
    return {key: whole[key] for key in _SHARED_IDS if key in whole} | text


def gdn_dims(text: Mapping[str, Any]) -> GdnDims:
    """The GDN geometry of a flat text configuration; nothing is ever filled in by default.

    Raises:
        CheckpointError: a key is missing or of the wrong kind, the activation is not SiLU, or H is not a multiple of G.
    """
    dims = GdnDims(
        hidden=_size(text, "hidden_size"),
        key_heads=_size(text, "linear_num_key_heads"),
        value_heads=_size(text, "linear_num_value_heads"),
        key_dim=_size(text, "linear_key_head_dim"),
        value_dim=_size(text, "linear_value_head_dim"),
        conv_width=_size(text, "linear_conv_kernel_dim"),
        norm_eps=_epsilon(text, "rms_norm_eps"),
    )
    activation = text.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act must be 'silu', the activation that GDN defines, got {activation!r}")
    if dims.value_heads % dims.key_heads:
        raise CheckpointError(
            "linear_num_value_heads must be a multiple of linear_num_key_heads, "
            f"got {dims.value_heads} and {dims.key_heads}"
        )
    return dims


def gdn_layers(text: Mapping[str, Any]) -> tuple[int, ...]:
    """The model layer numbers of the GDN layers, ascending.

    `layer_types` decides where it is given; otherwise every `full_attention_interval`-th layer is full attention.

    Raises:
        CheckpointError: neither key is given, `layer_types` is not one known type per layer, or a count is no count.
    """
    count = _size(text, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise CheckpointError(f"num_hidden_layers must be at most {MAX_LAYERS}, got {count}")
    if text.get("layer_types") is not None:
        types = _layer_types(text["layer_types"], count)
        return tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")
    if "full_attention_interval" in text:
        interval = _size(text, "full_attention_interval")
        return tuple(layer for layer in range(count) if (layer + 1) % interval)
    raise CheckpointError(
        "the configuration has neither 'layer_types' nor 'full_attention_interval'; "
        "one of them must say which layers are linear attention"
    )


def _checked_level(level: Any, what: str, **inherited: str) -> dict[str, Any]:
    """A copy of one level of the configuration over what it inherits, after the checks that hold on every level."""
    if not isinstance(level, Mapping):
        raise CheckpointError(f"{what} must be a JSON object, got {type(level).__name__}")
    merged = {**inherited, **level}
    model_type = merged.get("model_type")
    if model_type not in MODEL_TYPES:
        stated = "has no 'model_type'" if model_type is None else f"has model_type {model_type!r}"
        raise CheckpointError(f"{what} {stated}; supported are {', '.join(MODEL_TYPES)}")
    for key in ("quantization_config", "quantization"):
        if merged.get(key) is not None:
            raise CheckpointError(
                f"the weights are quantised ({key}: {_quantisation_method(merged[key])}), which this reader does not "
                "decode; use the checkpoint in bfloat16, float16 or float32"
            )
    return merged


def _quantisation_method(settings: Any) -> str:
    if isinstance(settings, Mapping):
        for key in ("quant_method", "mode"):
            if key in settings:
                return str(settings[key])
    return "method not stated"


def _layer_types(types: Any, count: int) -> list[str]:
    if not isinstance(types, list | tuple):
        raise CheckpointError(f"layer_types must be a list, got {type(types).__name__}")
    if len(types) != count:
        raise CheckpointError(f"layer_types must have one entry per layer, got {len(types)} for {count} layers")
    for layer, kind in enumerate(types):
        if kind not in LAYER_TYPES:
            raise CheckpointError(f"layer_types[{layer}] must be one of {', '.join(LAYER_TYPES)}, got {kind!r}")
    return list(types)


def _required(text: Mapping[str, Any], key: str) -> Any:
    if key not in text:
        raise CheckpointError(f"the configuration lacks {key!r}, which has no safe default")
    return text[key]


def _size(text: Mapping[str, Any], key: str) -> int:
    value = _required(text, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key} must be an integer of at least 1, got {value!r}")
    return value


def _epsilon(text: Mapping[str, Any], key: str) -> float:
    value = _required(text, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"{key} must be a positive finite number, got {value!r}")
    return float(value)


def rope_settings(text: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The rotary settings, which newer configurations keep in a dict of their own and older ones at the top; the kind.

    Raises:
        CheckpointError: that dict is something else.
    """
    rope = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if text.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        settings = text.get(key) or {}
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"{key} must be a JSON object, got {type(settings).__name__}")
        rope |= settings
    return rope, rope.get("rope_type", rope.get("type", "default"))
