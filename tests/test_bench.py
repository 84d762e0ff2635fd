"""`gdn bench` as a user calls it, on a CPU and small; and the pieces that its figures rest on."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import cli, ops
from gdn_jax.bench import (
    ceiling,
    delta,
    gate,
    gemm,
    gemv,
    layer,
    naming,
    operands,
    peers,
    provenance,
    roofline,
    session,
    timing,
)
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row, record
from gdn_jax.bench.timing import Effort, Step, Timing
from tests.support.deviceless import compile_for_h200

ROOT = pathlib.Path(__file__).parent.parent
PUBLISHED = ROOT / "experiments/published_design/published_design.cu"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One small form of the ceiling's kernels."""
    monkeypatch.setattr(ceiling, "_TINY_FORMS", (ceiling.Form(1024, 1, 1, None),))


on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU answers")


def run(capsys, *arguments):
    status = cli.main(["bench", *map(str, arguments)])
    return status, *capsys.readouterr()


# ----------------------------------------------------------------------------------------------------------------------
# The command
# ----------------------------------------------------------------------------------------------------------------------


@on_cpu
def test_gemv_with_everything(capsys, tmp_path, monkeypatch, known_ceiling):
    monkeypatch.setenv("GDN_COMMIT", "abc1234")
    lines, plot = tmp_path / "rows.jsonl", tmp_path / "roof.png"
    arguments = ("gemv", "--shapes", "37x64", "--precision", "exact,q8", "--peers", "--jsonl", lines, "--plot", plot)
    status, out, err = run(capsys, *arguments)

    assert status == 0
    assert out.startswith("[PASS] gemv on ")
    assert out.rstrip().endswith(f"gdn bench: passed ({session.CPU_NOTE})")
    assert "not available: it needs an NVIDIA GPU" in out
    assert session.CPU_NOTE in err
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    named = [(row["case"], row["implementation"], row["precision"], row["is_peer"]) for row in rows]
    assert named == [
        ("37x64 product", "xla", "exact", False),
        ("37x64 product", "xla", "q8", False),
        ("37x64", "xla int4", "bf16", True),
        ("37x64", "torch int4", "bf16", True),
        ("37x64", "published", "f32", True),
    ]
    for row in rows:
        assert row["commit"] == "abc1234"
        assert row["command"] == "gdn bench gemv --shapes 37x64 --precision exact,q8 --peers"
        assert row["versions"]["jax"] == jax.__version__
        assert (row["backend"], row["device"]) == ("cpu", jax.devices()[0].device_kind)
        assert session.CPU_NOTE in row["note"]
    exact, q8, xla = rows[:3]
    assert exact["nbytes"] == 37 * 64 * 9 // 16 + 4 * (37 + 64)
    assert 0 < exact["max_rel"] <= exact["bound"] < q8["max_rel"] <= q8["bound"]
    assert 1e-5 < xla["max_rel"] <= xla["bound"]
    for row in rows[:3]:
        assert row["us_p10"] <= row["us"] <= row["us_p90"]
        assert row["us_with_glue"] > 0
        assert row["kernels"] >= 2
        assert row["rounds"] >= 3
        assert row["ceiling_gb_per_s"] == 1.0
    assert {row["us"] for row in rows[3:]} == {None}
    assert plot.read_bytes().startswith(b"\x89PNG")


@on_cpu
def test_gemm(capsys, tmp_path, known_ceiling, quiet_machine):
    lines = tmp_path / "rows.jsonl"
    status, out, _ = run(capsys, "gemm", "--shapes", "37x64", "--batch", 5, "--peers", "--jsonl", lines)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert status == 0
    assert "TFLOP/s" in out
    named = [(row["implementation"], row["precision"], row["is_peer"]) for row in rows]
    ours = [("xla", "bf16", False), ("xla", "exact", False)]
    assert named == [*ours, ("xla int4", "bf16", True), ("xla dense", "bf16", True)]
    q4, beside = 37 * 64 * 9 // 16, 4 * 5 * (37 + 64)
    assert [row["nbytes"] - beside for row in rows] == [q4, q4, q4, 2 * 37 * 64]
    for row in rows:
        assert 1e-5 < row["max_rel"] <= row["bound"] or row["precision"] == "exact"
        assert row["tflop_per_s"] == pytest.approx(2 * 37 * 64 * 5 / row["us"] / 1e6)
        assert row["weights_gb_per_s"] == pytest.approx(q4 / row["us"] / 1e3)
        assert row["fraction_of_bf16"] is None  # of a CPU nobody has said what it should be
    assert rows[1]["max_rel"] < 1e-6


@on_cpu
@pytest.mark.parametrize("precision", ["bf16", "exact"])
def test_many_rows_that_are_wrong_are_not_timed(capsys, monkeypatch, known_ceiling, precision):
    """One output of the last of the rows, of the last layer."""
    right = ops.project_rows

    def wrong(matrices, x, *, layer, **options):
        [y] = right(matrices, x, layer=layer, **options)
        return (y.at[-1, -1].add(jnp.where(layer == 1, jnp.max(jnp.abs(y)), jnp.float32(0)) / 8),)

    monkeypatch.setattr(ops, "project_rows", wrong)
    monkeypatch.setattr(timing, "program", None)  # timing it would fail
    status, out, _ = run(capsys, "gemm", "--shapes", "48x96", "--batch", 7, "--precision", precision)
    assert status == 1
    assert "not timed: wrong result" in out


def test_rates_of_many_rows(monkeypatch):
    """A product of 2 · 512 · 34816 · 5120 FLOP in 400 µs on a card whose units could do it in 184.6."""
    device = type("Device", (), {"device_kind": "NVIDIA H200"})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    row = Row(subject="gemm", case="", batch=512, implementation="mosaic", precision="bf16", nbytes=0)
    timed = dataclasses.replace(row, timing=Timing(400.0, 399.0, 401.0, 402.0, 128, 9))
    case = peers.Product(34816, 5120, 512)
    found = gemm.with_rates(timed, case)
    assert found.details["tflop_per_s"] == pytest.approx(456.34, rel=1e-4)
    assert found.details["fraction_of_bf16"] == pytest.approx(184.57 / 400, rel=1e-4)
    assert found.details["weights_gb_per_s"] == pytest.approx(34816 * 5120 * 0.5625 / 400e3)
    assert found.note == "456 TFLOP/s, 46% of dense bfloat16"
    untimed = gemm.with_rates(dataclasses.replace(row, note="not timed: wrong result"), case)
    assert untimed.note == "not timed: wrong result"
    assert untimed.details == dict.fromkeys(found.details)


def test_a_program_of_long_kernels_has_few_of_them():
    for batch, kernels in ((16, 344), (2048, 16)):
        assert gemm._kernels(peers.Product(34816, 5120, batch), 102_000_000, Effort()) == kernels


@on_cpu
def test_ceiling_as_json(capsys, tmp_path):
    plot = tmp_path / "roof.svg"
    status, out, _ = run(capsys, "ceiling", "--json", "--plot", plot, "--seconds", 0.01)
    report = json.loads(out)
    rows = report["sections"][0]["rows"]
    assert status == 0
    assert report["passed"] is True
    assert report["environment"]["command"] == "gdn bench ceiling --seconds 0.01"
    assert [row["case"] for row in rows] == ["read 1x1024 w1 p-", "read", "copy 1x1024 w1 p-"]
    assert [row["nbytes"] for row in rows] == [4 * 4096, 4 * 4096, 2 * 4 * 4096]
    assert {row["max_rel"] for row in rows} == {0.0}
    best = max(row["gb_per_s"] for row in rows[:2] if row["gb_per_s"])
    assert {row["ceiling_gb_per_s"] for row in rows} == {best}
    assert "<svg" in plot.read_text()


@on_cpu
def test_delta(capsys, known_ceiling):
    status, out, err = run(capsys, "delta", "--geometry", "64,2,6,32,16,4", "--batch", 3, "--peers")
    assert status == 0
    assert "6 heads 32x16" in out
    assert "fla" in out
    assert "batch 3, xla f32" in err


@pytest.mark.slow
@on_cpu
def test_layer(capsys, known_ceiling):
    status, out, err = run(capsys, "layer", "--geometry", "64,2,6,32,32,4", "--layers", 2, "--peers", "--json")
    rows = {row["case"].split()[1]: row for row in json.loads(out)["sections"][0]["rows"]}
    assert status == 0
    assert list(rows) == ["layer", "limbs", "in-projection", "delta", "out"]
    assert 0 < rows["layer"]["max_rel"] <= rows["layer"]["bound"]
    assert 0 < rows["layer"]["state_max_rel"] < 1e-6
    assert all(row["us"] is not None for row in rows.values())
    assert "there are no peers for layer" in err


@on_cpu
def test_a_wrong_result_is_not_timed_and_fails_the_run(capsys, monkeypatch, tmp_path, known_ceiling):
    right = ops.project_many

    def wrong(matrices, x, **options):
        return tuple(y.at[:, -1].multiply(jnp.float32(1.001)) for y in right(matrices, x, **options))

    monkeypatch.setattr(ops, "project_many", wrong)
    monkeypatch.setattr(timing, "program", None)  # timing it would fail
    lines = tmp_path / "rows.jsonl"
    status, out, _ = run(capsys, "gemv", "--shapes", "48x96", "--jsonl", lines)
    [row] = [json.loads(line) for line in lines.read_text().splitlines()]
    assert status == 1
    assert "[FAIL]" in out
    assert "gdn bench: FAILED" in out
    assert row["note"].startswith("not timed: wrong result")
    assert row["us"] is None
    assert row["passed"] is False


@on_cpu
def test_a_peer_that_fails_is_a_line_and_not_the_end(capsys, monkeypatch):
    def broken(case, effort):
        raise RuntimeError("no such kernel\nand more")

    def wrong(case, effort):
        return peers.Outcome(nbytes=100, max_rel=0.5, timing=Timing(1.0, 1.0, 1.0, 1.0, 100, 9))

    made = [
        peers.Peer(name=name, subject="gemv", precision="bf16", available=lambda: None, measure=measure)
        for name, measure in (("broken", broken), ("wrong", wrong))
    ]
    monkeypatch.setattr(peers, "PEERS", tuple(made))
    rows = list(peers.rows("gemv", peers.Product(48, 96, 1), Effort.here()))
    assert [row.note for row in rows] == ["failed: RuntimeError: no such kernel", "not timed: wrong result"]
    assert [row.timing for row in rows] == [None, None]
    assert [row.passed for row in rows] == [True, False]
    assert list(peers.rows("delta", peers.Heads(1, 1, 1, 1, 1), Effort.here())) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ceiling", "--shapes", "32x32"], "--shapes belongs to gemv, gemm, not to ceiling"),
        (["gemm", "--precision", "bf16,q8"], "--precision must be exact or bf16 for gemm, got bf16,q8"),
        (["gemv", "--precision", "bf16"], "--precision must be exact or q8 for gemv, got bf16"),
        (["gemv", "--precision", "f32"], "--precision must be exact or q8 for gemv, got f32"),
        (["gemv", "--geometry", "27b"], "--geometry belongs to delta, chunk, layer, decode, prefill, speculation, not"),
        (["delta", "--layers", "2"], "--layers belongs to layer"),
        (["delta", "--precision", "q8"], "--precision belongs to gemv, gemm, chunk, layer"),
        (["ceiling", "--batch", "1"], "--batch belongs to"),
        (["gemv", "--plot", "/nonexistent/roof.png"], "--plot must name a file in an existing folder"),
        (["gemv", "--jsonl", "."], "--jsonl must name a file in an existing folder"),
        (["gemv", "--plot", "roof.pdf"], "--plot must end in .png or .svg, got 'roof.pdf'"),
        (["layer", "--geometry", "27b"], "geometry must be one of qwen3.5-0.8b"),
        (["layer", "--geometry", "40,2,6,12,20,4"], "divide by 32"),
        (["gemv", "--shapes", "32x32", "--implementation", "cuda"], "implementation must be None or one of"),
    ],
)
def test_a_request_that_cannot_be_met_is_status_2_with_a_reason(capsys, known_ceiling, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("gdn bench: ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["product"],
        ["gemv", "--shapes", "5120"],
        ["gemv", "--shapes", "16x33"],
        ["gemv", "--shapes", "0x32"],
        ["gemv", "--batch", "1,,2"],
        ["gemv", "--batch", "0"],
        ["gemv", "--precision", "q8,q8"],
        ["gemv", "--seconds", "nan"],
        ["gemv", "--seconds", "-1"],
    ],
)
def test_a_malformed_command_line_is_status_2(arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments])
    assert stopped.value.code == 2


def test_the_command_line_is_parsed_without_jax():
    program = (
        "import sys\nfrom gdn_jax import cli\ntry:\n cli.main(['bench', '--help'])\n"
        "except SystemExit:\n print('jax' in sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "usage: gdn bench" in ran.stdout
    assert ran.stderr.strip() == "False"


# ----------------------------------------------------------------------------------------------------------------------
# The harness
# ----------------------------------------------------------------------------------------------------------------------


def test_a_program_runs_its_kernels_on_the_layers_in_turn():
    def advance(carry, layer, operands):
        seen, turn = carry
        return seen.at[turn].set(operands[layer]), turn + 1

    effort = Effort(unroll=2)
    run = timing.program(Step(advance), 3, 8, effort)
    seen, turns = run((jnp.zeros(8, jnp.int32), jnp.int32(0)), jnp.array([10, 20, 30], jnp.int32))
    assert int(turns) == 8
    np.testing.assert_array_equal(seen, [10, 20, 30, 10, 20, 30, 10, 20])


def test_every_step_is_sampled_in_every_round():
    effort = Effort(kernels=2, unroll=1, warm=0.0, seconds=0.0, rounds=4, rotate=0)
    steps = {name: Step(lambda x, layer, y: x + y, jnp.ones(3)) for name in ("a", "b")}
    samples = timing.measure(steps, jnp.zeros(3), layers=2, kernels=2, effort=effort)
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 4, "b": 4}
    assert all(taken.min() > 0 for taken in samples.values())


def test_the_glue_is_taken_off_round_by_round():
    seconds, glue = np.array([10.0, 12.0, 11.0]) * 1e-6, np.array([2.0, 4.0, 2.0]) * 1e-6
    found = Timing.between(seconds, glue, 128)
    assert found == pytest.approx(Timing(8.0, 8.0, 8.8, 11.0, 128, 3))


@pytest.mark.parametrize(("nbytes", "kernels"), [(2**30, 128), (47_185_920, 968), (1000, 4000)])
def test_a_program_lasts_some_hundredths_of_a_second(nbytes, kernels):
    assert timing.kernels_for(nbytes, Effort()) == kernels


def test_operands_rotate_beyond_every_cache():
    assert [timing.layers_for(n, Effort()) for n in (17_694_720, 400_000_000, 2**30)] == [29, 2, 2]


def test_a_touch_depends_on_the_result_and_changes_nothing():
    x = operands.activations(0, (2, 64))
    np.testing.assert_array_equal(timing.touch(x, jnp.full((2, 3), 1e6)), x)
    assert np.isnan(timing.touch(x, jnp.full((2, 3), jnp.nan))).all()


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["gemv", "delta"])
def test_the_timed_loop_holds_nothing_but_launches(name):
    """Compiled for a card: the launches and the glue that is taken off, the carry in place, no copies."""
    cfg, effort = gdn.GEOMETRIES["qwen3.5-27b"].cfg, Effort()
    request = a_request(cfg=cfg, layers=4, implementation="triton", effort=effort)
    if name == "gemv":
        carry = jax.ShapeDtypeStruct((1, 5120), jnp.float32)
        w = jax.eval_shape(lambda: operands.q4_stack(0, 4, 10240, 5120))
        step = gemv.product_step(w, gemv.product_of("exact", "triton"))
    else:
        inputs = jax.eval_shape(lambda: operands.delta_inputs(0, cfg, 1))
        carry = (jax.ShapeDtypeStruct((4, 1, 48, 128, 128), jnp.float32), inputs[2])
        step = delta.delta_step_of(inputs, request)
    x = carry if name == "gemv" else carry[1]
    glue = compile_for_h200(timing.program(Step(lambda x, *_: timing.touch(x, x)), 4, 128, effort), x, ())
    compiled = compile_for_h200(timing.program(step, 4, 128, effort), carry, step.operands)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes == operands.nbytes(carry)
    assert memory.temp_size_in_bytes < 2**18
    assert text.count(" custom-call(") == effort.unroll * (2 if name == "gemv" else 1)  # a product has x split first
    assert text.count(" fusion(") == glue.as_text().count(" fusion(")
    assert copies(text) == []


def copies(text):
    """The lines of a program that copy an array."""
    return [line for line in text.splitlines() if " copy(" in line and "s32[] copy(" not in line]


@pytest.mark.deviceless
@pytest.mark.parametrize(("precision", "pieces"), [("bf16", 1), ("exact", 3)])
def test_the_timed_loop_over_many_rows_makes_pieces_and_products(precision, pieces):
    effort, x = Effort(), jax.ShapeDtypeStruct((512, 5120), jnp.float32)
    w = jax.eval_shape(lambda: operands.q4_stack(0, 4, 10240, 5120))
    glue = compile_for_h200(timing.program(Step(lambda x, *_: timing.touch(x, x)), 4, 16, effort), x, ())
    step = gemv.product_step(w, gemm.product_of(precision, "mosaic"))
    compiled = compile_for_h200(timing.program(step, 4, 16, effort), x, step.operands)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes == 4 * 512 * 5120
    assert memory.temp_size_in_bytes < 2 * pieces * 512 * 5120 + 4 * 512 * 10240 + 2**18
    assert text.count(" custom-call(") == effort.unroll
    assert text.count(" fusion(") == glue.as_text().count(" fusion(") + effort.unroll  # x is split in one
    assert copies(text) == []


# ----------------------------------------------------------------------------------------------------------------------
# Gates, bytes, records
# ----------------------------------------------------------------------------------------------------------------------


def a_request(**given):
    usual = {
        "batches": (1,),
        "shapes": ((48, 96),),
        "geometry": "small",
        "cfg": gdn.GdnConfig(hidden=64, key_heads=2, value_heads=6, key_dim=32, value_dim=32, conv_width=4),
        "layers": 2,
        "precisions": ("exact",),
        "implementation": None,
        "peers": False,
        "effort": Effort.here(),
    }
    return Request(**{**usual, **given})


@pytest.mark.parametrize("size", [1, 2, 37, 128, 248320])
def test_a_sample_has_both_ends_and_stays_inside(size):
    rows = gate.sample(size)
    assert rows[0] == 0
    assert rows[-1] == size - 1
    assert len(rows) == min(size, len(rows)) <= 128
    assert (np.diff(rows) > 0).all()


def test_the_gate_of_a_product_sees_one_wrong_row_and_a_nan():
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((5, 64)), rng.standard_normal((3, 64)).astype(np.float32)
    y = x.astype(np.float64) @ w.T
    assert gate.product_error(y, w, x) == 0
    y[2, 4] += 1e-3 * np.abs(y[2]).max()
    assert gate.product_error(y, w, x) == pytest.approx(1e-3, rel=1e-2)
    y[0, 0] = np.nan
    assert gate.product_error(y, w, x) == np.inf


def test_the_gate_of_the_delta_rule_sees_a_touched_neighbour(monkeypatch):
    request = a_request()
    state = operands.layer_state(0, request.cfg, 3, 2).S
    inputs = operands.delta_inputs(1, request.cfg, 2)
    assert delta.delta_error(state, inputs, request) <= gate.BOUNDS["delta", "f32"]
    right = ops.delta_step

    def stray(state, layer, *inputs, **options):
        o, after = right(state, layer, *inputs, **options)
        return o, after.at[0, 0, 0, 0, 0].multiply(jnp.float32(-1))

    monkeypatch.setattr(ops, "delta_step", stray)
    assert delta.delta_error(state, inputs, request) == np.inf


@pytest.mark.parametrize("launches", [layer._launches, layer._operations])
def test_the_parts_of_a_layer_can_be_launched_alone(launches):
    """Traced, not run: every part takes the carry and gives it back, and calls the kernels that the layer calls."""
    request = a_request(implementation="interpret")
    stack = operands.layer_stack(1, request.cfg, request.layers)
    carry = layer.Carry(
        x=operands.activations(3, (1, request.cfg.hidden)),
        inner=operands.activations(4, (1, request.cfg.value_channels)),
        scales=jnp.ones((1, request.cfg.value_channels // 32)),
        state=operands.layer_state(2, request.cfg, request.layers, 1),
    )
    assert layer._takes_four_launches(stack, 1, "exact", request)
    parts = launches(stack, carry, "exact", request, "interpret")
    assert list(parts) == ["limbs", "in-projection", "delta", "out"]
    for part in parts.values():
        after = jax.eval_shape(part.step.advance, carry, jnp.int32(0), part.step.operands)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, carry)
        assert naming.implementation_of(part.step, carry) == "interpret"
        assert part.nbytes > 0


def test_bytes_of_the_27b_layer_are_those_of_its_floor():
    """64.88 MB of 4-bit weights, 1.97 of b and a, 6.29 of S and 0.49 of history moved both ways, convolution and x."""
    geometry = gdn.GEOMETRIES["qwen3.5-27b"]
    request = a_request(cfg=geometry.cfg, layers=geometry.layers)
    stack = jax.eval_shape(lambda: operands.layer_stack(1, geometry.cfg, geometry.layers))
    state = jax.eval_shape(lambda: operands.layer_state(2, geometry.cfg, geometry.layers, 1))
    x = jax.ShapeDtypeStruct((1, geometry.cfg.hidden), jnp.float32)
    carry = layer.Carry(x=x, inner=None, scales=None, state=state)
    assert layer._whole(stack, carry, "exact", request).nbytes == pytest.approx(73.55e6, rel=1e-3)
    assert delta.moved(geometry.cfg, 1) == pytest.approx(6.36e6, rel=1e-3)


def test_random_operands_are_worth_timing():
    """Outputs of the size of the inputs, and a heavy tail: zeros and infinities run faster, and hide what is wrong."""
    x = np.asarray(operands.activations(0, (4, 5120)))
    assert 10 < np.abs(x).max() / x.std() < 200
    codes, scales = operands.q4_stack(1, 2, 48, 5120).to_logical()
    for index in range(2):
        y = x @ gate.unpacked(codes[index], scales[index]).T
        assert 0.5 < y.std() / x.std() < 2


def test_a_record_is_flat_and_complete():
    row = Row(
        subject="gemv",
        case="16384x5120 kernel",
        batch=1,
        implementation="triton",
        precision="exact",
        nbytes=47_000_000,
        max_rel=1e-7,
        bound=1e-6,
        timing=Timing(20.0, 19.0, 21.0, 23.0, 128, 9),
        details={"layers": 11},
    )
    line = record(row, 4.7e12)
    assert (line["gb_per_s"], line["fraction"], line["layers"]) == (pytest.approx(2350), pytest.approx(0.5), 11)
    assert record(row, None)["fraction"] is None
    untimed = record(dataclasses.replace(row, timing=None), 4.7e12)
    assert untimed.keys() == line.keys()
    assert (untimed["us"], untimed["gb_per_s"], untimed["fraction"]) == (None, None, None)
    assert not dataclasses.replace(row, max_rel=float("nan")).passed


def test_a_plot_of_nothing_is_a_plot(tmp_path):
    assert roofline.plot([], None, tmp_path / "empty.svg", "nothing") == 0
    assert "<svg" in (tmp_path / "empty.svg").read_text()


def test_the_commit_is_that_of_this_tree(monkeypatch):
    monkeypatch.delenv("GDN_COMMIT", raising=False)
    command = ["git", "rev-parse", "--short", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (provenance.commit() or "").removesuffix("-dirty") == head.stdout.strip()


# ----------------------------------------------------------------------------------------------------------------------
# Peers in other processes
# ----------------------------------------------------------------------------------------------------------------------


def answering(text, status=0):
    return [sys.executable, "-c", f"import sys; print('noise'); print({text!r}); sys.exit({status})"]


def test_a_process_answers_in_json():
    times = {"us": 2.0, "us_p10": 1.0, "us_p90": 3.0, "us_with_glue": 2.0, "kernels": 128, "rounds": 9}
    found = peers._process(answering(json.dumps({"nbytes": 7, "max_rel": 1e-3, "torch": "2", **times})))
    assert found == peers.Outcome(7, 1e-3, Timing(2.0, 1.0, 3.0, 2.0, 128, 9), "", {"torch": "2"})
    wrong = peers._process(answering('{"nbytes": 7, "max_rel": Infinity, "layers": 3}'))
    assert wrong == peers.Outcome(7, float("inf"), None, "", {"layers": 3})


def test_a_process_that_fails_says_why():
    assert peers._process(answering("out of memory", 3)).note == "failed with status 3: out of memory"


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_the_published_design_compiles_and_refuses_what_it_cannot_do(tmp_path):
    program = tmp_path / "published_design"
    command = ["nvcc", "-O1", "-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra"]
    subprocess.run([*command, "-o", str(program), str(PUBLISHED)], check=True, capture_output=True, text=True)
    for option, message in (
        ("--columns=33", "columns a multiple of 32"),
        ("--rows=none", "rows must be a number, got none"),
        ("--depth=1", "unknown option --depth"),
        ("rows=4", "expected --NAME=VALUE, got rows=4"),
    ):
        ran = subprocess.run([str(program), option], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert message in ran.stderr
