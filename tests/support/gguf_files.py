"""GGUF files of tiny models, made by the `gguf` package from layouts written out here head by head.

Nothing here calls the reader or the writer under test: the permutations are plain loops over heads.
"""

import gguf
import numpy as np

Q = gguf.GGMLQuantizationType


def config(**changes):
    """A flat text configuration: two GDN layers around one of full attention."""
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 24,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
    } | changes


def moe_config(**changes):
    """As `config`, but a Qwen3-Next with three experts."""
    experts = {
        "model_type": "qwen3_next",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    }
    return config(**experts) | changes


def shapes(text):
    """Canonical name -> canonical shape of every tensor of the model."""
    hidden, vocabulary, head_dim = text["hidden_size"], text["vocab_size"], text["head_dim"]
    groups, heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    values = heads * text["linear_value_head_dim"]
    channels = 2 * groups * text["linear_key_head_dim"] + values
    queries, keys = text["num_attention_heads"] * head_dim, text["num_key_value_heads"] * head_dim
    result = {"embed_tokens.weight": (vocabulary, hidden), "norm.weight": (hidden,)}
    if not text["tie_word_embeddings"]:
        result["lm_head.weight"] = (vocabulary, hidden)
    for layer, kind in enumerate(text["layer_types"]):
        part = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        if kind == "linear_attention":
            part |= {
                "linear_attn.in_proj_qkv.weight": (channels, hidden),
                "linear_attn.in_proj_z.weight": (values, hidden),
                "linear_attn.in_proj_b.weight": (heads, hidden),
                "linear_attn.in_proj_a.weight": (heads, hidden),
                "linear_attn.conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
                "linear_attn.dt_bias": (heads,),
                "linear_attn.A_log": (heads,),
                "linear_attn.norm.weight": (text["linear_value_head_dim"],),
                "linear_attn.out_proj.weight": (hidden, values),
            }
        else:
            part |= {
                "self_attn.q_proj.weight": (2 * queries, hidden),
                "self_attn.k_proj.weight": (keys, hidden),
                "self_attn.v_proj.weight": (keys, hidden),
                "self_attn.o_proj.weight": (hidden, queries),
                "self_attn.q_norm.weight": (head_dim,),
                "self_attn.k_norm.weight": (head_dim,),
            }
        result |= {f"layers.{layer}.{name}": shape for name, shape in (part | _mlp_shapes(text, hidden)).items()}
    return result


def _mlp_shapes(text, hidden):
    def gated(prefix, inner):
        return {
            f"{prefix}.gate_proj.weight": (inner, hidden),
            f"{prefix}.up_proj.weight": (inner, hidden),
            f"{prefix}.down_proj.weight": (hidden, inner),
        }

    if "num_experts" not in text:
        return gated("mlp", text["intermediate_size"])
    result = {"mlp.gate.weight": (text["num_experts"], hidden), "mlp.shared_expert_gate.weight": (1, hidden)}
    result |= gated("mlp.shared_expert", text["shared_expert_intermediate_size"])
    for expert in range(text["num_experts"]):
        result |= gated(f"mlp.experts.{expert}", text["moe_intermediate_size"])
    return result


def model(text, seed=0):
    """Canonical name -> random float32 array, with small numbers where norms and decays have them."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes(text).items()}


def mtp_model(text, seed=1, own=()):
    """As `model`, the multi-token-prediction head of it, with an embedding and a head of its own if they are named."""
    of_one = shapes(text | {"layer_types": ["full_attention"], "tie_word_embeddings": False})
    hidden = text["hidden_size"]
    wanted = {"fc.weight": (hidden, 2 * hidden), "pre_fc_norm_embedding.weight": (hidden,)}
    wanted |= {"pre_fc_norm_hidden.weight": (hidden,), "norm.weight": (hidden,)}
    wanted |= {name: shape for name, shape in of_one.items() if name.startswith("layers.0.") or name in own}
    rng = np.random.default_rng(seed)
    return {f"mtp.{name}": rng.standard_normal(shape).astype(np.float32) for name, shape in wanted.items()}


def tiled(rows, text, width):
    """Value heads of `width` rows, from grouped order (g0v0, g0v1, …) to tiled order (g0v0, g1v0, …)."""
    groups = text["linear_num_key_heads"]
    ratio = text["linear_num_value_heads"] // groups
    result = np.empty_like(rows)
    for g in range(groups):
        for r in range(ratio):
            source, target = (g * ratio + r) * width, (r * groups + g) * width
            result[target : target + width] = rows[source : source + width]
    return result


_PLACES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
}


def _stored_number(name, array):
    if name.endswith("A_log"):
        return -np.exp(array)
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return array + 1
    return array


def _stored_common(text, tensors):
    """Names and numbers as in the file, in grouped head order; experts stacked, convolutions squeezed."""
    stored = {}
    for name, array in tensors.items():
        array = _stored_number(name, array)
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            if part.startswith("mlp.experts."):
                _, _, expert, matrix, _ = part.split(".")
                place = f"blk.{layer}.ffn_{matrix.removesuffix('_proj')}_exps.weight"
                stack = stored.setdefault(place, np.empty((text["num_experts"], *array.shape), np.float32))
                stack[int(expert)] = array
                continue
            array = np.squeeze(array) if "conv1d" in part or "shared_expert_gate" in part else array
            stored[f"blk.{layer}.{_PLACES[part]}"] = array
        else:
            top = {"embed_tokens.weight": "token_embd", "norm.weight": "output_norm", "lm_head.weight": "output"}
            stored[f"{top[name]}.weight"] = array
    return stored


_MTP_PLACES = {
    "mtp.fc.weight": "eh_proj",
    "mtp.pre_fc_norm_embedding.weight": "enorm",
    "mtp.pre_fc_norm_hidden.weight": "hnorm",
    "mtp.norm.weight": "shared_head_norm",
    "mtp.embed_tokens.weight": "embed_tokens",
    "mtp.lm_head.weight": "shared_head_head",
}


def stored_mtp(text, tensors):
    """Stored name -> array of a multi-token-prediction head, in the block behind the layers."""
    block = text["num_hidden_layers"]
    layer, stored = {}, {}
    for name, array in tensors.items():
        if name in _MTP_PLACES:
            stored[f"blk.{block}.nextn.{_MTP_PLACES[name]}.weight"] = array + 1 if array.ndim == 1 else array
        else:
            layer[name.replace("mtp.layers.0.", f"layers.{block}.")] = array
    return stored | _stored_common(text, layer)


def mtp_metadata(text, arch, flagged=True):
    """`metadata` of a file with such a block; with `flagged` its kind is stated too."""
    kinds = text["layer_types"] + ["full_attention"] * flagged
    counts = {"block_count": text["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
    return metadata(text, arch, **counts, **{"attention.recurrent_layers": [k == "linear_attention" for k in kinds]})


def stored_qwen35(text, tensors):
    """Stored name -> array as a `qwen35` file has it."""
    keys = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"]
    width = text["linear_value_head_dim"]
    stored = _stored_common(text, tensors)
    for name, array in stored.items():
        part = name.split(".", 2)[-1]
        if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
            stored[name] = np.concatenate([array[:keys], tiled(array[keys:], text, width)])
        elif part == "attn_gate.weight":
            stored[name] = tiled(array, text, width)
        elif part in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias", "ssm_a"):
            stored[name] = tiled(array, text, 1)
        elif part == "ssm_out.weight":
            stored[name] = tiled(array.T, text, width).T
    return stored


def stored_qwen3next(text, tensors, joined=False, fused=False):
    """Stored name -> array in a `qwen3next` file; `joined`: qkv and z in ssm_in; `fused`: gate and up of experts."""
    groups, head = text["linear_num_key_heads"], text["linear_key_head_dim"]
    ratio = text["linear_num_value_heads"] // groups
    values = ratio * text["linear_value_head_dim"]
    stored = _stored_common(text, tensors)
    for name in list(stored):
        block, part = name.rsplit(".", 2)[0], name.split(".", 2)[-1]
        if part == "ssm_beta.weight":
            beta, alpha = stored.pop(name), stored.pop(f"{block}.ssm_alpha.weight")
            rows = []
            for g in range(groups):
                rows += [beta[g * ratio : (g + 1) * ratio], alpha[g * ratio : (g + 1) * ratio]]
            stored[f"{block}.ssm_ba.weight"] = np.concatenate(rows)
        if part == "attn_qkv.weight" and joined:
            qkv, gate = stored.pop(name), stored.pop(f"{block}.attn_gate.weight")
            rows = []
            for g in range(groups):
                rows += [qkv[g * head : (g + 1) * head], qkv[(groups + g) * head : (groups + g + 1) * head]]
                start = 2 * groups * head + g * values
                rows += [qkv[start : start + values], gate[g * values : (g + 1) * values]]
            stored[f"{block}.ssm_in.weight"] = np.concatenate(rows)
        if part == "ffn_gate_exps.weight" and fused:
            gate, up = stored.pop(name), stored.pop(f"{block}.ffn_up_exps.weight")
            stored[f"{block}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    return stored


def metadata(text, arch, **changes):
    """Key without prefix -> value, as converters write them; a change to None leaves the key out."""
    rope = text["rope_parameters"]
    values = {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": text["head_dim"],
        "attention.value_length": text["head_dim"],
        "attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in text["layer_types"]],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(text["head_dim"] * rope["partial_rotary_factor"]),
        "ssm.conv_kernel": text["linear_conv_kernel_dim"],
        "ssm.state_size": text["linear_key_head_dim"],
        "ssm.group_count": text["linear_num_key_heads"],
        "ssm.time_step_rank": text["linear_num_value_heads"],
        "ssm.inner_size": text["linear_num_value_heads"] * text["linear_value_head_dim"],
    }
    if "num_experts" in text:
        values |= {
            "expert_count": text["num_experts"],
            "expert_used_count": text["num_experts_per_tok"],
            "expert_feed_forward_length": text["moe_intermediate_size"],
            "expert_shared_feed_forward_length": text["shared_expert_intermediate_size"],
        }
    return {f"{arch}.{key}": value for key, value in (values | changes).items() if value is not None}


def write(path, arch, values, stored, types=()):
    """Write a file through the `gguf` package. `types` maps stored names to tensor types other than F32."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        _ADD[type(value)](writer, key, value)
    for name, array in stored.items():
        kind = dict(types).get(name, Q.F32)
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_ADD = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    np.float64: gguf.GGUFWriter.add_float64,
    str: gguf.GGUFWriter.add_string,
    list: gguf.GGUFWriter.add_array,
}


def write_qwen35(path, text, tensors, types=(), **changes):
    return write(path, "qwen35", metadata(text, "qwen35", **changes), stored_qwen35(text, tensors), types)


def write_qwen3next(path, text, tensors, types=(), **layout):
    return write(path, "qwen3next", metadata(text, "qwen3next"), stored_qwen3next(text, tensors, **layout), types)
