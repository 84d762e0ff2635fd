"""Small Hugging Face checkpoints with recipe weights, in any geometry."""

import json

from safetensors.numpy import save_file

from gdn_jax.evidence import recipe


def save_model(path, cfg, *, layers, label="model"):
    """A Qwen3.5 directory of GDN layers only, float32, with the recipe weights `label/0`, `label/1`, …"""
    path.mkdir()
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": cfg.hidden,
        "linear_num_key_heads": cfg.key_heads,
        "linear_num_value_heads": cfg.value_heads,
        "linear_key_head_dim": cfg.key_dim,
        "linear_value_head_dim": cfg.value_dim,
        "linear_conv_kernel_dim": cfg.conv_width,
        "rms_norm_eps": cfg.norm_eps,
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention"] * layers,
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = {
        f"model.layers.{layer}.linear_attn.{name}": tensor
        for layer in range(layers)
        for name, tensor in recipe.layer_weights(cfg, f"{label}/{layer}").items()
    }
    save_file(tensors, path / "model.safetensors")
    return path
