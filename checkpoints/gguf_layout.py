"""Where the canonical tensors of Qwen3.5 and Qwen3-Next lie in a GGUF file, and what the format did to them.

Names of a GDN layer (behind `blk.{i}.`), and what lies between the file and the canonical Hugging Face layout:

| canonical | stored | qwen35 | qwen3next |
|---|---|---|---|
| in_proj_qkv | attn_qkv.weight | rows of v tiled | as it is; in old files a part of ssm_in.weight |
| in_proj_z | attn_gate.weight | rows tiled | as it is; in old files a part of ssm_in.weight |
| in_proj_b, in_proj_a | ssm_beta.weight, ssm_alpha.weight | rows tiled | per key head [b: R, a: R] in ssm_ba.weight |
| conv1d [C, 1, W] | ssm_conv1d.weight [C, W] | channels of v tiled | as it is |
| dt_bias | ssm_dt.bias | tiled | as it is |
| A_log | ssm_a = -exp(A_log) | tiled | as it is |
| norm | ssm_norm.weight | as it is | as it is |
| out_proj | ssm_out.weight | columns tiled | as it is |

A multi-token-prediction head is one more block behind the layers, with an ordinary layer of full attention in it, and:

| canonical | stored |
|---|---|
| mtp.fc [D, 2D] | nextn.eh_proj |
| mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm | nextn.enorm, nextn.hnorm, nextn.shared_head_norm |
| mtp.embed_tokens, mtp.lm_head, where it has its own | nextn.embed_tokens, nextn.shared_head_head |

Tiled: canonical value heads are grouped by key head, h = g·R + r; the file has them at r·G + g. The other norms of the
model are stored with the 1 added that the canonical weights lack. Both conversions of numbers round: a norm weight w
comes back within 2^-24 · max(1, |1 + w|), A_log within 2^-23 · max(1, |A_log|).
"""

import functools
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.hf_config import GdnDims, gdn_dims, gdn_layers
from checkpoints.interleave import deinterleaved_rows, interleaved_shapes
from checkpoints.names import gdn_shapes
from checkpoints.q4_blocks import GROUP
from checkpoints.settings import Settings

__all__ = ["Part", "canonical_parts", "mtp_parts"]

Runs = Sequence[range]


class Transform(NamedTuple):
    """A conversion of numbers between the file and the canonical form; both directions give float32.

    Raises:
        CheckpointError: values outside the range of the conversion.
    """

    undo: Callable[[np.ndarray], np.ndarray]
    apply: Callable[[np.ndarray], np.ndarray]


class Part(NamedTuple):
    """A canonical tensor of `shape`, and the stored one that holds it.

    `expert` selects an entry of a stored stack. `rows` and `columns` list the stored rows (of a vector: elements) and
    columns in canonical order; None means all of them, in place.
    """

    shape: tuple[int, ...]
    stored: str
    stored_shape: tuple[int, ...]
    expert: int | None = None
    rows: Runs | None = None
    columns: Runs | None = None
    transform: Transform | None = None

    @property
    def entry_shape(self) -> tuple[int, ...]:
        """`stored_shape`, or that of one entry of the stack."""
        return self.stored_shape if self.expert is None else self.stored_shape[1:]

    @property
    def is_matrix(self) -> bool:
        """Whether it is a weight matrix; the rest, vectors and the convolution, is F32 in every file."""
        return len(self.shape) == 2

    @property
    def cuts_groups(self) -> bool:
        """Whether columns change places in runs that cut the groups of columns that share a scale."""
        return self.columns is not None and any(run.start % GROUP for run in self.columns)

    def to_canonical(self, array: np.ndarray, group: int = 1) -> np.ndarray:
        """Stored rows and columns in canonical order; `array` has one column for every `group` of the tensor's."""
        return _ordered(_ordered(array, self.rows, 0, 1), self.columns, 1, group)

    def to_stored(self, array: np.ndarray, group: int = 1) -> np.ndarray:
        """The inverse of `to_canonical`, where `rows` holds every stored row."""
        return _ordered(_ordered(array, _inverse(self.rows), 0, 1), _inverse(self.columns), 1, group)


def canonical_parts(text: Mapping[str, Any], stored: Container[str], tiled: bool) -> dict[str, Part]:
    """Every canonical tensor of the model, by canonical name.

    `text` is the flat text configuration. `stored` holds the names in the file, which decide between layouts.

    Raises:
        CheckpointError: the configuration lacks a key or has a wrong one.
    """
    keys, dims, gdn = Settings(text), gdn_dims(text), frozenset(gdn_layers(text))
    # All layers of one kind share their tables, so that these take little memory however many layers a file claims.
    gdn_parts = functools.cache(lambda joined: _gdn_parts(dims, tiled, joined))
    attention_parts = functools.cache(lambda: _attention_parts(keys, dims.hidden))
    mlp_parts = functools.cache(lambda fused: _mlp_parts(keys, dims.hidden, fused))
    parts = _model_parts(keys, dims.hidden)
    for layer in range(keys.size("num_hidden_layers")):
        block = f"blk.{layer}."
        mixer = gdn_parts(f"{block}ssm_in.weight" in stored) if layer in gdn else attention_parts()
        mlp = mlp_parts(f"{block}ffn_gate_up_exps.weight" in stored)
        for name, part in itertools.chain(_norm_parts(dims.hidden).items(), mixer.items(), mlp.items()):
            parts[f"layers.{layer}.{name}"] = part._replace(stored=block + part.stored)
    return parts


def mtp_parts(text: Mapping[str, Any], stored: Container[str], block: int) -> dict[str, Part]:
    """As `canonical_parts`: every tensor that a multi-token-prediction head, which lies in `block`, may have."""
    keys, hidden = Settings(text), gdn_dims(text).hidden
    embedding = (keys.size("vocab_size"), hidden)
    mlp = _mlp_parts(keys, hidden, f"blk.{block}.ffn_gate_up_exps.weight" in stored)
    layer = _norm_parts(hidden) | _attention_parts(keys, hidden) | mlp
    parts = {f"layers.0.{name}": part for name, part in layer.items()} | {
        "fc.weight": _matrix("nextn.eh_proj.weight", hidden, 2 * hidden),
        "pre_fc_norm_embedding.weight": _norm("nextn.enorm.weight", hidden),
        "pre_fc_norm_hidden.weight": _norm("nextn.hnorm.weight", hidden),
        "norm.weight": _norm("nextn.shared_head_norm.weight", hidden),
        "embed_tokens.weight": _matrix("nextn.embed_tokens.weight", *embedding),
        "lm_head.weight": _matrix("nextn.shared_head_head.weight", *embedding),
    }
    return {f"mtp.{name}": part._replace(stored=f"blk.{block}.{part.stored}") for name, part in parts.items()}


def _ordered(array: np.ndarray, runs: Runs | None, axis: int, group: int) -> np.ndarray:
    if runs is None:
        return array
    before = (slice(None),) * axis
    return np.concatenate([array[*before, run.start // group : run.stop // group] for run in runs], axis)


def _inverse(runs: Runs | None) -> Runs | None:
    """The runs of canonical places, in stored order."""
    if runs is None:
        return None
    places = []
    for run in runs:
        start = places[-1].stop if places else 0
        places.append(range(start, start + len(run)))
    return [place for _, place in sorted(zip(runs, places, strict=True), key=lambda pair: pair[0].start)]


def _subtract_one(stored: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a NaN stays one
        return stored.astype(np.float32) - np.float32(1)


def _add_one(weight: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a NaN stays one
        return (weight.astype(np.float64) + 1).astype(np.float32)


def _log_of_negated(stored: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # of signalling NaNs, which the next line refuses
        rates = -stored.astype(np.float64)
    if not (np.isfinite(rates) & (rates > 0)).all():
        raise CheckpointError("must be -exp(A_log), that is negative and finite throughout")
    return np.log(rates).astype(np.float32)


def _negated_exp(a_log: np.ndarray) -> np.ndarray:
    limits = np.finfo(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # both of which the next line refuses
        rates = np.exp(a_log.astype(np.float64))
    if not ((limits.tiny <= rates) & (rates <= limits.max)).all():
        raise CheckpointError("must lie in -87.3 … 88.7, because files of this format store -exp(A_log) in float32")
    return -rates.astype(np.float32)


_NORM = Transform(undo=_subtract_one, apply=_add_one)
_DECAY = Transform(undo=_log_of_negated, apply=_negated_exp)


def _model_parts(keys: Settings, hidden: int) -> dict[str, Part]:
    embedding = (keys.size("vocab_size"), hidden)
    parts = {
        "embed_tokens.weight": Part(embedding, "token_embd.weight", embedding),
        "norm.weight": _norm("output_norm.weight", hidden),
    }
    if not keys.value("tie_word_embeddings", False):
        parts["lm_head.weight"] = Part(embedding, "output.weight", embedding)
    return parts


def _norm(stored: str, size: int) -> Part:
    return Part((size,), stored, (size,), transform=_NORM)


def _matrix(stored: str, outputs: int, inputs: int) -> Part:
    return Part((outputs, inputs), stored, (outputs, inputs))


def _norm_parts(hidden: int) -> dict[str, Part]:
    return {
        "input_layernorm.weight": _norm("attn_norm.weight", hidden),
        "post_attention_layernorm.weight": _norm("post_attention_norm.weight", hidden),
    }


def _attention_parts(keys: Settings, hidden: int) -> dict[str, Part]:
    """Full attention; q_proj holds a query and a gate per head, in the file as in the canonical layout."""
    head_dim = keys.size("head_dim")
    queries = keys.size("num_attention_heads") * head_dim
    key_values = keys.size("num_key_value_heads") * head_dim
    return {
        "self_attn.q_proj.weight": _matrix("attn_q.weight", 2 * queries, hidden),
        "self_attn.k_proj.weight": _matrix("attn_k.weight", key_values, hidden),
        "self_attn.v_proj.weight": _matrix("attn_v.weight", key_values, hidden),
        "self_attn.o_proj.weight": _matrix("attn_output.weight", hidden, queries),
        "self_attn.q_norm.weight": _norm("attn_q_norm.weight", head_dim),
        "self_attn.k_norm.weight": _norm("attn_k_norm.weight", head_dim),
    }


def _mlp_parts(keys: Settings, hidden: int, fused: bool) -> dict[str, Part]:
    """A dense MLP, or experts; `fused` says that gate and up of each expert share one tensor."""
    if keys.size("num_experts", 0, least=0):
        return _moe_parts(keys, hidden, fused)
    return _gated_mlp("mlp", "ffn_{}.weight", hidden, keys.size("intermediate_size"))


def _gated_mlp(prefix: str, stored: str, hidden: int, inner: int) -> dict[str, Part]:
    return {
        f"{prefix}.gate_proj.weight": _matrix(stored.format("gate"), inner, hidden),
        f"{prefix}.up_proj.weight": _matrix(stored.format("up"), inner, hidden),
        f"{prefix}.down_proj.weight": _matrix(stored.format("down"), hidden, inner),
    }


def _moe_parts(keys: Settings, hidden: int, fused: bool) -> dict[str, Part]:
    """Experts are stacked in the file; `fused` tensors have the gate's rows first."""
    experts, inner = keys.size("num_experts"), keys.size("moe_intermediate_size")
    parts = {
        "mlp.gate.weight": _matrix("ffn_gate_inp.weight", experts, hidden),
        "mlp.shared_expert_gate.weight": _matrix("ffn_gate_inp_shexp.weight", 1, hidden),
        **_gated_mlp("mlp.shared_expert", "ffn_{}_shexp.weight", hidden, keys.size("shared_expert_intermediate_size")),
    }
    for expert in range(experts):
        for name, part in _gated_mlp(f"mlp.experts.{expert}", "ffn_{}_exps.weight", hidden, inner).items():
            part = part._replace(expert=expert, stored_shape=(experts, *part.shape))
            if fused and part.stored != "ffn_down_exps.weight":
                rows = range(inner) if part.stored == "ffn_gate_exps.weight" else range(inner, 2 * inner)
                stack = (experts, 2 * inner, hidden)
                part = part._replace(stored="ffn_gate_up_exps.weight", stored_shape=stack, rows=[rows])
            parts[name] = part
    return parts


def _gdn_parts(dims: GdnDims, tiled: bool, joined: bool) -> dict[str, Part]:
    """One GDN layer; `joined` says that ssm_in holds qkv and z."""
    shapes = gdn_shapes(dims)
    parts = {name: Part(shapes[name], stored, shapes[name]) for name, stored in _GDN_STORED.items()}
    channels, _, width = shapes["conv1d.weight"]
    parts["conv1d.weight"] = parts["conv1d.weight"]._replace(
        stored_shape=(channels, width) if width > 1 else (channels,)
    )
    parts["A_log"] = parts["A_log"]._replace(transform=_DECAY)
    if tiled:
        parts = _with_tiled_heads(parts, dims)
    else:
        parts |= _interleaved_parts(dims, ("in_proj_b.weight", "in_proj_a.weight"))
    if joined:
        parts |= _interleaved_parts(dims, ("in_proj_qkv.weight", "in_proj_z.weight"))
    return {f"linear_attn.{name}": part for name, part in parts.items()}


_GDN_STORED = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}

_INTERLEAVED_STORED = {"in_proj_qkvz.weight": "ssm_in.weight", "in_proj_ba.weight": "ssm_ba.weight"}


def _interleaved_parts(dims: GdnDims, names: Sequence[str]) -> dict[str, Part]:
    shapes, holders, rows = gdn_shapes(dims), interleaved_shapes(dims), deinterleaved_rows(dims)
    return {
        name: Part(shapes[name], _INTERLEAVED_STORED[rows[name][0]], holders[rows[name][0]], rows=rows[name][1])
        for name in names
    }


def _with_tiled_heads(parts: Mapping[str, Part], dims: GdnDims) -> dict[str, Part]:
    """`parts` with the value heads where the tiled order has them."""
    if dims.key_heads in (1, dims.value_heads):  # both orders are the same, and whole tensors need not be taken apart
        return dict(parts)
    queries_keys = [range(2 * dims.key_heads * dims.key_dim)]
    heads = _tiled_runs(dims, 1, first=0)
    values = _tiled_runs(dims, dims.value_dim, first=0)
    channels = queries_keys + _tiled_runs(dims, dims.value_dim, first=queries_keys[0].stop)
    moved = {
        "in_proj_qkv.weight": {"rows": channels},
        "in_proj_z.weight": {"rows": values},
        "in_proj_b.weight": {"rows": heads},
        "in_proj_a.weight": {"rows": heads},
        "conv1d.weight": {"rows": channels},
        "dt_bias": {"rows": heads},
        "A_log": {"rows": heads},
        "out_proj.weight": {"columns": values},
    }
    return {name: part._replace(**moved.get(name, {})) for name, part in parts.items()}


def _tiled_runs(dims: GdnDims, width: int, first: int) -> list[range]:
    """Where the value heads lie, `width` rows each from row `first` on: canonical head g·R + r at r·G + g."""
    ratio = dims.value_heads // dims.key_heads
    places = [r * dims.key_heads + g for g in range(dims.key_heads) for r in range(ratio)]
    return [range(first + place * width, first + (place + 1) * width) for place in places]
