"""Small Hugging Face checkpoints with recipe weights, in any geometry."""

import json

from safetensors.numpy import save_file

from gdn_jax.evidence import recipe


def save_model(path, cfg, *, layers, label="model"):
    """A Qwen3.5 directory of GDN layers only, float32, with the recipe weights `label/0`, `label/1`, …"""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(cfg.to_hf(layers=layers)))
    tensors = {
        f"model.layers.{layer}.linear_attn.{name}": tensor
        for layer in range(layers)
        for name, tensor in recipe.layer_weights(cfg, f"{label}/{layer}").items()
    }
    save_file(tensors, path / "model.safetensors")
    return path
