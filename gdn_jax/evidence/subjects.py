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
from gdn_jax.q4 import Q4Tensor, dequantize
from gdn_jax.weights import TABLE, GdnWeights, from_canonical, load_layer, read_layer

__all__ = ["Subject", "from_geometry", "from_golden", "from_model", "parse_geometry"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """One layer to check: `weights` by canonical name, `xs` [T, B, D], S [B, H, K, V] and conv_hist [B, W-1, C].

    `layer` holds the same weights as the library takes them; in tier q4, `weights` are what its codes stand for.
    """

    name: str
    cfg: GdnConfig
    weights: Mapping[str, np.ndarray]
    layer: GdnWeights
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

    def with_inputs(self, xs: np.ndarray, name: str) -> "Subject":
        """The same layer over other inputs [T, B, D], B as it is.

        Raises:
            ValueError: D is not the layer's.
        """
        if xs.shape[1:] != self.xs.shape[1:]:
            raise ValueError(f"{name}: inputs must be [T, B, D] with D={self.cfg.hidden}, got shape {xs.shape}")
        return dataclasses.replace(self, name=f"{self.name.rsplit(' ', 1)[0]} {name}", xs=xs, golden=None)

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
    weights = golden.weights()
    return Subject(
        name=name,
        cfg=golden.cfg,
        weights=weights,
        layer=from_canonical(golden.cfg, weights),
        xs=golden.xs(),
        S=s,
        conv_hist=conv_hist,
        golden=golden,
    )


def from_geometry(
    name: str, cfg: GdnConfig, *, tokens: int, batch: int, kind: str, tier: str = "f32", quantiser: str = "absmax"
) -> Subject:
    """A subject with recipe weights in `tier`, recipe inputs of `kind`, and a zero state.

    Raises:
        UnsupportedError: tier q4, and a projection's columns do not divide by 32. ValueError: an unknown quantiser.
    """
    weights = recipe.layer_weights(cfg, f"check/{name}")
    layer = from_canonical(cfg, weights, tier=tier, quantiser=quantiser)
    return _recipe_subject(name, cfg, weights, layer, tokens=tokens, batch=batch, kind=kind)


def from_model(
    path: Path, *, layer: int, tokens: int, batch: int, kind: str, tier: str = "f32", quantiser: str = "absmax"
) -> Subject:
    """A subject with the weights of GDN layer `layer` of a checkpoint, in `tier`, widened exactly to float32.

    Raises:
        CheckpointError: the checkpoint is damaged. ValueError: it has no such layer. UnsupportedError: as above.
    """
    cfg, stored = read_layer(path, layer=layer)
    weights = {name: np.asarray(tensor, np.float32) for name, tensor in stored.items()}
    loaded = load_layer(path, layer=layer, tier=tier, quantiser=quantiser)
    return _recipe_subject(f"{path.name} layer {layer}", cfg, weights, loaded, tokens=tokens, batch=batch, kind=kind)


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
    name: str,
    cfg: GdnConfig,
    weights: Mapping[str, np.ndarray],
    layer: GdnWeights,
    *,
    tokens: int,
    batch: int,
    kind: str,
) -> Subject:
    in_4_bits = {row.name: row.of(layer) for row in TABLE if isinstance(row.of(layer), Q4Tensor)}
    return Subject(
        name=f"{name} {layer.tier} {kind}",
        cfg=cfg,
        weights={**weights, **{name: np.asarray(dequantize(q)) for name, q in in_4_bits.items()}},
        layer=layer,
        xs=recipe.inputs(kind, f"check/{name}/{kind}", (tokens, batch, cfg.hidden)),
        S=np.zeros((batch, cfg.value_heads, cfg.key_dim, cfg.value_dim), np.float32),
        conv_hist=np.zeros((batch, cfg.conv_width - 1, cfg.conv_channels), np.float32),
    )
