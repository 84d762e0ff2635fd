"""Decoders for the tests: the committed checkpoints with their goldens, and small models of any geometry."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import numpy as np

import gdn_jax as gdn
from checkpoints import Checkpoint, TensorInfo
from checkpoints.names import is_mtp
from gdn_jax.decoder.config import DecoderConfig, MoeConfig
from gdn_jax.decoder.model import decode_step, prefill_tokens
from gdn_jax.decoder.mtp_weights import mtp_config, mtp_table
from gdn_jax.decoder.weights import load_decoder, read_decoder, table
from gdn_jax.evidence import recipe
from tests.support.paths import FIXTURES

STATIC = ("cfg", "precision", "implementation")
# Not donating: the tests compare states before and after.
step = jax.jit(decode_step, static_argnames=STATIC)
prefill = jax.jit(prefill_tokens, static_argnames=STATIC)

TIED = "qwen3_5-f32-tied"  # ratio 1, two periods of layers; all of it can be 4-bit
MODELS = ("qwen3_5-f32", "qwen3_next-f32", "qwen3_5-f16-nested", TIED)
"""The committed checkpoints with a golden of the whole model."""


@functools.cache
def load(name, tier="f32"):
    """Configuration and weights of a committed checkpoint."""
    return load_decoder(FIXTURES / name, tier=tier)


SMALL = DecoderConfig(
    vocab=96,
    hidden=32,
    layer_types=("linear_attention", "full_attention") * 2,
    mlp_types=("dense", "moe") * 2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rotary_dim=4,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
    gdn=gdn.GdnConfig(hidden=32, key_heads=2, value_heads=6, key_dim=12, value_dim=16, conv_width=4),
    ffn=64,
    moe=MoeConfig(experts=3, experts_per_token=2, ffn=32, shared_ffn=96),
)
"""Every kind of layer, in two periods; all of it can be 4-bit."""


def drawn(cfg, label, tier="f32"):
    """Weights of any configuration, other ones for each label."""
    loaded, weights = read_decoder(Held(hf_config(cfg), draw(cfg, label)), tier=tier)
    assert loaded == cfg
    return weights


@functools.cache
def small(tier="f32"):
    """Weights of `SMALL`."""
    return drawn(SMALL, "tests/small", tier)


class Golden(NamedTuple):
    """What transformers made of a checkpoint; see `tests/fixtures/rebuild.py`."""

    ids: np.ndarray
    prompt: int
    at: np.ndarray
    logits: np.ndarray
    margin: float


@functools.cache
def golden(name):
    with np.load(FIXTURES / name / "logits_golden.npz") as stored:
        return Golden(stored["ids"], int(stored["prompt"]), stored["at"], stored["logits"], float(stored["margin"]))


def hf_config(cfg):
    """The Hugging Face configuration of `cfg`, as a Qwen3-Next, which can be everything."""
    moe = cfg.moe
    gdn = cfg.gdn.to_hf(layers=cfg.layers) if cfg.gdn else dict.fromkeys(_GDN_KEYS, 1) | {"hidden_act": "silu"}
    experts = {"num_experts": 0}
    if moe is not None:
        experts = {
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.ffn,
            "shared_expert_intermediate_size": moe.shared_ffn,
            "norm_topk_prob": moe.norm_topk,
            "mlp_only_layers": [layer for layer, kind in enumerate(cfg.mlp_types) if kind == "dense"],
        }
    return {
        **gdn,
        **experts,
        "model_type": "qwen3_next",
        "hidden_size": cfg.hidden,
        "rms_norm_eps": cfg.norm_eps,
        "num_hidden_layers": cfg.layers,
        "layer_types": list(cfg.layer_types),
        "vocab_size": cfg.vocab,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "rope_theta": cfg.rope_theta,
        "partial_rotary_factor": cfg.rotary_dim / cfg.head_dim,
        "intermediate_size": cfg.ffn or 1,
        "tie_word_embeddings": cfg.tied,
    }


_GDN_KEYS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def draw(cfg, label):
    """Recipe weights by canonical name: GDN layers as in the goldens, norms spread around 0, the rest by fan-in."""
    tensors = _drawn_fields(table(cfg), cfg, label)
    for layer, kind in enumerate(cfg.layer_types):
        if kind == "linear_attention":
            own = recipe.layer_weights(cfg.gdn, f"{label}/{layer}")
            tensors |= {f"layers.{layer}.linear_attn.{name}": tensor for name, tensor in own.items()}
    return tensors


def draw_mtp(cfg, label, own=()):
    """Recipe weights of the head of a model of `cfg`, with those of `checkpoints.names.MTP_OWN` that `own` names."""
    return _drawn_fields(mtp_table(cfg, frozenset(own)), mtp_config(cfg), f"{label}/mtp")


def _drawn_fields(fields, cfg, label):
    tensors = {}
    for field in fields:
        for layer in field.layers(cfg) if field.is_stack else [0]:
            for expert in range(field.experts(cfg)):
                name = field.name.format(layer=layer, expert=expert)
                scale = 0.2 if len(field.shape) == 1 else 1 / math.sqrt(field.shape[-1])
                scale = 1.0 if field.path == "embed" else scale
                tensors[name] = recipe.gaussian(f"{label}/{name}", field.shape, scale)
    return tensors


class Held(Checkpoint):
    """A checkpoint in memory."""

    def __init__(self, config, tensors):
        super().__init__("held", config, {})
        self.tensors = tensors

    def names(self):
        return tuple(sorted(name for name in self.tensors if not is_mtp(name)))

    def mtp_names(self):
        return tuple(sorted(filter(is_mtp, self.tensors)))

    def info(self, name):
        return TensorInfo(self.tensors[name].shape, self.tensors[name].dtype.name)

    def read(self, name):
        return self.tensors[name].copy()

    def close(self):
        pass


DENSE = dataclasses.replace(SMALL, mlp_types=("dense",) * 4, moe=None)
"""Without experts, which take longer to compile."""
