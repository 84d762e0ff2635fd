"""`gdn check`: which evidence is gathered, in which order."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from gdn_jax.config import GEOMETRIES
from gdn_jax.evidence import bounds, checks, goldens, subjects
from gdn_jax.evidence.report import Section
from gdn_jax.evidence.subjects import Subject

__all__ = ["Options", "run"]

_REFERENCE = "qwen3.5-27b"
_REFERENCE_PREFIX = "27b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to check. With neither `geometry` nor `model`, everything that the packaged goldens can show.

    `geometry` is a published name or D,G,H,K,V,W; `model` a checkpoint, of which GDN layer `layer` is taken; `tokens`,
    `batch` and `inputs` ("gaussian", "heavy", "uniform") describe the sequence; `long` adds the long goldens.
    In `tier` "q4" the large projections are 4-bit, as stored or by `quantiser`; float64 runs on what they stand for.
    """

    geometry: str | None = None
    model: Path | None = None
    layer: int = 0
    tokens: int = 5
    batch: int = 1
    inputs: str = "gaussian"
    long: bool = False
    tier: str = "f32"
    quantiser: str = "absmax"


def run(options: Options) -> Iterator[Section]:
    """The tables of one check, each as soon as it is there.

    Raises:
        CheckpointError, ValueError: the model or the geometry cannot be had.
    """
    if options.model is not None:
        subject = subjects.from_model(
            options.model,
            layer=options.layer,
            tokens=options.tokens,
            batch=options.batch,
            kind=options.inputs,
            tier=options.tier,
            quantiser=options.quantiser,
        )
        yield from _one_layer(subject, layers=options.layer + 1)
    elif options.geometry is not None:
        name, cfg = subjects.parse_geometry(options.geometry)
        subject = subjects.from_geometry(
            name,
            cfg,
            tokens=options.tokens,
            batch=options.batch,
            kind=options.inputs,
            tier=options.tier,
            quantiser=options.quantiser,
        )
        yield from _one_layer(subject, layers=GEOMETRIES[name].layers if name in GEOMETRIES else 1)
    else:
        yield from _packaged(long=options.long)


def _packaged(*, long: bool) -> Iterator[Section]:
    """The operators and the goldens, then the reference geometry in detail."""
    yield checks.operators()
    small = [name for name in goldens.names() if not name.startswith(_REFERENCE_PREFIX)]
    yield checks.golden_summary([subjects.from_golden(n) for n in small], bounds.GOLDEN, as_good_as_theirs=False)
    _, unequal = subjects.parse_geometry("64,2,6,16,24,4")
    yield checks.addressing(subjects.from_geometry("small", unequal, tokens=5, batch=3, kind="heavy"))
    yield from _reference(long=long)


def _reference(*, long: bool) -> Iterator[Section]:
    """The 27B geometry: its goldens against float64 and transformers, and one of them in every respect."""
    loaded = [subjects.from_golden(f"{_REFERENCE_PREFIX}-t5-{kind}") for kind in ("gaussian", "heavy")]
    yield checks.golden_summary(loaded, bounds.LAYER_27B, as_good_as_theirs=True)
    yield from _one_layer(loaded[0], layers=GEOMETRIES[_REFERENCE].layers, bound=bounds.LAYER_27B)
    for kind in ("gaussian", "heavy") if long else ():
        subject = subjects.from_golden(f"{_REFERENCE_PREFIX}-t512-{kind}")
        yield checks.golden_summary([subject], bounds.GOLDEN, state_bound=bounds.STATE_27B_LONG, as_good_as_theirs=True)


def _one_layer(subject: Subject, *, layers: int, bound: float | None = None) -> Iterator[Section]:
    """Everything that one layer can be asked."""
    ends = tuple(sorted({0, len(subject.xs) - 1}))
    oracle = subject.oracle(ends)
    noise = subject.noise(oracle.ys)
    ys, _ = checks.run_on_device(subject)
    yield checks.per_token(subject, ys, oracle, noise, bounds.LAYER if bound is None else bound)
    yield checks.per_operator(subject, ends, oracle, noise)
    yield checks.replay(subject)
    yield checks.addressing(subject)
    yield from checks.round_trips(subject)
    yield checks.state_sizes(subject, layers)
