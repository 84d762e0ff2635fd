"""The configuration of a hybrid decoder: which layers it has, in which geometry."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from checkpoints.errors import CheckpointError
from checkpoints.hf_config import LAYER_TYPES, gdn_layers, rope_settings, text_config
from checkpoints.settings import Settings
from gdn_jax.config import GEOMETRIES, GdnConfig
from gdn_jax.errors import UnsupportedError
from gdn_jax.integers import positive_int

__all__ = ["DECODERS", "MLP_TYPES", "DecoderConfig", "LayerPlan", "MoeConfig"]

MLP_TYPES = ("dense", "moe")

# Of all layers together: weights are listed expert by expert, and a damaged or hostile file must not decide how many.
_MAX_EXPERTS = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Routed and shared experts: each token takes the `experts_per_token` of `experts` that its router ranks highest.

    `ffn` is the inner size of a routed expert, `shared_ffn` that of the shared one, which every token takes.
    `norm_topk`: the weights of the chosen experts are scaled to a sum of 1.

    Raises:
        TypeError: a size is not an integer. ValueError: a size below 1, or more experts per token than there are.
    """

    experts: int
    experts_per_token: int
    ffn: int
    shared_ffn: int
    norm_topk: bool = True

    def __post_init__(self):
        for field in ("experts", "experts_per_token", "ffn", "shared_ffn"):
            object.__setattr__(self, field, positive_int(field, getattr(self, field)))
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token is {self.experts_per_token}, but there are {self.experts} experts")


class LayerPlan(NamedTuple):
    """What one layer consists of, each part with its number among the parts of its kind."""

    mixer: str
    mixer_ordinal: int
    mlp: str
    mlp_ordinal: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Geometry and constants of a Qwen3.5 or Qwen3-Next text model.

    `layer_types` and `mlp_types` have one entry per layer: "linear_attention" (GDN) or "full_attention", and "dense" or
    "moe". Full attention has `heads` query heads and `kv_heads` key-value heads of size `head_dim`, of which RoPE turns
    the first `rotary_dim` components, with base `rope_theta`. `ffn` is the inner size of a dense MLP. `norm_eps` serves
    every RMSNorm. `tied`: the output head is the embedding. What no layer needs is None.

    Raises:
        TypeError: a size is not an integer. ValueError: sizes or lists that do not fit each other.
    """

    vocab: int
    hidden: int
    layer_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    tied: bool
    gdn: GdnConfig | None = None
    ffn: int | None = None
    moe: MoeConfig | None = None

    def __post_init__(self):
        for field in ("vocab", "hidden", "heads", "kv_heads", "head_dim", "rotary_dim"):
            object.__setattr__(self, field, positive_int(field, getattr(self, field)))
        for field in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(f"{field} must be positive and finite, got {getattr(self, field)!r}")
        self._check_layers()
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim must be even and at most head_dim={self.head_dim}, got {self.rotary_dim}")
        if self.gdn is not None and (self.gdn.hidden, self.gdn.norm_eps) != (self.hidden, self.norm_eps):
            raise ValueError(f"gdn must have hidden={self.hidden} and norm_eps={self.norm_eps}, got {self.gdn}")

    def _check_layers(self) -> None:
        for field, known in (("layer_types", LAYER_TYPES), ("mlp_types", MLP_TYPES)):
            types = tuple(getattr(self, field))
            object.__setattr__(self, field, types)
            if not types or any(kind not in known for kind in types):
                raise ValueError(f"{field} must be one of {', '.join(known)} per layer, got {types!r:.200}")
        if len(self.layer_types) != len(self.mlp_types):
            raise ValueError(f"{len(self.layer_types)} layer_types do not go with {len(self.mlp_types)} mlp_types")
        for field, kind in (("gdn", "linear_attention"), ("ffn", "dense"), ("moe", "moe")):
            if (getattr(self, field) is None) == bool(self.count(kind)):
                raise ValueError(
                    f"{field} must be given if and only if there are {kind} layers ({self.count(kind)} here)"
                )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Read the text model out of a Hugging Face `config.json` (Qwen3.5 or Qwen3-Next, nested or flat).

        Raises:
            CheckpointError: a key is missing, of the wrong kind or contradicts another, or the architecture is another
            one. UnsupportedError: stretched rotary positions, attention with biases or without its output gate.
        """
        text = text_config(config)
        keys = Settings(text)
        _refuse_variants(text)
        count, gdn = keys.size("num_hidden_layers"), frozenset(gdn_layers(text))
        moe, mlp_types = _moe(keys), _mlp_types(keys, count)
        head_dim = keys.size("head_dim")
        theta, rotary_dim = _rope(text, head_dim)
        try:
            return cls(
                vocab=keys.size("vocab_size"),
                hidden=keys.size("hidden_size"),
                layer_types=tuple("linear_attention" if i in gdn else "full_attention" for i in range(count)),
                mlp_types=mlp_types,
                heads=keys.size("num_attention_heads"),
                kv_heads=keys.size("num_key_value_heads"),
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                rope_theta=theta,
                norm_eps=keys.number("rms_norm_eps"),
                tied=_flag(keys, "tie_word_embeddings", False),
                gdn=GdnConfig.from_hf(text) if gdn else None,
                ffn=keys.size("intermediate_size") if "dense" in mlp_types else None,
                moe=moe if "moe" in mlp_types else None,
            )
        except ValueError as error:
            raise CheckpointError(f"the configuration cannot be used: {error}") from error

    def count(self, kind: str) -> int:
        """How many layers have the mixer or the MLP of this kind."""
        return self.layer_types.count(kind) + self.mlp_types.count(kind)

    @property
    def layers(self) -> int:
        """L, the number of layers of every kind."""
        return len(self.layer_types)

    @property
    def queries(self) -> int:
        """Size of the attention's queries, and of what it hands to its output projection."""
        return self.heads * self.head_dim

    @property
    def key_values(self) -> int:
        """Size of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def period(self) -> int:
        """The least number of layers whose repetition makes up the model; all of them where nothing repeats."""
        kinds = list(zip(self.layer_types, self.mlp_types, strict=True))
        lengths = (length for length in range(1, self.layers + 1) if self.layers % length == 0)
        return next(length for length in lengths if kinds == kinds[:length] * (self.layers // length))

    def plan(self) -> tuple[LayerPlan, ...]:
        """What every layer consists of, in order."""
        numbers = {kind: itertools.count() for kind in (*LAYER_TYPES, *MLP_TYPES)}
        kinds = zip(self.layer_types, self.mlp_types, strict=True)
        return tuple(LayerPlan(mixer, next(numbers[mixer]), mlp, next(numbers[mlp])) for mixer, mlp in kinds)


def _refuse_variants(text: Mapping[str, Any]) -> None:
    if text.get("attention_bias"):
        raise UnsupportedError(
            "attention_bias: attention with biases is not implemented, and no published model has it"
        )
    if text.get("attn_output_gate", True) is not True:
        raise UnsupportedError("attn_output_gate must be true: attention without an output gate is not implemented")


def _flag(keys: Settings, key: str, default: bool) -> bool:
    value = keys.value(key, default)
    if not isinstance(value, bool):
        raise keys.error(key, f"must be true or false, got {value!r:.80}")
    return value


def _moe(keys: Settings) -> MoeConfig | None:
    # A mixture without a count would read as a dense model, so that architectures made of experts must state it.
    sparse = keys.value("model_type") in ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
    experts = keys.size("num_experts", None if sparse else 0, least=0)
    if not experts:
        return None
    if experts * keys.size("num_hidden_layers") > _MAX_EXPERTS:
        raise keys.error("num_experts", f"is {experts}, too many: those of all layers must be at most {_MAX_EXPERTS}")
    chosen = keys.size("num_experts_per_tok")
    if chosen > experts:
        raise keys.error("num_experts_per_tok", f"is {chosen}, but num_experts is {experts}")
    return MoeConfig(
        experts=experts,
        experts_per_token=chosen,
        ffn=keys.size("moe_intermediate_size"),
        shared_ffn=keys.size("shared_expert_intermediate_size"),
        norm_topk=_flag(keys, "norm_topk_prob", True),
    )


def _mlp_types(keys: Settings, count: int) -> tuple[str, ...]:
    """Every `decoder_sparse_step`-th layer has experts, but for those that `mlp_only_layers` excepts."""
    if not keys.size("num_experts", 0, least=0):
        return ("dense",) * count
    step, dense = keys.size("decoder_sparse_step", 1), keys.value("mlp_only_layers", [])
    if not isinstance(dense, list | tuple) or any(type(layer) is not int for layer in dense):
        raise keys.error("mlp_only_layers", f"must be a list of layer numbers, got {dense!r:.80}")
    sparse = (layer not in dense and (layer + 1) % step == 0 for layer in range(count))
    return tuple("moe" if flag else "dense" for flag in sparse)


def _rope(text: Mapping[str, Any], head_dim: int) -> tuple[float, int]:
    """Base and rotary size, from `rope_parameters` or, in older configurations, from the top level."""
    rope, kind = rope_settings(text)
    # "mrope" orders the positions of images; those of text are one number for all axes, which is plain RoPE.
    if kind not in ("default", "mrope"):
        raise UnsupportedError(
            f"rope_type {kind!r}: stretched rotary positions are not implemented, only plain ones ('default'); "
            "take the stretching out of the configuration to run within the original context"
        )
    keys = Settings(rope)
    exact = head_dim * keys.number("partial_rotary_factor")
    rotary = round(exact)
    if abs(rotary - exact) > 1e-6 * head_dim or rotary % 2 or not 0 < rotary <= head_dim:
        raise keys.error("partial_rotary_factor", f"of the head size {head_dim} must be an even number, got {exact}")
    return keys.number("rope_theta"), rotary


def _published(
    geometry: str, *, vocab: int = 248320, heads: int, kv_heads: int, tied: bool, ffn: int | None = None, moe=None
) -> DecoderConfig:
    """A published model: three GDN layers, then one of full attention, over and over; RoPE on a quarter of 256."""
    gdn, periods = GEOMETRIES[geometry].cfg, GEOMETRIES[geometry].layers // 3
    layer_types = (*("linear_attention",) * 3, "full_attention") * periods
    return DecoderConfig(
        vocab=vocab,
        hidden=gdn.hidden,
        layer_types=layer_types,
        mlp_types=("dense" if moe is None else "moe",) * len(layer_types),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        norm_eps=gdn.norm_eps,
        tied=tied,
        gdn=gdn,
        ffn=ffn,
        moe=moe,
    )


DECODERS: Mapping[str, DecoderConfig] = {
    "qwen3.5-0.8b": _published("qwen3.5-0.8b", heads=8, kv_heads=2, ffn=3584, tied=True),
    "qwen3.5-2b": _published("qwen3.5-2b", heads=8, kv_heads=2, ffn=6144, tied=True),
    "qwen3.5-4b": _published("qwen3.5-4b", heads=16, kv_heads=4, ffn=9216, tied=True),
    "qwen3.5-9b": _published("qwen3.5-9b", heads=16, kv_heads=4, ffn=12288, tied=False),
    "qwen3.5-27b": _published("qwen3.5-27b", heads=24, kv_heads=4, ffn=17408, tied=False),
    "qwen3-next-80b": _published(
        "qwen3-next-80b",
        vocab=151936,
        heads=16,
        kv_heads=2,
        tied=False,
        moe=MoeConfig(experts=512, experts_per_token=10, ffn=512, shared_ffn=512),
    ),
}
"""The published models by name."""
