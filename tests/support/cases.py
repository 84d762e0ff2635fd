"""The standard cases: small layers of every awkward kind, run once each and shared by all tests.

K and V differ everywhere, since a transposed state is invisible where they agree, and S starts from random values.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax as gdn
from gdn_jax.evidence import metrics, oracle, recipe

STATIC = ("cfg", "precision", "implementation")
step = jax.jit(gdn.step, static_argnames=STATIC)
scan = jax.jit(gdn.scan, static_argnames=STATIC)
trace = jax.jit(gdn.trace, static_argnames=STATIC)
donating_step = jax.jit(gdn.step, static_argnames=STATIC, donate_argnames=("state",))
donating_scan = jax.jit(gdn.scan, static_argnames=STATIC, donate_argnames=("state",))


def geometry(D, G, H, K, V, W, eps=1e-6):
    """A configuration by axis letters."""
    return gdn.GdnConfig(hidden=D, key_heads=G, value_heads=H, key_dim=K, value_dim=V, conv_width=W, norm_eps=eps)


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer in one slot of a deeper state, T tokens of B sequences, `lengths` where they are ragged."""

    name: str
    cfg: gdn.GdnConfig
    batch: int
    kind: str = "gaussian"
    tokens: int = 5
    layers: int = 3
    slot: int = 1
    lengths: tuple[int, ...] | None = None

    def __str__(self):
        return self.name

    @property
    def active(self):
        """bool [T, B], or None where every sequence has all T tokens."""
        if self.lengths is None:
            return None
        return np.arange(self.tokens)[:, None] < np.array(self.lengths)[None]


CASES = (
    Case("ratio1-heads3", geometry(40, 3, 3, 60, 20, 4), batch=1),
    Case("ratio2-width2-eps", geometry(20, 2, 4, 8, 20, 2, eps=1e-2), batch=3),
    Case("ratio3-heads12", geometry(72, 4, 12, 60, 20, 4), batch=3, kind="heavy"),
    Case("ratio4-heads28-width1", geometry(64, 7, 28, 20, 12, 1), batch=3),
    Case("ratio3-heads48", geometry(40, 16, 48, 100, 20, 4), batch=1, kind="uniform"),
    Case("key-dim-256", geometry(33, 2, 6, 256, 24, 4), batch=3),
    Case("one-key-head", geometry(40, 1, 3, 16, 100, 4, eps=1e-4), batch=3, kind="heavy", layers=1, slot=0),
    Case("ragged", geometry(36, 2, 6, 12, 20, 4), batch=5, tokens=7, lengths=(7, 0, 1, 2, 5)),
)
SMALL = CASES[-1].cfg
"""The geometry for tests whose subject is not the geometry: ratio 3, 36 columns, K = 12, V = 20, W = 4."""


class Run(NamedTuple):
    """What a case leaves: ys [T, B, D], the whole final state, and taps by name [T, B, …] where they were asked for."""

    ys: np.ndarray
    state: gdn.GdnState
    taps: dict[str, np.ndarray]


def assert_same_bits(got, want):
    """Two pytrees of float32 arrays agree in every bit: -0.0 is not 0.0, and a NaN equals itself."""
    differing = jax.tree.map(lambda a, b: metrics.differing(np.asarray(a), np.asarray(b)), got, want)
    assert not any(jax.tree.leaves(differing)), f"elements that differ: {differing}"


def rows_of(state, rows):
    """The chosen batch rows of a state, by any index of one axis."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, rows], state)


def layers_of(state, layers):
    """The chosen layers of a state, by any index of one axis."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[layers], state)


def error(got, want):
    """The `max_rel` of one array."""
    return metrics.max_rel(np.asarray(got), np.asarray(want))


def token_errors(got, want):
    """`max_rel` of every token and row: [T, B, …] twice -> [T, B]."""
    got, want = (np.asarray(array, np.float64).reshape(*array.shape[:2], -1) for array in (got, want))
    peak = np.max(np.abs(want), axis=-1, initial=0.0)
    return np.max(np.abs(got - want), axis=-1, initial=0.0) / np.where(peak == 0, 1.0, peak)


@functools.cache
def canonical(cfg, label="layer"):
    """Recipe weights by canonical name; to be left as they are."""
    return recipe.layer_weights(cfg, f"tests/{label}")


@functools.cache
def weights(cfg, label="layer"):
    return gdn.from_canonical(cfg, canonical(cfg, label))


def inputs(cfg, *lead, label="x", kind="gaussian"):
    """Activations [*lead, D]."""
    return jnp.asarray(recipe.inputs(kind, f"tests/{label}", (*lead, cfg.hidden)))


def random_state(cfg, *, layers, batch, label="state"):
    """A state whose layers and rows all differ."""
    parts = [recipe.layer_state(cfg, f"tests/{label}/{layer}", batch) for layer in range(layers)]
    return gdn.GdnState(*(jnp.asarray(np.stack(leaves)) for leaves in zip(*parts, strict=True)))


def xs_of(case):
    return inputs(case.cfg, case.tokens, case.batch, label=case.name, kind=case.kind)


def start_of(case):
    return random_state(case.cfg, layers=case.layers, batch=case.batch, label=case.name)


def oracle_run(cfg, xs, s, history, *, weights=None, taps_at=()):
    """The float64 run of one layer, with its recipe weights unless others are given."""
    return oracle.run_layer(
        canonical(cfg) if weights is None else weights,
        np.asarray(xs),
        key_heads=cfg.key_heads,
        value_heads=cfg.value_heads,
        key_dim=cfg.key_dim,
        value_dim=cfg.value_dim,
        norm_eps=cfg.norm_eps,
        S=np.asarray(s),
        conv_hist=np.asarray(history),
        taps_at=taps_at,
    )


@functools.cache
def reference(case):
    """The oracle's run of every row on its own, over its true length: NaN in taps and ys stands beyond it."""
    xs, start = np.asarray(xs_of(case)), start_of(case)
    rows = []
    for row, length in enumerate(case.lengths or (case.tokens,) * case.batch):
        s, history = (np.asarray(leaf)[case.slot, row : row + 1] for leaf in (start.S, start.conv_hist))
        run = oracle_run(case.cfg, xs[:length, row : row + 1], s, history, taps_at=range(length))
        rows.append((run.S, run.conv_hist, {"ys": run.ys, **run.taps}))
    s, history = (np.concatenate(leaves) for leaves in list(zip(*rows, strict=True))[:2])
    taps = {name: np.concatenate([_padded(row[2][name], case.tokens) for row in rows], axis=1) for name in rows[0][2]}
    return oracle.LayerRun(taps.pop("ys"), s, history, taps)


def _padded(values, tokens):
    """[t, …] -> [tokens, …], NaN beyond t."""
    return np.concatenate([values, np.full((tokens - len(values), *values.shape[1:]), np.nan)])


@functools.cache
def scanned(case):
    """The case in one device-resident scan."""
    ys, state = scan(
        weights(case.cfg), start_of(case), xs_of(case), cfg=case.cfg, layer=jnp.int32(case.slot), active=case.active
    )
    return Run(np.asarray(ys), state, {})


@functools.cache
def stepped(case):
    """The case token by token."""
    return _token_by_token(case, step)


@functools.cache
def traced(case):
    """The case token by token, with taps."""
    return _token_by_token(case, trace)


def _token_by_token(case, function):
    state, ys, taps = start_of(case), [], []
    for token, x in enumerate(xs_of(case)):
        active = None if case.active is None else case.active[token]
        y, state, *found = function(
            weights(case.cfg), state, x, cfg=case.cfg, layer=jnp.int32(case.slot), active=active
        )
        ys.append(np.asarray(y))
        taps.extend(found)
    names = taps[0] if taps else ()
    return Run(np.stack(ys), state, {name: np.stack([np.asarray(tap[name]) for tap in taps]) for name in names})
