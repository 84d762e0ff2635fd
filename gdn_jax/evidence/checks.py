"""The checks behind `gdn check`: each runs the library on a subject and returns one table with its verdict."""

import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import layer, state, state_value, taps
from gdn_jax.conv import conv_step
from gdn_jax.delta import delta_step
from gdn_jax.evidence import bounds, programs
from gdn_jax.evidence.metrics import differing, max_abs, max_rel, rms_rel
from gdn_jax.evidence.oracle import LayerRun
from gdn_jax.evidence.report import Section
from gdn_jax.evidence.subjects import Subject
from gdn_jax.gates import log_decay
from gdn_jax.norms import l2_normalise
from gdn_jax.state import GdnState
from gdn_jax.weights import GdnWeights

__all__ = [
    "addressing",
    "golden_summary",
    "operators",
    "per_operator",
    "per_token",
    "replay",
    "round_trips",
    "run_on_device",
    "run_tapped",
    "state_sizes",
]


def operators() -> Section:
    """Single operators at points where a wrong epsilon, branch or order shows: values known in closed form."""
    spike = jnp.zeros((1, 128), jnp.float32).at[0, 0].set(1e-3)

    def gate(x: float, a_log: float) -> jax.Array:
        return log_decay(jnp.full((1, 1), x), jnp.zeros(1), jnp.full((1,), a_log))[0, 0]

    one = jnp.ones((1, 1, 1), jnp.float32)
    first = delta_step(jnp.full((1, 1, 1, 1), 5.0), one, one, 3.0 * one, jnp.ones((1, 1)), jnp.zeros((1, 1)))
    half = delta_step(jnp.full((1, 1, 1, 1), 4.0), one, one, one, jnp.zeros((1, 1)), jnp.full((1, 1), np.log(0.5)))
    conv, frames = conv_step(jnp.ones((1, 1, 1)), jnp.full((1, 1), 2.0), jnp.asarray([[10.0, 1.0]]))
    cases: list[tuple[str, Any, float, float]] = [
        ("q/k norm of 1e-3: epsilon on the sum", l2_normalise(spike)[0, 0], 1e-3 / np.sqrt(2e-6), 3e-7),
        ("q/k norm of zero", l2_normalise(jnp.zeros((1, 128)))[0, 0], 0.0, 0.0),
        ("log decay at x = 100, A_log = 0", gate(100.0, 0.0), -100.0, 0.0),
        ("decay at x = -200, A_log = 89", jnp.exp(gate(-200.0, 89.0)), 1.0, 0.0),
        ("decay at x = -100, A_log = 89", jnp.exp(gate(-100.0, 89.0)), np.exp(-np.exp(-11.0)), 3e-7),
        ("delta rule overwrites: beta = 1, same key", first[0][0, 0, 0], 3.0, 0.0),
        ("delta rule decays before it reads; beta = 0", half[0][0, 0, 0], 2.0, 3e-7),
        ("conv window, oldest first: silu(1·10 + 2·1)", conv[0, 0], 12.0 / (1.0 + np.exp(-12.0)), 3e-7),
        ("conv history keeps the input", frames[0, 0, 0], 2.0, 0.0),
    ]
    rows = []
    for name, got, want, bound in cases:
        error = abs(float(got) - want) / (abs(want) or 1.0)
        rows.append((name, want, float(got), error, bound, bool(error <= bound)))
    columns = ("operator", "expected", "got", "relative_error", "bound", "verdict")
    return Section("operators", "Single operators against closed forms", columns, rows, all(row[-1] for row in rows))


def run_on_device(subject: Subject) -> tuple[np.ndarray, GdnState]:
    """The whole sequence in one device-resident `scan`: ys [T, B, D] and the final one-layer state."""
    ys, final = programs.scan(subject.layer, _initial(subject), jnp.asarray(subject.xs), cfg=subject.cfg)
    return np.asarray(ys), final


def run_tapped(subject: Subject, weights: GdnWeights, tokens: Collection[int]) -> dict[int, dict[str, np.ndarray]]:
    """The taps of `weights` at the chosen tokens, from the subject's initial state over the subject's inputs."""
    current, tapped = _initial(subject), {}
    for token, x in enumerate(subject.xs):
        _, current, found = programs.trace(weights, current, jnp.asarray(x), cfg=subject.cfg)
        if token in tokens:
            tapped[token] = {name: np.asarray(value) for name, value in found.items()}
    return tapped


def golden_summary(
    subjects: Sequence[Subject], bound: float, *, state_bound: float = bounds.STATE, as_good_as_theirs: bool
) -> Section:
    """One row per golden: the library and transformers, each against float64, and against each other.

    `bound` holds for the library's outputs, `state_bound` for its final state. With `as_good_as_theirs` the outputs
    must also be no further from float64 than those of transformers.
    """
    rows = []
    for subject in subjects:
        golden = subject.golden
        if golden is None:
            raise ValueError(f"{subject.name} has no golden")
        ys, final = run_on_device(subject)
        run = subject.oracle(golden.tapped_tokens)
        kept = list(golden.kept_tokens)
        theirs = golden.arrays["ys"]
        ours, exact = (golden.sample("ys", array[kept]) for array in (ys, run.ys))
        ours_64 = _worst(ours, exact)
        theirs_64 = _worst(theirs, exact)
        state_64 = max(max_rel(final.S[0], run.S), max_rel(final.conv_hist[0], run.conv_hist))
        states = [
            max_rel(golden.sample(name, np.asarray(leaf))[0], golden.arrays[name][-1])
            for name, leaf in (("S", final.S), ("HIST", final.conv_hist))
        ]
        ours_theirs = max(_worst(ours, theirs), *states)
        limit = min(bound, theirs_64) if as_good_as_theirs else bound
        good = ours_64 <= limit and state_64 <= state_bound and ours_theirs <= bounds.TRANSFORMERS
        rows.append((subject.name, golden.source, golden.tokens, ours_64, theirs_64, state_64, ours_theirs, good))
    columns = (
        "case", "class", "T", "ours_vs_float64", "transformers_vs_float64", "state_vs_float64", "ours_vs_transformers",
        "verdict",
    )  # fmt: skip
    title = (
        f"Goldens of transformers, worst max_rel per token: outputs ≤ {bound:g} and "
        f"states ≤ {state_bound:g} "
        f"from float64, both ≤ {bounds.TRANSFORMERS:g} from transformers"
    )
    return Section("goldens", title, columns, rows, all(row[-1] for row in rows))


def per_token(subject: Subject, ys: np.ndarray, run: LayerRun, noise: np.ndarray, bound: float) -> Section:
    """max_abs_err, max_abs_ref and max_rel of every token's output against float64; `noise` as in `Subject.noise`."""
    rows = []
    for token, (got, want) in enumerate(zip(ys, run.ys, strict=True)):
        error, limit = max_rel(got, want), bounds.at_token(bound, noise[token])
        peak = max_abs(want, np.zeros_like(want))
        rows.append((token, max_abs(got, want), peak, error, float(noise[token]), limit, bool(error <= limit)))
    worst = max(range(len(rows)), key=lambda i: rows[i][3])
    failed = [i for i, row in enumerate(rows) if not row[-1]][:8]
    doubling = (2**i for i in range(len(rows).bit_length()))
    shown = sorted({0, worst, len(rows) - 1, *failed, *(i for i in doubling if i < len(rows))})
    columns = ("token", "max_abs_err", "max_abs_ref", "max_rel", "input_rounding", "bound", "verdict")
    whole, limit = rms_rel(ys, run.ys), bounds.at_token(bounds.RUN, float(np.median(noise)))
    title = f"{subject.name}: outputs against float64 per token; rms_rel of the run {whole:.3e} (bound {limit:.3e})"
    return Section("per_token", title, columns, rows, whole <= limit and all(row[-1] for row in rows), shown)


def per_operator(subject: Subject, tokens: tuple[int, ...], run: LayerRun, noise: np.ndarray) -> Section:
    """Every tap at the chosen tokens against float64, each run's own state carried along."""
    tapped = run_tapped(subject, subject.layer, tokens)
    rows = []
    for name, shape in taps.tap_shapes(subject.cfg).items():
        for place, token in enumerate(tokens):
            got, want = tapped[token][name], run.taps[name][place]
            error, limit = max_rel(got, want), bounds.at_token(bounds.OPERATOR, noise[token])
            rms = float(np.sqrt(np.mean(np.square(want)))) if want.size else 0.0
            rows.append((name, int(np.prod(shape)), token, rms, error, rms_rel(got, want), limit, error <= limit))
    columns = ("tap", "size", "token", "rms_ref", "max_rel", "rms_rel", "bound", "verdict")
    title = f"{subject.name}: every operator against float64"
    return Section("per_operator", title, columns, rows, all(row[-1] for row in rows))


def replay(subject: Subject) -> Section:
    """Run all tokens, reset, replay the first: outputs and state must be the same bits as the first time."""
    weights = subject.layer
    current = state.init_state(subject.cfg, layers=1, batch=subject.xs.shape[1])
    firsts = []
    for _ in range(2):
        y, current = programs.step(weights, current, jnp.asarray(subject.xs[0]), cfg=subject.cfg)
        firsts.append((np.asarray(y), np.asarray(current.S), np.asarray(current.conv_hist)))
        for x in subject.xs[1:]:
            _, current = programs.step(weights, current, jnp.asarray(x), cfg=subject.cfg)
        current = state_value.reset(current)
    rows = [_bit_row(name, a, b) for name, a, b in zip(("output", "S", "conv_hist"), *firsts, strict=True)]
    title = f"{subject.name}: reset, then replay of the first token, bitwise"
    return Section("replay", title, _BIT_COLUMNS, rows, all(row[-1] for row in rows))


def addressing(subject: Subject, layers: int = 48) -> Section:
    """The same weights as the first and as the last layer of a stacked state: the same bits, and no other layer moves.

    With one layer every offset is zero, and a transposed state is invisible where K = V and S starts at zero; so the
    state is deep, random, and the subject should have K ≠ V.
    """
    cfg, batch, last = subject.cfg, subject.xs.shape[1], layers - 1
    weights = subject.layer
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = state.state_shapes(cfg, layers=layers, batch=batch)
    start = jax.tree.map(
        lambda leaf, key: jax.random.normal(key, leaf.shape).at[last].set(jax.random.normal(key, leaf.shape)[0]),
        shapes,
        GdnState(*keys),
    )
    saved = state_value.snapshot(start)
    traces = 0

    def counted(*arguments: Any, **options: Any) -> tuple[jax.Array, GdnState]:
        nonlocal traces
        traces += 1
        return layer.step(*arguments, **options)

    step = jax.jit(counted, static_argnames=programs.STATIC, donate_argnames=("state",))
    outputs, finals = [], []
    for slot in (0, last):
        current, ys = state_value.restore(saved), []
        for x in subject.xs:
            y, current = step(weights, state=current, x=jnp.asarray(x), cfg=cfg, layer=jnp.int32(slot))
            ys.append(np.asarray(y))
        outputs.append(np.stack(ys))
        finals.append(current)
    untouched = [
        (np.delete(np.asarray(leaf), slot, axis=0), np.delete(np.asarray(old), slot, axis=0))
        for slot, final in zip((0, last), finals, strict=True)
        for leaf, old in ((final.S, start.S), (final.conv_hist, start.conv_hist))
    ]
    rows = [
        _bit_row(f"outputs, layer 0 against {last}", *outputs),
        _bit_row(f"S, layer 0 against {last}", finals[0].S[0], finals[1].S[last]),
        _bit_row(f"conv_hist, layer 0 against {last}", finals[0].conv_hist[0], finals[1].conv_hist[last]),
        ("all other layers", *(sum(column) for column in zip(*(_count(a, b) for a, b in untouched), strict=True)),
         all(differing(a, b) == 0 for a, b in untouched)),
        ("traces beyond one", 1, traces - 1, traces == 1),
    ]  # fmt: skip
    title = f"{subject.name}: layer addressing in a {layers}-layer state (K={cfg.key_dim}, V={cfg.value_dim}), bitwise"
    return Section("addressing", title, _BIT_COLUMNS, rows, all(row[-1] for row in rows))


def round_trips(subject: Subject, repeats: int = 5) -> tuple[Section, Section]:
    """Host-facing (a round trip per token) against device-resident (one round trip): the same bits, and the times."""
    weights, xs = subject.layer, jnp.asarray(subject.xs)

    def host_facing() -> tuple[np.ndarray, GdnState]:
        current, ys = _initial(subject), []
        for x in subject.xs:
            y, current = programs.step(weights, current, jnp.asarray(x), cfg=subject.cfg)
            ys.append(np.asarray(y))
        return np.stack(ys), current

    def device_resident() -> tuple[np.ndarray, GdnState]:
        ys, final = programs.scan(weights, _initial(subject), xs, cfg=subject.cfg)
        return np.asarray(ys), final

    (y_host, s_host), (y_device, s_device) = host_facing(), device_resident()
    rows = [
        _bit_row("outputs", y_host, y_device),
        _bit_row("S", s_host.S, s_device.S),
        _bit_row("conv_hist", s_host.conv_hist, s_device.conv_hist),
    ]
    title = f"{subject.name}: a host round trip per token against one scan on the device, bitwise"
    equal = Section("round_trips", title, _BIT_COLUMNS, rows, all(row[-1] for row in rows))
    host, device = _median_seconds(host_facing, repeats), _median_seconds(device_resident, repeats)
    tokens = len(subject.xs)
    per_layer = [1e6 * seconds / tokens for seconds in (host, device, host - device)]
    times = Section(
        "round_trip_cost",
        f"{subject.name}: cost of the round trips on {jax.devices()[0].device_kind}, median of {repeats}, T = {tokens}",
        ("host_facing_us_per_token", "device_resident_us_per_token", "round_trip_us_per_layer"),
        [tuple(round(value, 1) for value in per_layer)],
        None,
    )
    return equal, times


def state_sizes(subject: Subject, layers: int) -> Section:
    """Bytes of the state of one sequence."""
    sizes = state.state_nbytes(subject.cfg, layers=layers, batch=1)
    sizes["together"] = sum(sizes.values())
    rows = [(name, size, round(size / 1e6, 2), round(size / 2**20, 2)) for name, size in sizes.items()]
    title = f"{subject.name}: state of one sequence, {layers} layers"
    return Section("state_sizes", title, ("part", "bytes", "MB", "MiB"), rows, None)


_BIT_COLUMNS = ("what", "elements", "differing", "verdict")


def _bit_row(name: str, a: Any, b: Any) -> tuple[Any, ...]:
    elements, different = _count(a, b)
    return (name, elements, different, different == 0)


def _count(a: Any, b: Any) -> tuple[int, int]:
    return int(np.size(a)), differing(a, b)


def _worst(got: np.ndarray, want: np.ndarray) -> float:
    """The largest max_rel of any token."""
    return max(max_rel(a, b) for a, b in zip(got, want, strict=True))


def _initial(subject: Subject) -> GdnState:
    return GdnState(S=jnp.array(subject.S[None]), conv_hist=jnp.array(subject.conv_hist[None]))


def _median_seconds(run: Any, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))
