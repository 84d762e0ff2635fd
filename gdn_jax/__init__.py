"""Gated DeltaNet (GDN) linear attention in JAX: a pure step over an explicit state, with evidence for every number.

>>> import gdn_jax as gdn
>>> cfg = gdn.GdnConfig(hidden=64, key_heads=2, value_heads=6, key_dim=16, value_dim=8, conv_width=4)
>>> state = gdn.init_state(cfg, layers=2, batch=1)
>>> state.S.shape, state.conv_hist.shape
((2, 1, 6, 16, 8), (2, 1, 3, 112))

Everything public is listed here and imported on first use: importing the package needs no GPU and stays cheap.
"""

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "GEOMETRIES": "config",
    "GdnConfig": "config",
    "Geometry": "config",
    "GdnState": "state",
    "Snapshot": "state_value",
    "branch": "state_value",
    "init_state": "state",
    "merge": "state_value",
    "reset": "state_value",
    "resize": "state_value",
    "restore": "state_value",
    "select": "state_value",
    "snapshot": "state_value",
    "fingerprint": "fingerprints",
    "load_state": "state_store",
    "save_state": "state_store",
    "state_nbytes": "state",
    "GdnStack": "weights",
    "GdnWeights": "weights",
    "abstract": "weights",
    "from_canonical": "weights",
    "load_config": "weights",
    "load_layer": "weights",
    "load_stack": "weights",
    "Q4Tensor": "q4",
    "dequantize": "q4",
    "quantize": "q4",
    "quantization_report": "q4",
    "q4_matvec": "limbs",
    "split_limbs": "limbs",
    "PoolKey": "pool",
    "Q4Pool": "pool",
    "bind_q4": "pool",
    "prefill": "sequence",
    "scan": "layer",
    "step": "layer",
    "tap_shapes": "taps",
    "trace": "taps",
    "history_from_window": "conv",
    "implementation_report": "ops",
    "DECODERS": "decoder.config",
    "DecoderConfig": "decoder.config",
    "DecoderWeights": "decoder.weights",
    "load_decoder": "decoder.weights",
    "DecoderState": "decoder.state",
    "init_decoder_state": "decoder.state",
    "decode_step": "decoder.model",
    "prefill_tokens": "decoder.model",
    "SamplingParams": "decoder.sample",
    "Decoder": "decoder.decoder",
    "GenerateResult": "decoder.decoder",
    "Window": "decoder.window",
    "commit_window": "decoder.window",
    "verify_window": "decoder.window",
    "DraftCounts": "decoder.speculate",
    "Drafter": "decoder.drafting",
    "Drafting": "decoder.speculate",
    "Proposal": "decoder.drafting",
    "draft_by_model": "decoder.drafters",
    "draft_by_mtp": "decoder.drafters",
    "draft_by_ngrams": "decoder.drafters",
    "Conversation": "decoder.conversation",
    "PrefixCache": "decoder.prefix_cache",
    "PrefixCacheStats": "decoder.prefix_cache",
}
"""Public name -> the module that defines it."""

__all__ = [*_HOME, "errors"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from gdn_jax import errors
    from gdn_jax.config import GEOMETRIES, GdnConfig, Geometry
    from gdn_jax.conv import history_from_window
    from gdn_jax.decoder.config import DECODERS, DecoderConfig
    from gdn_jax.decoder.conversation import Conversation
    from gdn_jax.decoder.decoder import Decoder, GenerateResult
    from gdn_jax.decoder.drafters import draft_by_model, draft_by_mtp, draft_by_ngrams
    from gdn_jax.decoder.drafting import Drafter, Proposal
    from gdn_jax.decoder.model import decode_step, prefill_tokens
    from gdn_jax.decoder.prefix_cache import PrefixCache, PrefixCacheStats
    from gdn_jax.decoder.sample import SamplingParams
    from gdn_jax.decoder.speculate import DraftCounts, Drafting
    from gdn_jax.decoder.state import DecoderState, init_decoder_state
    from gdn_jax.decoder.weights import DecoderWeights, load_decoder
    from gdn_jax.decoder.window import Window, commit_window, verify_window
    from gdn_jax.fingerprints import fingerprint
    from gdn_jax.layer import scan, step
    from gdn_jax.limbs import q4_matvec, split_limbs
    from gdn_jax.ops import implementation_report
    from gdn_jax.pool import PoolKey, Q4Pool, bind_q4
    from gdn_jax.q4 import Q4Tensor, dequantize, quantization_report, quantize
    from gdn_jax.sequence import prefill
    from gdn_jax.state import GdnState, init_state, state_nbytes
    from gdn_jax.state_store import load_state, save_state
    from gdn_jax.state_value import Snapshot, branch, merge, reset, resize, restore, select, snapshot
    from gdn_jax.taps import tap_shapes, trace
    from gdn_jax.weights import GdnStack, GdnWeights, abstract, from_canonical, load_config, load_layer, load_stack


def __getattr__(name: str):
    if name == "errors":
        return importlib.import_module("gdn_jax.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'gdn_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gdn_jax.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
