"""Canonical tensor names, the shapes of a GDN layer, and which names a model has a place for.

Canonical are the names of Qwen3.5's text model in Hugging Face, without a prefix. Those of the multi-token-prediction
(MTP) head that some models come with start with `mtp.`; its one layer, `mtp.layers.0`, is full attention.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from checkpoints.hf_config import GdnDims, gdn_layers

__all__ = [
    "INTERLEAVED_NAMES",
    "MTP_KIND",
    "MTP_OWN",
    "PROJECTION_NAMES",
    "STORED_GDN_NAMES",
    "Vocabulary",
    "gdn_prefix",
    "gdn_shapes",
    "is_linear",
    "is_mtp",
    "kind_outside_text",
    "listed",
    "mtp_objection",
    "unprefixed",
]

# The four input projections of a GDN layer, and the two tensors that hold them in Qwen3-Next.
PROJECTION_NAMES = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight")
INTERLEAVED_NAMES = ("in_proj_qkvz.weight", "in_proj_ba.weight")
STORED_GDN_NAMES = (
    *PROJECTION_NAMES,
    *INTERLEAVED_NAMES,
    *("conv1d.weight", "dt_bias", "A_log", "norm.weight", "out_proj.weight"),
)

# Which of these stands there depends on the class that saved the model, not on the model.
_PREFIX = re.compile(r"(?:model\.language_model|language_model\.model|language_model|model)\.")

# Number lengths are bounded so that a name cannot ask for an absurd integer.
_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,8})\.(.+)", re.DOTALL)
_MIXER_PARTS = {
    "linear_attention": re.compile("|".join(re.escape(f"linear_attn.{name}") for name in STORED_GDN_NAMES)),
    "full_attention": re.compile(r"self_attn\.(?:[qkvo]_proj\.weight|[qk]_norm\.weight|[qkvo]_proj\.bias)"),
}
_COMMON_PARTS = re.compile(
    r"(?:input|post_attention)_layernorm\.weight"
    r"|mlp\.(?:shared_expert\.|experts\.(?:0|[1-9][0-9]{0,8})\.)?(?:gate|up|down)_proj\.weight"
    r"|mlp\.experts\.(?:gate_up|down)_proj"
    r"|mlp\.(?:shared_expert_)?gate\.weight"
)
MTP_KIND = "multi-token-prediction"
_MTP, _MTP_LAYER = "mtp.", "mtp.layers.0."
_MTP_ALWAYS = frozenset(
    (
        *(f"{_MTP}{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
        *(f"{_MTP_LAYER}{name}_layernorm.weight" for name in ("input", "post_attention")),
        *(f"{_MTP_LAYER}self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(f"{_MTP_LAYER}self_attn.{name}.weight" for name in ("q_norm", "k_norm")),
    )
)
MTP_OWN = (f"{_MTP}embed_tokens.weight", f"{_MTP}lm_head.weight")
"""What an MTP head may have of its own, and has from the model where it does not."""

# Routers and the gate of a shared expert decide between things, and are small: they are no linear layers in this sense.
_LINEAR = re.compile(
    r"mtp\.fc\.weight"
    r"|(?:mtp\.)?(?:embed_tokens|lm_head)\.weight"
    r"|(?:mtp\.)?layers\.[0-9]+\.(?:linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)\.weight"
    r"|self_attn\.[qkvo]_proj\.weight"
    r"|mlp\.(?:shared_expert\.|experts\.[0-9]+\.)?(?:gate|up|down)_proj\.weight"
    r"|mlp\.experts\.(?:gate_up|down)_proj)"
)
_MODEL_NAMES = frozenset({"embed_tokens.weight", "norm.weight", "lm_head.weight"})


def unprefixed(name: str) -> str:
    """`name` without the prefix of the class that saved it; canonical names come back as they are."""
    return name.removeprefix(match[0]) if (match := _PREFIX.match(name)) else name


def kind_outside_text(name: str) -> str | None:
    """The kind of an unprefixed name that belongs to the model but not to its text part, or None."""
    if is_mtp(name):
        return MTP_KIND
    if name.startswith("visual."):
        return "vision"
    return None


def is_mtp(name: str) -> bool:
    """Whether an unprefixed name belongs to the multi-token-prediction head."""
    return name.startswith(_MTP)


def mtp_objection(names: Iterable[str]) -> str | None:
    """Why these unprefixed names are not all those of one MTP head, or None when they are.

    Its MLP is not looked at for completeness, since that depends on its kind.
    """
    names = frozenset(names)
    if missing := sorted(_MTP_ALWAYS - names):
        return f"a multi-token-prediction head needs {listed(missing)} too"
    if unknown := sorted(name for name in names.difference(_MTP_ALWAYS, MTP_OWN) if not _is_mtp_mlp(name)):
        return f"a multi-token-prediction head of one layer has no place for {listed(unknown)}"
    return None


def _is_mtp_mlp(name: str) -> bool:
    return name.startswith(_MTP_LAYER) and _COMMON_PARTS.fullmatch(name.removeprefix(_MTP_LAYER)) is not None


def is_linear(name: str) -> bool:
    """Whether a canonical name is that of a linear layer of the decoder or its MTP head, the embedding and the output
    head included: what makes up nearly all of a model, and what a decoder holds in 4 bits.
    """
    return _LINEAR.fullmatch(name) is not None


def gdn_prefix(layer: int) -> str:
    """What the names of one GDN layer start with; `layer` is the model's layer number."""
    return f"layers.{layer}.linear_attn."


def gdn_shapes(dims: GdnDims) -> dict[str, tuple[int, ...]]:
    """Canonical shape of each tensor of a GDN layer, by the name after `gdn_prefix`.

    C = 2·G·K + H·V; projections are [output, input], the convolution is [C, 1, W].
    """
    values = dims.value_heads * dims.value_dim
    channels = 2 * dims.key_heads * dims.key_dim + values
    return {
        "in_proj_qkv.weight": (channels, dims.hidden),
        "in_proj_z.weight": (values, dims.hidden),
        "in_proj_b.weight": (dims.value_heads, dims.hidden),
        "in_proj_a.weight": (dims.value_heads, dims.hidden),
        "conv1d.weight": (channels, 1, dims.conv_width),
        "dt_bias": (dims.value_heads,),
        "A_log": (dims.value_heads,),
        "norm.weight": (dims.value_dim,),
        "out_proj.weight": (dims.hidden, values),
    }


class Vocabulary:
    """The unprefixed names that a model of the flat configuration `text` may hold, interleaved projections included."""

    def __init__(self, text: Mapping[str, Any]):
        self._gdn_layers = frozenset(gdn_layers(text))
        self._layer_count: int = text["num_hidden_layers"]
        self._has_bias = text.get("attention_bias") is True

    def objection(self, name: str) -> str | None:
        """Why the model has no place for `name`, or None when it has one."""
        if name in _MODEL_NAMES:
            return None
        match = _LAYER.fullmatch(name)
        if match is None:
            return "unknown name"
        layer, part = int(match[1]), match[2]
        if layer >= self._layer_count:
            return f"the configuration has {self._layer_count} layers"
        if _COMMON_PARTS.fullmatch(part):
            return None
        return self._mixer_objection("linear_attention" if layer in self._gdn_layers else "full_attention", part)

    def _mixer_objection(self, layer_type: str, part: str) -> str | None:
        if _MIXER_PARTS[layer_type].fullmatch(part):
            return "attention_bias is not set" if part.endswith(".bias") and not self._has_bias else None
        if any(pattern.fullmatch(part) for pattern in _MIXER_PARTS.values()):
            return f"the configuration says {layer_type}"
        return "unknown name"


def listed(items: Iterable[str], shown: int = 4) -> str:
    """`items` for an error message: the first few, and how many more there are."""
    items = list(items)
    rest = len(items) - shown
    return ", ".join(items[:shown]) + (f" and {rest} more" if rest > 0 else "")
