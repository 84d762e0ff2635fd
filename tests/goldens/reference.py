"""Runs a Gated DeltaNet module of `transformers` token by token, from any state, and records what it computes.

A call on a whole sequence, and even the first token of an empty cache, would take the module's chunked form, which is
several times further from exact arithmetic. So the cache is filled with a state first, and calling the chunked form
is an error.
"""

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest import mock

import numpy as np
import torch
from transformers import Cache, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from gdn_jax.config import GdnConfig

__all__ = ["CLASSES", "build", "config_keys", "module_state", "no_chunked_form", "run", "seed_cache"]

CLASSES = {
    "Qwen3_5GatedDeltaNet": (Qwen3_5GatedDeltaNet, Qwen3_5TextConfig),
    "Qwen3NextGatedDeltaNet": (Qwen3NextGatedDeltaNet, Qwen3NextConfig),
}


def config_keys(cfg: GdnConfig) -> dict[str, int | float]:
    """`cfg` under the names of a `transformers` configuration."""
    return {
        "hidden_size": cfg.hidden,
        "linear_num_key_heads": cfg.key_heads,
        "linear_num_value_heads": cfg.value_heads,
        "linear_key_head_dim": cfg.key_dim,
        "linear_value_head_dim": cfg.value_dim,
        "linear_conv_kernel_dim": cfg.conv_width,
        "rms_norm_eps": cfg.norm_eps,
    }


def build(source: str, cfg: GdnConfig, weights: Mapping[str, np.ndarray]) -> torch.nn.Module:
    """A module of class `source` holding `weights` (canonical names), in float32 and evaluation mode."""
    module_class, config_class = CLASSES[source]
    config = config_class(num_hidden_layers=1, layer_types=["linear_attention"], **config_keys(cfg))
    # Without storage until the weights come: the default initialisation of the 27B layer takes longer than a run.
    with torch.device("meta"):
        module = module_class(config, layer_idx=0)
    module.load_state_dict(module_state(source, cfg, weights), strict=True, assign=True)
    return module.eval()


def module_state(source: str, cfg: GdnConfig, weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The state dict of a module of class `source` from canonical weights."""
    state = dict(weights)
    if source == "Qwen3NextGatedDeltaNet":
        q, k, v = np.split(state.pop("in_proj_qkv.weight"), [cfg.key_channels, 2 * cfg.key_channels])
        state["in_proj_qkvz.weight"] = _by_key_head(cfg, q, k, v, state.pop("in_proj_z.weight"))
        state["in_proj_ba.weight"] = _by_key_head(cfg, state.pop("in_proj_b.weight"), state.pop("in_proj_a.weight"))
    return {name: torch.from_numpy(array) for name, array in state.items()}


def _by_key_head(cfg: GdnConfig, *blocks: np.ndarray) -> np.ndarray:
    """Rows regrouped so that each key head's share of every block lies together."""
    rows = [block.reshape(cfg.key_heads, -1, cfg.hidden) for block in blocks]
    return np.concatenate(rows, axis=1).reshape(-1, cfg.hidden)


@torch.no_grad()
def run(
    module: torch.nn.Module,
    xs: np.ndarray,
    *,
    S: np.ndarray | None = None,
    conv_hist: np.ndarray | None = None,
    taps_at: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Outputs ys [T, B, D], final S [B, H, K, V], final history [B, W-1, C] and the taps at the tokens `taps_at`.

    `xs` is [T, B, D]; without `S` and `conv_hist` the state starts at zero. Taps, all with the tapped tokens as a
    leading axis: XC, XCV [B, C]; Z, ON, ONN [B, H, V]; Q, K [B, G, K]; A, B, BETA, G [B, H]; OUT [B, D]; S and HIST
    as above.
    """
    cache = Cache(layers=[LinearAttentionLayer() for _ in range(module.layer_idx + 1)])
    seed_cache(cache, module, batch=xs.shape[1], S=S, conv_hist=conv_hist)
    ys, taps = [], []
    with no_chunked_form(module), _watched(module) as calls:
        for t, x in enumerate(torch.from_numpy(xs)):
            calls.clear()
            ys.append(module(x[:, None], cache=cache)[:, 0].numpy())
            if t in taps_at:
                taps.append(_taps(module, calls) | {"OUT": ys[-1]} | _state(cache, module))
    final = _state(cache, module)
    stacked = {name: np.stack([tap[name] for tap in taps]) for name in (taps[0] if taps else ())}
    return np.stack(ys), final["S"], final["HIST"], stacked


def seed_cache(
    cache: Cache,
    module: torch.nn.Module,
    *,
    batch: int,
    S: np.ndarray | None = None,
    conv_hist: np.ndarray | None = None,
) -> None:
    """Make `cache` hold a state for `module`'s layer: S [B, H, K, V] and history [B, W-1, C], each zero by default."""
    window = torch.zeros(batch, module.conv_dim, module.conv_kernel_size)
    if conv_hist is not None:
        # The cache keeps W frames; the oldest never meets a weight again.
        window[:, :, 1:] = torch.from_numpy(conv_hist).transpose(1, 2)
    state = torch.zeros(batch, module.num_v_heads, module.head_k_dim, module.head_v_dim)
    if S is not None:
        state[:] = torch.from_numpy(S)
    cache.update_conv_state(window, module.layer_idx, conv_kernel_size=module.conv_kernel_size)
    cache.update_recurrent_state(state, module.layer_idx)


@contextlib.contextmanager
def no_chunked_form(module: torch.nn.Module) -> Iterator[None]:
    """Inside, a call of the chunked delta rule or of the whole-sequence convolution raises."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a golden must come from the recurrent form, one token at a time")

    modeling = sys.modules[type(module).__module__]
    with mock.patch.multiple(modeling, torch_chunk_gated_delta_rule=refuse, causal_conv1d_fn=refuse):
        yield


def _state(cache: Cache, module: torch.nn.Module) -> dict[str, np.ndarray]:
    layer = cache.layers[module.layer_idx]
    return {
        "S": layer.recurrent_states[0].numpy().copy(),
        "HIST": layer.conv_states[0][:, :, 1:].transpose(1, 2).numpy().copy(),
    }


_Calls = dict[str, list[tuple[tuple, dict, object]]]


@contextlib.contextmanager
def _watched(module: torch.nn.Module) -> Iterator[_Calls]:
    """Collects (positional arguments, keyword arguments, result) of the module's inner calls, by name."""
    calls: _Calls = collections.defaultdict(list)
    modeling = sys.modules[type(module).__module__]

    def watch(stack: contextlib.ExitStack, owner: object, name: str) -> None:
        function: Callable = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args, **kwargs):
            result = function(*args, **kwargs)
            calls[name].append((args, kwargs, result))
            return result

        stack.enter_context(mock.patch.object(owner, name, watched))

    with contextlib.ExitStack() as stack:
        for name in ("causal_conv1d_update", "torch_recurrent_gated_delta_rule", "l2norm"):
            watch(stack, modeling, name)
        for child in ("norm", "in_proj_a", "in_proj_b"):
            if hasattr(module, child):
                hook = getattr(module, child).register_forward_hook(
                    lambda _module, args, result, name=child: calls[name].append((args, {}, result))
                )
                stack.callback(hook.remove)
        if hasattr(module, "fix_query_key_value_ordering"):
            watch(stack, module, "fix_query_key_value_ordering")
        yield calls


def _taps(module: torch.nn.Module, calls: _Calls) -> dict[str, np.ndarray]:
    ((conv_args, _, conv_out),) = calls["causal_conv1d_update"]
    ((_, delta_kwargs, (delta_out, _)),) = calls["torch_recurrent_gated_delta_rule"]
    (_, _, q), (_, _, k) = calls["l2norm"]
    ((norm_args, _, norm_out),) = calls["norm"]
    if "in_proj_a" in calls:
        ((_, _, a),), ((_, _, b),) = calls["in_proj_a"], calls["in_proj_b"]
    else:
        ((_, _, (*_, b, a)),) = calls["fix_query_key_value_ordering"]

    batch, ratio = len(conv_out), module.num_v_heads // module.num_k_heads
    heads = (batch, module.num_v_heads, module.head_v_dim)
    taps = {
        "XC": conv_args[0][:, :, 0],
        "XCV": conv_out[:, :, 0],
        "Z": norm_args[1].reshape(heads),
        # The module repeats q and k to the value heads before it normalises them, and scales q just after.
        "Q": q[:, ::ratio, 0] / module.head_k_dim**0.5,
        "K": k[:, ::ratio, 0],
        "A": a[:, 0],
        "B": b[:, 0],
        "BETA": delta_kwargs["beta"][:, 0],
        "G": delta_kwargs["g"][:, 0],
        "ON": delta_out[:, 0],
        "ONN": norm_out.reshape(heads),
    }
    return {name: tensor.numpy().copy() for name, tensor in taps.items()}
