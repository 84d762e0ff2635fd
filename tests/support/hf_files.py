"""Hugging Face directories of tiny models, written by the `safetensors` package."""

import json

import numpy as np
from safetensors.numpy import save_file

from tests.support import gguf_files


def write(folder, text, tensors, bare=("lm_head.", "mtp.")):
    """A text-only model in one file, as `save_pretrained` leaves it: names that start so have no prefix."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(text))
    named = {name if name.startswith(bare) else f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in named.items()}, folder / "model.safetensors")
    return folder


def model(folder, dtype=np.float32, seed=0, **changes):
    """A whole random model whose projections can be 4-bit (`gguf_files.config` with `changes`) in `dtype`."""
    text = gguf_files.config(**changes)
    tensors = {name: tensor.astype(dtype) for name, tensor in gguf_files.model(text, seed).items()}
    return write(folder, text, tensors)
