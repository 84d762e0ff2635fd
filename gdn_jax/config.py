"""Configurations: frozen, hashable values that hold exactly what changes the result."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.hf_config import gdn_dims, text_config
from gdn_jax.integers import positive_int

__all__ = ["GEOMETRIES", "GdnConfig", "Geometry"]

_FLOAT32_TINY = 2.0**-126
_FLOAT32_MAX = 2.0**128 - 2.0**104


@dataclasses.dataclass(frozen=True, kw_only=True)
class GdnConfig:
    """Geometry and constants of one Gated DeltaNet layer.

    `hidden` D, `key_heads` G, `value_heads` H (a multiple of G), `key_dim` K, `value_dim` V, `conv_width` W >= 1;
    `norm_eps` is the epsilon of the gated RMSNorm (`rms_norm_eps`), added to the mean of squares. The epsilon of the
    q/k normalisation is a constant of the model family, not a setting.

    Raises:
        TypeError: a size is not an integer, or `norm_eps` is not a number.
        ValueError: a size is below 1, H is not a multiple of G, or `norm_eps` is not a positive normal float32.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float = 1e-6

    def __post_init__(self):
        for field in ("hidden", "key_heads", "value_heads", "key_dim", "value_dim", "conv_width"):
            object.__setattr__(self, field, positive_int(field, getattr(self, field)))
        object.__setattr__(self, "norm_eps", _epsilon(self.norm_eps))
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads must be a multiple of key_heads, got H={self.value_heads}, G={self.key_heads}; "
                "every key head serves the same number of value heads"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "GdnConfig":
        """Read the geometry out of a Hugging Face `config.json` (Qwen3.5, nested or flat, or Qwen3-Next).

        Raises:
            CheckpointError: a key is missing or of the wrong kind, or the architecture is another one.
        """
        try:
            return cls(**gdn_dims(text_config(config))._asdict())
        except ValueError as error:  # sizes are checked already: an epsilon that is no float32
            raise CheckpointError(f"the configuration cannot be used: {error}") from error

    def to_hf(self, *, layers: int) -> dict[str, Any]:
        """The Hugging Face configuration of `layers` such GDN layers and nothing else; `from_hf` inverts it."""
        return {
            "model_type": "qwen3_5_text",
            "hidden_size": self.hidden,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.conv_width,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "num_hidden_layers": layers,
            "layer_types": ["linear_attention"] * layers,
        }

    @property
    def ratio(self) -> int:
        """R = H / G, the value heads that share one key head."""
        return self.value_heads // self.key_heads

    @property
    def key_channels(self) -> int:
        """G·K, the size of q and of k."""
        return self.key_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        """H·V, the size of v, of z and of the layer's inner output."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """C = 2·G·K + H·V, the size of the convolution's input."""
        return 2 * self.key_channels + self.value_channels


def _epsilon(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"norm_eps must be a float, got {value!r}")
    # As a subnormal it would be flushed to zero, and a zero row would then divide by zero.
    if not _FLOAT32_TINY <= value <= _FLOAT32_MAX:
        raise ValueError(f"norm_eps must lie in {_FLOAT32_TINY:.3g} … {_FLOAT32_MAX:.3g} (float32), got {value!r}")
    return float(value)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A published model's GDN geometry: the layer's configuration and how many GDN layers the model stacks."""

    cfg: GdnConfig
    layers: int


def _qwen(hidden: int, value_heads: int, layers: int) -> Geometry:
    """A Qwen geometry: all published models share 16 key heads, 128-wide heads and a convolution of width 4."""
    cfg = GdnConfig(
        hidden=hidden, key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, conv_width=4, norm_eps=1e-6
    )
    return Geometry(cfg, layers)


GEOMETRIES: Mapping[str, Geometry] = {
    "qwen3.5-0.8b": _qwen(1024, 16, 18),
    "qwen3.5-2b": _qwen(2048, 16, 18),
    "qwen3.5-4b": _qwen(2560, 32, 24),
    "qwen3.5-9b": _qwen(4096, 32, 24),
    "qwen3.5-27b": _qwen(5120, 48, 48),
    "qwen3-next-80b": _qwen(2048, 32, 36),
}
