"""Full attention's kernels: float64, addressing, slots that hold nothing, refusals; interpreted, compiled, and run.

Everything that a launch must not look at holds NaN or infinity: slots behind a row's position, other layers of the
cache, weights of other layers, and in `place` the gates, in `attend` the queries beside the gates.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.limbs import group_digits
from pallas_kernels.attend import Cut, attend, place, supported
from pallas_kernels.attend.tuning import choose_cut
from tests.support.cases import assert_same_bits, error
from tests.support.deviceless import compile_for_h200
from tests.support.tolerances import CASE_TAP

LAYERS, LAYER = 3, 1
WEIGHT_LAYERS, WEIGHT_LAYER = 4, 2
EPS = 1e-6
THETA = 1e4


class Geometry(NamedTuple):
    """N, query heads to each, Hd, rotary dimensions, slots, the rows' positions."""

    kv_heads: int
    ratio: int
    head_dim: int
    rotary_dim: int
    capacity: int
    position: tuple[int, ...]

    @property
    def heads(self):
        return self.kv_heads * self.ratio


SMALL = Geometry(2, 3, 32, 8, 70, (0, 69, 37))
WIDE = Geometry(1, 9, 96, 96, 5, (4, 2))
GEOMETRIES = [
    SMALL,
    Geometry(3, 1, 16, 16, 64, (63, 31, 32)),
    Geometry(1, 6, 80, 20, 33, (32, 0)),
    Geometry(2, 6, 256, 64, 100, (99,)),
    Geometry(1, 11, 7, 2, 1, (0, 0)),
    WIDE,
]


class Operands(NamedTuple):
    """What one layer hands the kernels."""

    q: jax.Array  # [B, Nq, 2 Hd]
    k: jax.Array  # [B, N, Hd]
    v: jax.Array  # [B, N, Hd]
    q_norm: jax.Array  # [Lw, Hd]
    k_norm: jax.Array  # [Lw, Hd]
    keys: jax.Array  # [A, B, S, N, Hd]
    values: jax.Array  # [A, B, S, N, Hd]
    position: jax.Array  # [B]
    frequencies: jax.Array  # [rd/2]


def operands(geometry, dtype=jnp.float32, seed=0):
    """Of the cache, only slots before the positions, in layer `LAYER`, hold numbers."""
    rng = np.random.default_rng(seed)
    n, _, head_dim, rotary_dim, capacity, position = geometry
    batch = len(position)

    def norm():
        weight = np.full((WEIGHT_LAYERS, head_dim), np.nan)
        weight[WEIGHT_LAYER] = rng.standard_normal(head_dim) / 5
        return jnp.asarray(weight, jnp.float32)

    def cache(elsewhere):
        held = np.full((LAYERS, batch, capacity, n, head_dim), elsewhere)
        for row, length in enumerate(position):
            held[LAYER, row, :length] = rng.standard_normal((length, n, head_dim))
        return jnp.asarray(held, dtype)

    def heads(number, size):
        return jnp.asarray(rng.standard_normal((batch, number, size)), jnp.float32)

    return Operands(
        q=heads(geometry.heads, 2 * head_dim),
        k=heads(n, head_dim),
        v=heads(n, head_dim),
        q_norm=norm(),
        k_norm=norm(),
        keys=cache(np.nan),
        values=cache(np.inf),
        position=jnp.asarray(position, jnp.int32),
        frequencies=jnp.asarray(THETA ** (-2 * np.arange(rotary_dim // 2) / rotary_dim), jnp.float32),
    )


jitted_place = jax.jit(place, static_argnames=("eps", "interpret"))
jitted_attend = jax.jit(attend, static_argnames=("split", "limbs", "cut", "interpret"))
SPLITS = {limbs: functools.partial(group_digits, limbs=limbs) for limbs in (1, 3)}


def as_index(number):
    return jnp.array([number], jnp.int32)


def placed(x, layer=LAYER, writes=None, weight_layer=WEIGHT_LAYER, *, interpret):
    """`place`, which sees no gate."""
    q = x.q.at[..., x.q.shape[-1] // 2 :].set(jnp.nan)
    writes = jnp.ones(x.position.shape, bool) if writes is None else jnp.asarray(writes)
    index = {"layer": as_index(layer), "weight_layer": as_index(weight_layer), "position": x.position}
    arrays = (q, x.k, x.v, x.q_norm, x.k_norm, x.keys, x.values)
    return jitted_place(*arrays, **index, writes=writes, frequencies=x.frequencies, eps=EPS, interpret=interpret)


def attended(x, made, layer=LAYER, limbs=0, cut=None, *, interpret):
    """`attend` on what `place` left, without the queries beside the gates."""
    gates = x.q.at[..., : x.q.shape[-1] // 2].set(jnp.nan)
    how = {"split": SPLITS[limbs] if limbs else None, "limbs": limbs, "cut": cut, "interpret": interpret}
    return jitted_attend(made.q, gates, made.keys, made.values, layer=as_index(layer), position=x.position, **how)


@pytest.fixture(
    params=[pytest.param(True, id="interpreted"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]
)
def interpret(request):
    return request.param


# -- the same in float64 --------------------------------------------------------------------------------------------


def exact_rope(x, position, frequencies):
    """x [B, heads, Hd]: pairs (i, i + rd/2) as complex numbers, turned; the angle is rounded as float32 has it."""
    half = len(frequencies)
    angle = np.float64(np.float32(position)[:, None] * np.asarray(frequencies)[None])[:, None]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def exact_norm(x, weight):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * (1 + np.float64(weight[WEIGHT_LAYER]))


def exactly_ready(x):
    """q and k as `place` is to leave them."""
    head_dim = x.k.shape[-1]
    q, k = np.float64(x.q[..., :head_dim]), np.float64(x.k)
    q, k = (
        exact_rope(exact_norm(heads, norm), x.position, x.frequencies) for heads, norm in ((q, x.q_norm), (k, x.k_norm))
    )
    return q * head_dim**-0.5, k


def exactly_attended(x, q, keys, values):
    """The gated output [B, Nq, Hd] for the q and the cache that `place` left."""
    q, keys, values = (np.float64(np.float32(array)) for array in (q, keys[LAYER], values[LAYER]))
    gate = 1 / (1 + np.exp(-np.float64(x.q[..., x.k.shape[-1] :])))
    ratio = q.shape[1] // keys.shape[2]
    o = np.empty_like(q)
    for row, last in enumerate(np.asarray(x.position)):
        for head in range(q.shape[1]):
            scores = keys[row, : last + 1, head // ratio] @ q[row, head]
            shares = np.exp(scores - scores.max())
            o[row, head] = shares / shares.sum() @ values[row, : last + 1, head // ratio]
    return o * gate


def assert_only_the_slots_changed(made, x, writing):
    """Every bit of the cache but slot `position` of layer `LAYER` in the rows that write."""
    for after, before in ((made.keys, x.keys), (made.values, x.values)):
        after, before = (np.array(array.astype(jnp.float32)) for array in (after, before))
        for row in writing:
            after[LAYER, row, x.position[row]] = before[LAYER, row, x.position[row]]
        assert_same_bits(after, before)


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("geometry", "dtype"),
    [*((geometry, jnp.float32) for geometry in GEOMETRIES), (SMALL, jnp.bfloat16), (WIDE, jnp.bfloat16)],
)
def test_both_agree_with_float64(interpret, geometry, dtype):
    x = operands(geometry, dtype)
    made = placed(x, interpret=interpret)
    q, k = exactly_ready(x)
    assert error(made.q, q) <= CASE_TAP
    rows = np.arange(len(geometry.position))
    stored = np.asarray(made.keys[LAYER, rows, x.position].astype(jnp.float32))
    assert error(stored, k) <= (CASE_TAP if dtype == jnp.float32 else 2.0**-8)
    np.testing.assert_array_equal(made.values[LAYER, rows, x.position], x.v.astype(dtype))
    assert_only_the_slots_changed(made, x, rows)

    o = attended(x, made, interpret=interpret).o
    want = exactly_attended(x, made.q, made.keys, made.values)
    for row in rows:
        assert error(o[row], want[row].reshape(-1)) <= CASE_TAP


@pytest.mark.parametrize("cut", [Cut(8, 64, 1), Cut(16, 4, 2), Cut(64, 1, 4), Cut(1, 2, 1)])
def test_a_cut_does_not_change_the_result_beyond_rounding(interpret, cut):
    """One tile a program, several, one program, and slots one by one."""
    x = operands(SMALL)
    made = placed(x, interpret=interpret)
    want = exactly_attended(x, made.q, made.keys, made.values)
    o = attended(x, made, cut=cut, interpret=interpret).o
    for row in range(3):
        assert error(o[row], want[row].reshape(-1)) <= CASE_TAP


@pytest.mark.parametrize("position", [1, 4095, 131072, 262143])
def test_the_angle_is_reduced_at_any_position(interpret, position):
    x = operands(Geometry(1, 1, 64, 64, 1, (0,)))
    x = x._replace(position=as_index(position))
    assert error(placed(x, interpret=interpret).q, exactly_ready(x)[0]) <= CASE_TAP


def test_a_long_cache_is_shared_among_all_programs(interpret):
    """Several tiles to a program, the last one not full."""
    x = operands(Geometry(1, 2, 16, 4, 5000, (4900, 3000)))
    made = placed(x, interpret=interpret)
    want = exactly_attended(x, made.q, made.keys, made.values)
    o = attended(x, made, interpret=interpret).o
    for row in range(2):
        assert error(o[row], want[row].reshape(-1)) <= CASE_TAP


def test_large_scores_do_not_overflow(interpret):
    """Scores of ±4e8, and of -inf, for slots of which the first is the nearest."""
    x = operands(Geometry(1, 1, 4, 2, 40, (39,)))
    made = placed(x, interpret=interpret)
    keys = jnp.full_like(made.keys, -1e4).at[LAYER, 0, 0].set(1e4).at[LAYER, 0, 1:36].set(-3e38)
    values = jnp.full_like(made.values, 2.0).at[LAYER, 0, 0].set(1.0)
    made = made._replace(q=jnp.full_like(made.q, 1e4), keys=keys, values=values)
    o = attended(x, made, cut=Cut(4, 2, 1), interpret=interpret).o
    np.testing.assert_allclose(o[0], jax.nn.sigmoid(x.q[0, 0, 4:]), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("limbs", "geometry"), [(1, SMALL), (3, SMALL), (3, WIDE)])
def test_limbs_are_those_of_the_output_in_float32(interpret, limbs, geometry):
    x = operands(geometry)
    made = placed(x, interpret=interpret)
    o, got = (attended(x, made, limbs=n, interpret=interpret) for n in (0, limbs))
    assert got.o is None
    digits, scales = jax.jit(SPLITS[limbs])(o.o.reshape(len(o.o), -1, 32))
    np.testing.assert_array_equal(got.digits, jnp.stack(digits).reshape(got.digits.shape))
    np.testing.assert_array_equal(got.x_scales, scales)


# -- rows, layers and slots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32])
def test_a_row_that_does_not_write_keeps_its_cache(interpret, dtype):
    """Nor does it matter to the others, whatever it holds: poisoned here in all of its operands."""
    x = operands(SMALL)
    want = placed(x, interpret=interpret)
    o = attended(x, want, interpret=interpret).o
    spoilt = x._replace(**{name: getattr(x, name).at[1].set(jnp.nan) for name in ("q", "k", "v")})
    made = placed(spoilt, writes=jnp.array([1, 0, 1], dtype), interpret=interpret)
    assert_only_the_slots_changed(made, x, (0, 2))
    for got, all_writing in ((made.keys, want.keys), (made.values, want.values)):
        assert_same_bits(got[:, ::2], all_writing[:, ::2])
    assert_same_bits(attended(spoilt, made, interpret=interpret).o[::2], o[::2])


@pytest.mark.parametrize("position", [-1, 70, 2**31 - 1])
def test_a_position_that_is_not_a_slot_is_not_written(interpret, position):
    """A full row; the others have the bits that they have beside a row in order."""
    x = operands(SMALL)
    want = placed(x, interpret=interpret)
    o = attended(x, want, interpret=interpret).o
    astray = x._replace(position=x.position.at[1].set(position))
    made = placed(astray, interpret=interpret)
    assert_only_the_slots_changed(made, x, (0, 2))
    got = attended(astray, made, interpret=interpret).o
    assert_same_bits(got[::2], o[::2])
    if position < 0:
        assert np.isnan(got[1]).all()


@pytest.mark.parametrize("layer", [-1, LAYERS, 2**31 - 1])
def test_a_layer_that_does_not_exist_is_neither_written_nor_seen(interpret, layer):
    x = operands(SMALL)
    made = placed(x, layer=layer, interpret=interpret)
    assert_only_the_slots_changed(made, x, ())
    made = placed(x, interpret=interpret)
    assert np.isnan(attended(x, made, layer=layer, interpret=interpret).o).all()
    assert np.isnan(attended(x, made, layer=layer, limbs=3, interpret=interpret).x_scales).all()


def test_every_layer_is_addressed(interpret):
    """The same cache in any layer gives the same bits; a layer of weights out of range is the nearest."""
    x = operands(SMALL)
    want = placed(x, interpret=interpret)
    o = attended(x, want, interpret=interpret).o
    for layer in range(LAYERS):
        order = np.roll(np.arange(LAYERS), layer - LAYER)
        moved = x._replace(keys=x.keys[order], values=x.values[order])
        made = placed(moved, layer=layer, interpret=interpret)
        assert_same_bits(made.keys[layer], want.keys[LAYER])
        assert_same_bits(attended(moved, made, layer=layer, interpret=interpret).o, o)
    for weight_layer in (-5, WEIGHT_LAYERS):
        nearest = 0 if weight_layer < 0 else WEIGHT_LAYERS - 1
        norms = {name: jnp.roll(getattr(x, name), nearest - WEIGHT_LAYER, axis=0) for name in ("q_norm", "k_norm")}
        made = placed(x._replace(**norms), weight_layer=weight_layer, interpret=interpret)
        assert_same_bits(made.q, want.q)


def test_rows_are_independent_and_runs_the_same(interpret):
    """A row alone has its bits in the batch; so has every run."""
    x = operands(SMALL)
    made = placed(x, interpret=interpret)
    o = attended(x, made, interpret=interpret).o
    assert_same_bits(attended(x, placed(x, interpret=interpret), interpret=interpret).o, o)
    for row in range(3):
        cut = {name: getattr(x, name)[row : row + 1] for name in ("q", "k", "v", "position")}
        alone = x._replace(**cut, keys=x.keys[:, row : row + 1], values=x.values[:, row : row + 1])
        made = placed(alone, interpret=interpret)
        assert_same_bits(attended(alone, made, interpret=interpret).o[0], o[row])


# -- refusals -------------------------------------------------------------------------------------------------------


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def shapes(A=3, B=2, S=70, N=2, Nq=6, Hd=32, rd=8, dtype=jnp.float32):
    """Operands of both functions by name."""
    cache = struct(A, B, S, N, Hd, dtype=dtype)
    head = struct(B, N, Hd)
    index = struct(1, dtype=jnp.int32)
    common = {"keys": cache, "values": cache, "layer": index, "position": struct(B, dtype=jnp.int32)}
    projected = struct(B, Nq, 2 * Hd)
    return {
        "place": {"q": projected, "k": head, "v": head, "q_norm": struct(A, Hd), "k_norm": struct(A, Hd)}
        | common
        | {"weight_layer": index, "writes": struct(B, dtype=jnp.bool_), "frequencies": struct(rd // 2)},
        "attend": {"q": struct(B, Nq, Hd), "gate_source": projected} | common,
    }


def traced(name, options=None, **changed):
    """Trace one of the functions with some operands changed."""
    function = functools.partial({"place": place, "attend": attend}[name], interpret=True, **(options or {}))
    function = functools.partial(function, eps=EPS) if name == "place" else function
    return jax.eval_shape(function, **shapes()[name] | changed)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("place", {"q": struct(2, 5, 64)}, r"multiple of key-value heads N = 2.*\[2, 5, 64\]"),
        ("place", {"q": struct(2, 384)}, r"multiple of key-value heads.*\[2, 384\]"),
        ("place", {"q": struct(2, 6, 32)}, r"queries and gates must have shape \[2, 6, 64\].*got \[2, 6, 32\]"),
        ("place", {"k": struct(2, 64)}, r"k must have shape \[2, 2, 32\]"),
        ("place", {"v": struct(2, 2, 16)}, r"v must have shape \[2, 2, 32\]"),
        ("place", {"k_norm": struct(2, 32)}, r"k_norm must have shape \[3, 32\]"),
        ("place", {"values": struct(3, 2, 71, 2, 32)}, r"values must have shape \[3, 2, 70, 2, 32\]"),
        ("place", {"layer": struct(dtype=jnp.int32)}, r"layer must have shape \[1\]"),
        ("place", {"writes": struct(3, dtype=jnp.bool_)}, r"writes must have shape \[2\]"),
        ("place", {"frequencies": struct(17)}, "1 to Hd/2 = 16 frequencies, got 17"),
        ("place", {"frequencies": struct(0)}, "frequencies, got 0"),
        ("attend", {"q": struct(2, 6, 64)}, r"q must have shape \[2, 6, 32\]"),
        ("attend", {"gate_source": struct(2, 6, 32)}, r"queries and gates must have shape \[2, 6, 64\]"),
        ("attend", {"position": struct(1, dtype=jnp.int32)}, r"position must have shape \[2\]"),
    ],
)
def test_shapes_that_do_not_fit(name, changed, message):
    with pytest.raises(ValueError, match=message):
        traced(name, **changed)


@pytest.mark.parametrize(
    ("device_kind", "head_dim", "capacity", "cut"),
    [
        ("NVIDIA H200", 256, 1024, (4, 128, 1)),
        ("NVIDIA H200", 256, 3, (4, 128, 1)),
        ("NVIDIA H200", 256, 1025, (32, 64, 8)),
        ("NVIDIA H200", 80, 1024, (32, 64, 4)),
        ("NVIDIA H100", 256, 1024, (32, 64, 8)),
        ("cpu", 7, 1, (32, 64, 1)),
    ],
)
def test_cuts_are_measured_or_by_rule(device_kind, head_dim, capacity, cut):
    assert choose_cut(device_kind, head_dim, capacity) == Cut(*cut)


@pytest.mark.parametrize("cut", [Cut(24, 64, 1), Cut(32, 0, 1), Cut(32, 64, 64)])
def test_cuts_that_are_none(cut):
    with pytest.raises(ValueError, match=r"cut\.\w+ must be a power of two of at most"):
        traced("attend", {"cut": cut})


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (struct(2, 70, 2, 32), r"must have the axes \[A, B, S, N, Hd\], got shape \[2, 70, 2, 32\]"),
        (struct(3, 2, 70, 2, 32, dtype=jnp.float16), "must be float32 or bfloat16, got float16"),
        (struct(3, 2, 0, 2, 32), "every axis .* at least 1"),
        (struct(3, 2, 70, 2, 257), "Hd must be at most 256, got 257"),
        (struct(1, 2**22, 1, 2, 256), "must be fewer"),
    ],
)
def test_supported_says_why_not(keys, reason):
    assert re.search(reason, supported(keys, 6, interpret=True) or "")
    for name in ("place", "attend"):
        with pytest.raises(NotImplementedError, match=f"{reason}.*use the XLA implementation"):
            traced(name, keys=keys, values=keys)


def test_what_is_supported_and_what_with_limbs():
    assert supported(struct(3, 2, 70, 2, 80, dtype=jnp.bfloat16), 6, interpret=True) is None
    assert "multiple of 32, got 80" in supported(struct(3, 2, 70, 2, 80), 6, limbs=3, interpret=True)
    cache = struct(3, 2, 70, 2, 16)
    small = {"q": struct(2, 6, 16), "gate_source": struct(2, 6, 32), "keys": cache, "values": cache}
    with pytest.raises(NotImplementedError, match="multiple of 32, got 16"):
        traced("attend", {"split": SPLITS[3], "limbs": 3}, **small)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("place", {"k": struct(2, 2, 32, dtype=jnp.bfloat16)}),
        ("place", {"writes": struct(2, dtype=jnp.float32)}),
        ("attend", {"values": struct(3, 2, 70, 2, 32, dtype=jnp.bfloat16)}),
        ("attend", {"position": struct(2, dtype=jnp.uint32)}),
    ],
)
def test_dtypes_that_the_kernels_do_not_take(name, changed):
    with pytest.raises(NotImplementedError, match=f"{next(iter(changed))} must be .*use the XLA implementation"):
        traced(name, **changed)


# -- compiled for a GPU, without one --------------------------------------------------------------------------------


def both(arrays, *, limbs):
    """A layer from its projections to its gated output; the cache is the first argument."""
    cache, rest = arrays
    made = place(**rest, **cache, eps=EPS)
    where = {"layer": rest["layer"], "position": rest["position"]}
    split = SPLITS[limbs] if limbs else None
    return made.keys, made.values, attend(made.q, rest["q"], made.keys, made.values, split=split, limbs=limbs, **where)


def compile_both(limbs=0, **sizes):
    given = shapes(**sizes)["place"]
    cache = {name: given.pop(name) for name in ("keys", "values")}
    program = jax.jit(
        lambda cache, rest: both((cache, rest), limbs=limbs),
        donate_argnums=0,
        compiler_options={"xla_gpu_fail_ptx_compilation_on_register_spilling": True},
    )
    return compile_for_h200(program, cache, given), sum(leaf.size * leaf.dtype.itemsize for leaf in cache.values())


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("capacity", "rows", "dtype"), [(1024, 1, jnp.float32), (1024, 8, jnp.bfloat16), (262144, 1, jnp.bfloat16)]
)
def test_the_27b_cache_is_written_in_place_in_three_launches(capacity, rows, dtype):
    """No copy of the cache, and no more beside it than the partial results of all splits."""
    program, held = compile_both(3, A=16, B=rows, S=capacity, N=4, Nq=24, Hd=256, rd=64, dtype=dtype)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == held
    splits = 128 if capacity == 1024 else 64
    assert memory.temp_size_in_bytes <= 1.1 * 4 * rows * 24 * 256 * (splits + 1)
    assert re.findall(r" (fusion|copy|copy-start|custom-call)\(", program.as_text()) == ["custom-call"] * 3


@pytest.mark.deviceless
@pytest.mark.parametrize(("N", "Nq", "Hd", "rd"), [(1, 32, 256, 256), (2, 14, 256, 64), (1, 8, 80, 20), (3, 3, 7, 2)])
def test_every_head_size_compiles_without_spills(N, Nq, Hd, rd):
    for dtype in (jnp.float32, jnp.bfloat16):
        compile_both(N=N, Nq=Nq, Hd=Hd, rd=rd, dtype=dtype)
