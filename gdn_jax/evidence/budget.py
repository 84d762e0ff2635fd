"""What 4-bit weights and 8-bit activations cost, each on its own: per operator, per projection, and through a stack.

A figure of one kind says nothing about the other. Weights in 4 bits leave the same relative error on any input;
activations in 8 bits leave one that depends on how far the largest of 32 neighbours stands out.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.config import GdnConfig
from gdn_jax.evidence import programs, recipe, subjects
from gdn_jax.evidence.checks import run_tapped
from gdn_jax.evidence.metrics import max_rel, rms_rel
from gdn_jax.evidence.report import Section
from gdn_jax.evidence.subjects import Subject
from gdn_jax.limbs import q4_matvec
from gdn_jax.linear import project
from gdn_jax.state import init_state
from gdn_jax.weights import from_canonical

__all__ = ["Options", "operators", "projections", "run", "through_a_stack"]

_REPORTED = ("XC", "XCV", "Q", "K", "Z", "BETA", "G", "ON", "ONN", "OUT", "S", "HIST", "A", "B")
_UNQUANTISED = ("A", "B", "BETA", "G")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Whose budget: layers of a checkpoint, or recipe weights of a geometry; `quantiser` and the inputs.

    `activations` is a .npy file, float32 [T, B, D], such as recorded inputs of the layer; without it the inputs are
    drawn from `inputs`. `stack` layers carry one residual stream in the last table (0: no such table).
    """

    geometry: str | None = None
    model: Path | None = None
    layers: tuple[int, ...] = (0,)
    tokens: int = 16
    inputs: str = "heavy"
    activations: Path | None = None
    quantiser: str = "absmax"
    stack: int = 0


def run(options: Options) -> Iterator[Section]:
    """The tables of one budget, each as soon as it is there.

    Raises:
        CheckpointError, ValueError, UnsupportedError: the weights cannot be had, or not in 4 bits.
    """
    if not options.layers:
        raise ValueError("layers must name at least one GDN layer, got none")
    cfg = None
    for exact, quantised in _subjects(options):
        cfg = exact.cfg
        yield operators(exact, quantised)
        yield projections(exact, quantised)
    if options.stack and cfg:
        yield through_a_stack(cfg, options.stack, options.tokens, options.quantiser)


def operators(exact: Subject, quantised: Subject) -> Section:
    """Every tap of the q4 layer against the same layer in f32, at the first and at the last token (Table A1).

    Passes when the gates, which are float32 in both tiers, differ in no bit: the table's own sanity check.
    """
    rows = []
    last = len(exact.xs) - 1
    tapped = [run_tapped(exact, subject.layer, {0, last}) for subject in (exact, quantised)]
    for name in _REPORTED:
        cells = []
        for token in (0, last):
            want, got = (run[token][name] for run in tapped)
            cells += [float(np.max(np.abs(want), initial=0.0)), _rms(want), max_rel(got, want), rms_rel(got, want)]
        good = cells[2] == cells[3] == cells[6] == cells[7] == 0 if name in _UNQUANTISED else None
        rows.append((name, tapped[0][0][name].size, *cells, good))
    columns = ("tap", "size", *(f"{what}_{which}" for which in ("first", "last") for what in _CELLS), "exactly_0")
    title = f"{quantised.name}: q4 against f32 per operator, first and last of {last + 1} tokens"
    return Section("operators", title, columns, rows, all(row[-1] is not False for row in rows))


_CELLS = ("max", "rms", "max_rel", "rms_rel")


def projections(exact: Subject, quantised: Subject) -> Section:
    """RMS-rel of each large projection, by source of the error, on four kinds of inputs.

    weights: q4 against f32, activations exact. activations: 8 bits against exact, weights q4. both: q8 against f32.
    The subject's own inputs are x for qkv and z, and the layer's own ONN for out.
    """
    last = len(exact.xs) - 1
    onn = run_tapped(exact, exact.layer, {last})[last]["ONN"]
    own = {"qkv": exact.xs[last], "z": exact.xs[last], "out": onn}
    rows = []
    for name in ("qkv", "z", "out"):
        w, q = getattr(exact.layer.large, name), getattr(quantised.layer.large, name)
        drawn = {kind: recipe.inputs(kind, f"budget/{kind}", (4, w.shape[1])) for kind in recipe.INPUT_KINDS}
        for kind, x in {**drawn, "own": own[name].reshape(-1, w.shape[1])}.items():
            x = jnp.asarray(x, jnp.float32)
            f32, q4, q8 = project(w, x), q4_matvec(q, x), q4_matvec(q, x, precision="q8")
            rows.append((name, kind, rms_rel(q4, f32), rms_rel(q8, q4), rms_rel(q8, f32)))
    columns = ("projection", "inputs", "weights_rms_rel", "activations_rms_rel", "both_rms_rel")
    title = f"{quantised.name}: error by source, 4-bit weights and 8-bit activations apart"
    return Section("projections", title, columns, rows, None)


def through_a_stack(cfg: GdnConfig, layers: int, tokens: int, quantiser: str) -> Section:
    """How the error of 4-bit layers grows along a residual stream h ← h + layer(h / rms(h)), recipe weights.

    Two stacks against the same stack in f32: every layer q4, and every second one. rms_rel of h over all tokens.
    """
    start = recipe.inputs("gaussian", "budget/stack", (tokens, 1, cfg.hidden))
    streams = {name: jnp.asarray(start) for name in ("f32", "mixed", "q4")}
    rows = []
    for index in range(layers):
        tensors = recipe.layer_weights(cfg, f"budget/stack/{index}")
        tiers = {
            "f32": from_canonical(cfg, tensors),
            "q4": from_canonical(cfg, tensors, tier="q4", quantiser=quantiser),
        }
        tiers["mixed"] = tiers["q4" if index % 2 else "f32"]
        for name, h in streams.items():
            normed = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + jnp.float32(cfg.norm_eps))
            ys, _ = programs.scan(tiers[name], init_state(cfg, layers=1, batch=1), normed, cfg=cfg)
            streams[name] = h + ys
        rows.append((index, *(rms_rel(streams[name], streams["f32"]) for name in ("mixed", "q4"))))
    columns = ("after_layer", "every_second_layer_q4", "every_layer_q4")
    title = f"Residual stream through {layers} layers, rms_rel against f32, T = {tokens}"
    shown = sorted({*range(min(4, layers)), *range(7, layers, 8), layers - 1})
    return Section("stack", title, columns, rows, None, shown)


def _subjects(options: Options) -> Iterator[tuple[Subject, Subject]]:
    """Each layer in f32 and in q4."""
    recorded = None if options.activations is None else _recorded(options.activations)
    tokens, batch = (options.tokens, 1) if recorded is None else recorded.shape[:2]
    for index in options.layers:
        pair = []
        for tier in ("f32", "q4"):
            common = {
                "tokens": tokens,
                "batch": batch,
                "kind": options.inputs,
                "tier": tier,
                "quantiser": options.quantiser,
            }
            if options.model is not None:
                subject = subjects.from_model(options.model, layer=index, **common)
            else:
                name, cfg = subjects.parse_geometry(options.geometry or "qwen3.5-27b")
                subject = subjects.from_geometry(f"{name}/{index}", cfg, **common)
            pair.append(subject if recorded is None else subject.with_inputs(recorded, str(options.activations)))
        yield pair[0], pair[1]


def _recorded(path: Path) -> np.ndarray:
    array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"{path}: activations must be one .npy array, float32 [T, B, D]")
    if not np.isfinite(array).all():
        raise ValueError(f"{path}: activations hold NaN or inf")
    return array


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
