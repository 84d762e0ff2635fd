"""What a check runs on: one layer's weights, a sequence of inputs, an initial state, and goldens where they exist."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gdn_jax.config import GEOMETRIES, GdnConfig
from gdn_jax.evidence import goldens, recipe
from gdn_jax.evidence.goldens import Golden
from gdn_jax.evidence.metrics import max_rel
from gdn_jax.evidence.oracle import LayerRun, run_layer
from gdn_jax.weights import read_layer

__all__ = ["Subject", "from_geometry", "from_golden", "from_model", "parse_geometry"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """One layer to check: `weights` by canonical name, `xs` [T, B, D], S [B, H, K, V] and conv_hist [B, W-1, C]."""

    name: str
    cfg: GdnConfig
    weights: Mapping[str, np.ndarray]
    xs: np.ndarray
    S: np.ndarray
    conv_hist: np.ndarray
    golden: Golden | None = None

    def oracle(self, taps_at: tuple[int, ...] = ()) -> LayerRun:
        """The float64 run of this subject."""
        return run_layer(
            self.weights,
            self.xs,
            key_heads=self.cfg.key_heads,
            value_heads=self.cfg.value_heads,
            key_dim=self.cfg.key_dim,
            value_dim=self.cfg.value_dim,
            norm_eps=self.cfg.norm_eps,
            S=self.S,
            conv_hist=self.conv_hist,
            taps_at=taps_at,
        )

    def noise(self, exact: np.ndarray) -> np.ndarray:
        """How far each token's float64 output moves from `exact` [T, B, D] when every input is rounded once more.

        The max_rel [T] of the worse of two runs whose inputs are off by half a unit in the last place, signs at random.
        """
        worst = np.zeros(len(self.xs))
        for seed in range(2):
            signs = np.sign(recipe.uniform(f"noise/{seed}", self.xs.shape, -1.0, 1.0))
            moved = dataclasses.replace(self, xs=self.xs.astype(np.float64) * (1 + 2.0**-24 * signs)).oracle()
            worst = np.maximum(worst, [max_rel(a, b) for a, b in zip(moved.ys, exact, strict=True)])
        return worst


def from_golden(name: str) -> Subject:
    """The subject of a golden, with what transformers computed for it."""
    golden = goldens.load(name)
    s, conv_hist = golden.initial_state()
    return Subject(
        name=name,
        cfg=golden.cfg,
        weights=golden.weights(),
        xs=golden.xs(),
        S=s,
        conv_hist=conv_hist,
        golden=golden,
    )


def from_geometry(name: str, cfg: GdnConfig, *, tokens: int, batch: int, kind: str) -> Subject:
    """A subject with recipe weights, recipe inputs of `kind`, and a zero state."""
    weights = recipe.layer_weights(cfg, f"check/{name}")
    return _recipe_subject(name, cfg, weights, tokens=tokens, batch=batch, kind=kind)


def from_model(path: Path, *, layer: int, tokens: int, batch: int, kind: str) -> Subject:
    """A subject with the weights of GDN layer `layer` of a checkpoint, widened exactly to float32.

    Raises:
        CheckpointError: the checkpoint is damaged. ValueError: it has no such layer.
    """
    cfg, stored = read_layer(path, layer=layer)
    weights = {name: np.asarray(tensor, np.float32) for name, tensor in stored.items()}
    return _recipe_subject(f"{path.name} layer {layer}", cfg, weights, tokens=tokens, batch=batch, kind=kind)


def parse_geometry(text: str) -> tuple[str, GdnConfig]:
    """A published geometry by name, or D,G,H,K,V,W as six integers ("64,2,6,16,8,4").

    Raises:
        ValueError: neither.
    """
    if text in GEOMETRIES:
        return text, GEOMETRIES[text].cfg
    parts = text.split(",")
    if len(parts) != 6 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(
            f"geometry must be one of {', '.join(GEOMETRIES)}, or six integers D,G,H,K,V,W such as 64,2,6,16,8,4; "
            f"got {text!r}"
        )
    hidden, key_heads, value_heads, key_dim, value_dim, conv_width = map(int, parts)
    cfg = GdnConfig(
        hidden=hidden,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=conv_width,
    )
    return text, cfg


def _recipe_subject(
    name: str, cfg: GdnConfig, weights: Mapping[str, np.ndarray], *, tokens: int, batch: int, kind: str
) -> Subject:
    return Subject(
        name=f"{name} {kind}",
        cfg=cfg,
        weights=weights,
        xs=recipe.inputs(kind, f"check/{name}/{kind}", (tokens, batch, cfg.hidden)),
        S=np.zeros((batch, cfg.value_heads, cfg.key_dim, cfg.value_dim), np.float32),
        conv_hist=np.zeros((batch, cfg.conv_width - 1, cfg.conv_channels), np.float32),
    )
