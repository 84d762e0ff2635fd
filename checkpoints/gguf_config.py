"""The metadata of a Qwen GGUF file as a flat Hugging Face text configuration, and back.

Keys carry the architecture as their prefix (`qwen35.block_count`). What is easily got wrong: `block_count` includes the
multi-token-prediction blocks; `ssm.state_size` is K, while V is `ssm.inner_size` / `ssm.time_step_rank`; floats have 32
bits.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.hf_config import gdn_dims, gdn_layers, rope_settings
from checkpoints.settings import Settings

__all__ = ["ARCHITECTURES", "WRITTEN", "Architecture", "hf_text_config", "metadata_of"]

# Tables are built per layer and expert, so these counts must not be left to a damaged or hostile file.
_MAX_LAYERS = 1 << 12
_MAX_HEADS = 1 << 12
_MAX_EXPERTS = 1 << 16  # of all layers together
_ROUTER = "blk.0.ffn_gate_inp.weight"

# What programs of this format take for granted where a file does not say.
_FULL_ATTENTION_INTERVAL = 4
_ROPE_BASE = 10000.0


class Architecture(NamedTuple):
    """What `general.architecture` decides: the Hugging Face `model_type`, and whether value heads are stored tiled."""

    model_type: str
    tiled: bool


ARCHITECTURES = {
    "qwen35": Architecture("qwen3_5_text", tiled=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", tiled=True),
    "qwen3next": Architecture("qwen3_next", tiled=False),
}

WRITTEN = "qwen35"
"""The architecture of the files that are written here."""


def hf_text_config(
    architecture: str, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The flat text configuration that `metadata` states, in Hugging Face's keys; `shapes` are those of the tensors.

    Raises:
        CheckpointError: a key is missing, of the wrong kind, or contradicts another.
    """
    keys = Settings(metadata, f"{architecture}.")
    layer_types = _layer_types(keys, len(shapes))
    config = {
        "model_type": ARCHITECTURES[architecture].model_type,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "hidden_size": keys.size("embedding_length"),
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(keys.number("attention.layer_norm_rms_epsilon")),
        **_gdn_settings(keys),
        **_attention_settings(keys),
        **_mlp_settings(keys, shapes),
        **_vocabulary_settings(metadata, shapes),
    }
    if config["num_hidden_layers"] * config.get("num_experts", 0) > _MAX_EXPERTS:
        raise keys.error("expert_count", f"times the number of layers must be at most {_MAX_EXPERTS}")
    return config


def metadata_of(text: Mapping[str, Any], *, mtp: bool = False) -> dict[str, Any]:
    """The metadata of a `WRITTEN` file for the flat text configuration `text`, without the tokenizer's keys.

    `mtp`: a block for multi-token prediction follows the layers.

    Raises:
        CheckpointError: a key is missing or of the wrong kind, or the model is not a dense Qwen3.5.
    """
    keys = Settings(text)
    if keys.value("model_type") not in ("qwen3_5", "qwen3_5_text") or keys.size("num_experts", 0, least=0):
        raise CheckpointError(
            f"only dense Qwen3.5 models can be written as GGUF, got model_type {text['model_type']!r}"
        )
    dims = gdn_dims(text)
    head_dim = keys.size("head_dim")
    rope = Settings(_rope_parameters(text))
    rotary = head_dim * rope.number("partial_rotary_factor")
    if rotary > head_dim or rotary % 2:
        raise rope.error("partial_rotary_factor", f"of the head size {head_dim} must be an even number, got {rotary}")
    rotary = int(rotary)
    values = {
        "block_count": keys.size("num_hidden_layers") + mtp,
        "context_length": keys.size("max_position_embeddings"),
        "embedding_length": dims.hidden,
        "feed_forward_length": keys.size("intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "attention.head_count": keys.size("num_attention_heads"),
        "attention.head_count_kv": keys.size("num_key_value_heads"),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": keys.number("rms_norm_eps"),
        "rope.dimension_count": rotary,
        "rope.dimension_sections": _rope_sections(rope.value("mrope_section", []), rotary // 2),
        "rope.freq_base": rope.number("rope_theta"),
        "ssm.conv_kernel": dims.conv_width,
        "ssm.state_size": dims.key_dim,
        "ssm.group_count": dims.key_heads,
        "ssm.time_step_rank": dims.value_heads,
        "ssm.inner_size": dims.value_heads * dims.value_dim,
        **_recurrence(gdn_layers(text), text["num_hidden_layers"], mtp),
    }
    return {"general.architecture": WRITTEN} | {f"{WRITTEN}.{key}": value for key, value in values.items()}


def _layer_types(keys: Settings, tensor_count: int) -> list[str]:
    blocks = keys.size("block_count")
    drafting = keys.size("nextn_predict_layers", 0, least=0)
    if not drafting < blocks <= min(tensor_count, _MAX_LAYERS):
        raise keys.error(
            "block_count",
            f"is {blocks}, of which {drafting} are for multi-token prediction; it must be more than these and at most "
            f"{min(tensor_count, _MAX_LAYERS)}, with {tensor_count} tensors in the file",
        )
    layers = blocks - drafting
    if "attention.recurrent_layers" in keys:
        recurrent = _recurrent_flags(keys, layers, blocks)
    else:
        interval = keys.size("full_attention_interval", _FULL_ATTENTION_INTERVAL)
        recurrent = [bool((layer + 1) % interval) for layer in range(layers)]
    return ["linear_attention" if flag else "full_attention" for flag in recurrent]


def _recurrent_flags(keys: Settings, layers: int, blocks: int) -> list[bool]:
    """One flag per layer; files have them with or without the multi-token-prediction blocks at the end."""
    flags = keys.value("attention.recurrent_layers")
    if not isinstance(flags, np.ndarray) or len(flags) not in (layers, blocks) or not np.isin(flags, (0, 1)).all():
        raise keys.error("attention.recurrent_layers", f"must be {blocks} bools, got {flags!r:.80}")
    return [bool(flag) for flag in flags[:layers]]


def _gdn_settings(keys: Settings) -> dict[str, Any]:
    value_heads, inner = keys.size("ssm.time_step_rank"), keys.size("ssm.inner_size")
    if value_heads > _MAX_HEADS:
        raise keys.error("ssm.time_step_rank", f"must be at most {_MAX_HEADS}, got {value_heads}")
    if inner % value_heads:
        raise keys.error("ssm.inner_size", f"must be a multiple of the {value_heads} value heads, got {inner}")
    return {
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
    }


def _attention_settings(keys: Settings) -> dict[str, Any]:
    head_dim = keys.size("attention.key_length")
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"must equal attention.key_length, which is {head_dim}")
    rotary = keys.size("rope.dimension_count", head_dim)
    if rotary > head_dim or rotary % 2:
        raise keys.error("rope.dimension_count", f"must be even and at most the head size {head_dim}, got {rotary}")
    context = {"max_position_embeddings": keys.size("context_length")} if "context_length" in keys else {}
    return {
        "num_attention_heads": keys.size("attention.head_count"),
        "num_key_value_heads": keys.size("attention.head_count_kv"),
        "head_dim": head_dim,
        "rope_parameters": {
            "rope_theta": _shortest(keys.number("rope.freq_base", _ROPE_BASE)),
            "partial_rotary_factor": rotary / head_dim,
            **_rope_sections_setting(keys),
            **_rope_scaling(keys),
        },
        **context,
    }


def _rope_sections_setting(keys: Settings) -> dict[str, Any]:
    """How the rotary pairs are shared out among the axes of images; the file adds a fourth axis that is never used."""
    if "rope.dimension_sections" not in keys:
        return {}
    sections = keys.value("rope.dimension_sections")
    if not isinstance(sections, np.ndarray) or sections.dtype.kind not in "iu":
        raise keys.error("rope.dimension_sections", f"must be integers, got {sections!r:.80}")
    return {"mrope_section": sections[:3].tolist(), "mrope_interleaved": True}


def _rope_scaling(keys: Settings) -> dict[str, Any]:
    """How positions are stretched: always stated, so that a decoder that cannot do it may refuse."""
    kind = keys.value("rope.scaling.type", "none")
    if not isinstance(kind, str):
        raise keys.error("rope.scaling.type", f"must be a string, got {kind!r:.80}")
    if kind == "none":
        return {"rope_type": "default"}
    return {
        "rope_type": kind,
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length"),
    }


def _mlp_settings(keys: Settings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    experts = keys.size("expert_count", 0, least=0)
    if not experts:
        return {"intermediate_size": keys.size("feed_forward_length")}
    router = shapes.get(_ROUTER, ())
    if math.prod(router) != experts * keys.size("embedding_length"):
        raise keys.error("expert_count", f"is {experts}, which {_ROUTER!r} of shape {list(router)} contradicts")
    return {
        "num_experts": experts,
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _vocabulary_settings(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The vocabulary is as large as the embedding; the tokenizer may know fewer tokens."""
    if "token_embd.weight" not in shapes:
        raise CheckpointError("the file lacks 'token_embd.weight', whose rows are the vocabulary")
    config: dict[str, Any] = {
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    tokenizer = Settings(metadata, "tokenizer.ggml.")
    return config | {key: tokenizer.size(key, least=0) for key in ("bos_token_id", "eos_token_id") if key in tokenizer}


def _shortest(value: float) -> float:
    """The shortest decimal that is this f32: 1e-6, where a plain conversion gives 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings, of the one kind that GGUF files are written for."""
    rope, kind = rope_settings(text)
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"rope_type {kind!r} cannot be written as GGUF; only plain rotary embeddings can")
    return rope


def _rope_sections(sections: Any, pairs: int) -> list[int]:
    """How many rotary pairs follow time, height and width (readers insist on four numbers); by turns if not given."""
    if not sections:
        return [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    if not isinstance(sections, list | tuple) or len(sections) > 4 or any(type(size) is not int for size in sections):
        raise CheckpointError(f"mrope_section must be at most four integers, got {sections!r:.80}")
    return [*sections, 0, 0, 0, 0][:4]


def _recurrence(gdn: tuple[int, ...], layers: int, mtp: bool) -> dict[str, Any]:
    """Which layers are GDN: as flags, and for older programs also as an interval, where one describes them.

    The block of an MTP head, which never is, has a flag too.
    """
    flags = [layer in gdn for layer in range(layers)]
    interval = flags.index(False) + 1 if False in flags else layers + 1
    regular = flags == [bool((layer + 1) % interval) for layer in range(layers)]
    own = {"attention.recurrent_layers": flags} | ({"full_attention_interval": interval} if regular else {})
    return own | {"attention.recurrent_layers": [*flags, False], "nextn_predict_layers": 1} if mtp else own
