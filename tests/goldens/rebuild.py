"""Rebuilds `gdn_jax/evidence/goldens` from the Gated DeltaNet classes of `transformers`.

    uv run --extra oracle python -m tests.goldens.rebuild

Everything runs in float32 on one CPU thread, token by token. On another CPU or with another version of torch the sums
inside a matrix product may be taken in another order, so the new arrays agree with the old to rounding, not in bits.
"""

import dataclasses
import datetime
import json
import pathlib
import platform

import numpy as np
import torch
import transformers

from gdn_jax.config import GEOMETRIES, GdnConfig
from gdn_jax.evidence import goldens, recipe
from tests.goldens import reference

FOLDER = pathlib.Path(goldens.__file__).parent / "goldens"
QWEN_NEXT = "Qwen3NextGatedDeltaNet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What to run, and what to keep of it; `kept` and `tapped` are all tokens, and the first and last, by default."""

    cfg: GdnConfig
    kind: str
    source: str = "Qwen3_5GatedDeltaNet"
    tokens: int = 24
    batch: int = 2
    weights_label: str | None = None
    state: bool = False
    kept: tuple[int, ...] | None = None
    tapped: tuple[int, ...] | None = None
    strides: dict[str, int] = dataclasses.field(default_factory=dict)


def geometry(D: int, G: int, H: int, K: int, V: int, W: int = 4, eps: float = 1e-6) -> GdnConfig:
    return GdnConfig(hidden=D, key_heads=G, value_heads=H, key_dim=K, value_dim=V, conv_width=W, norm_eps=eps)


# Coprime to the head dims, so that the samples meet every row and column of every head.
REAL_STRIDES = {"XC": 11, "XCV": 11, "Z": 5, "ON": 5, "ONN": 5, "OUT": 3, "S": 191, "HIST": 31}
REAL = {"cfg": GEOMETRIES["qwen3.5-27b"].cfg, "batch": 1, "weights_label": "goldens/27b"}
LONG = {
    "tokens": 512,
    "kept": (0, 1, 2, 3, 4, 63, 64, 127, 255, 383, 511),
    "tapped": (511,),
    "strides": {**REAL_STRIDES, "ys": 3},
}

CASES = {
    "ratio1": Case(cfg=geometry(40, 3, 3, 12, 20), kind="gaussian"),
    "ratio2-heavy": Case(cfg=geometry(48, 2, 4, 16, 24), kind="heavy", batch=3),
    "ratio2-state-eps": Case(cfg=geometry(32, 2, 4, 24, 10, eps=1e-2), kind="gaussian", batch=3, state=True),
    "ratio3": Case(cfg=geometry(40, 2, 6, 12, 20), kind="gaussian"),
    "ratio3-heavy-state-width3": Case(cfg=geometry(44, 2, 6, 18, 10, W=3), kind="heavy", batch=3, state=True),
    "ratio4-heavy-width2": Case(cfg=geometry(36, 2, 8, 20, 12, W=2, eps=1e-5), kind="heavy"),
    "ratio4-uniform": Case(cfg=geometry(24, 3, 12, 8, 14), kind="uniform", batch=1),
    "ratio5-width1-state": Case(cfg=geometry(28, 2, 10, 9, 11, W=1), kind="gaussian", batch=1, state=True),
    "next-ratio2": Case(source=QWEN_NEXT, cfg=geometry(40, 3, 6, 12, 20), kind="gaussian"),
    "next-ratio3-heavy-state": Case(
        source=QWEN_NEXT, cfg=geometry(36, 2, 6, 20, 12), kind="heavy", batch=3, state=True
    ),
    "27b-t5-gaussian": Case(**REAL, kind="gaussian", tokens=5, strides=REAL_STRIDES),
    "27b-t5-heavy": Case(**REAL, kind="heavy", tokens=5, strides=REAL_STRIDES),
    "27b-t512-gaussian": Case(**REAL, **LONG, kind="gaussian"),
    "27b-t512-heavy": Case(**REAL, **LONG, kind="heavy"),
}


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    cases = {}
    for name, case in CASES.items():
        cases[name] = make(name, case)
        print(f"{name}: {(FOLDER / f'{name}.npz').stat().st_size:,} bytes", flush=True)
    (FOLDER / "provenance.json").write_text(json.dumps(versions() | {"cases": cases}, indent=1) + "\n")


def make(name: str, case: Case) -> dict[str, object]:
    """Run a case, write its arrays and return its entry of the provenance."""
    cfg, label = case.cfg, f"goldens/{name}"
    weights_label = case.weights_label or label
    # The inputs of the long runs begin with those of the short ones, so one checks the other.
    inputs_label = f"{weights_label}/{case.kind}"
    state_label = label if case.state else None
    kept = case.kept or tuple(range(case.tokens))
    tapped = case.tapped or (0, case.tokens - 1)

    module = reference.build(case.source, cfg, recipe.layer_weights(cfg, weights_label))
    S, conv_hist = recipe.layer_state(cfg, state_label, case.batch) if state_label else (None, None)
    xs = recipe.inputs(case.kind, inputs_label, (case.tokens, case.batch, cfg.hidden))
    ys, _, _, taps = reference.run(module, xs, S=S, conv_hist=conv_hist, taps_at=tapped)

    whole = {"ys": ys[list(kept)], **taps}
    arrays = {key: goldens.sample(array, case.strides.get(key, 1)) for key, array in whole.items()}
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
    return {
        "source": case.source,
        "config": dataclasses.asdict(cfg),
        "tokens": case.tokens,
        "batch": case.batch,
        "dtype": "float32",
        "input_kind": case.kind,
        "weights_label": weights_label,
        "inputs_label": inputs_label,
        "state_label": state_label,
        "kept_tokens": kept,
        "tapped_tokens": tapped,
        "strides": case.strides,
        "shapes": {key: array.shape for key, array in arrays.items()},
        "sha256": goldens.content_sha256(arrays),
    }


def versions() -> dict[str, str]:
    """The program, its surroundings and the date."""
    return {
        "script": "tests/goldens/rebuild.py",
        "method": "float32 on one CPU thread, token by token with a cache, recurrent form from the first token",
        "date": datetime.date.today().isoformat(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
    }


if __name__ == "__main__":
    main()
