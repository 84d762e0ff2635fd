"""`gdn bench chunk` on a CPU and small; its gate, its figures, and the programs that its peers answer from."""

import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import tables
from gdn_jax import cli, ops
from gdn_jax.bench import chunk, chunk_case, gate, jax_peers, operands, peers, timing
from gdn_jax.bench.chunk_case import Form, Sequences
from gdn_jax.bench.dialogue import Program
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Effort, Step, Timing, touch
from tests.support.deviceless import compile_for_h200

GEOMETRY = "64,2,6,32,16,4"
SMALL = Sequences(2, 70, 2, 6, 32, 16)
OF_27B = Sequences(1, 512, 16, 48, 128, 128)

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU answers")


def run(capsys, *arguments):
    status = cli.main(["bench", "chunk", *map(str, arguments)])
    return status, *capsys.readouterr()


# ----------------------------------------------------------------------------------------------------------------------
# The command
# ----------------------------------------------------------------------------------------------------------------------


@on_cpu
def test_every_length_and_peer_has_a_row(capsys, tmp_path, known_ceiling, quiet_machine):
    lines = tmp_path / "rows.jsonl"
    arguments = ("--geometry", GEOMETRY, "--batch", 2, "--tokens", "1,70", "--precision", "bf16", "--peers")
    status, out, _ = run(capsys, *arguments, "--jsonl", lines)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert status == 0
    assert [(row["tokens"], row["implementation"], row["precision"], row["is_peer"]) for row in rows] == [
        *((tokens, "xla", "bf16", False) for tokens in (1, 70)),
        *((tokens, peer, "bf16", True) for tokens in (70, 1) for peer in ("fla", "jla")),
    ]
    assert rows[0]["command"] == " ".join(map(str, ("gdn bench chunk", *arguments)))
    for row in rows[:2]:
        chunks = {1: 1, 70: 2}[row["tokens"]]
        assert row["us_per_chunk"] == pytest.approx(row["us"] / chunks)
        assert row["tflop_per_s"] == pytest.approx(
            2 * row["tokens"] * (6 * (6 * 32 * 16 + 4 * 64 * 16) + 2 * 4 * 64 * 32) / row["us"] / 1e6
        )
        assert 1e-4 < row["max_rel"] <= row["bound"] == 1e-2
        assert 1e-4 < row["rms_rel"] <= row["rms_bound"] == 5e-3
        assert "µs a chunk" in row["note"]
    for row in rows[2:]:
        assert row["us"] is None
        assert row["note"].startswith("not available: it needs an NVIDIA GPU")
    assert "70 tokens, 6 heads 32x16" in out


@pytest.mark.slow
@on_cpu
def test_each_case_comes_once_more_with_its_gradients(capsys, known_ceiling, quiet_machine):
    arguments = ("--geometry", GEOMETRY, "--tokens", 70, "--precision", "exact", "--backward", "--peers")
    status, out, _ = run(capsys, *arguments, "--json")
    rows = json.loads(out)["sections"][0]["rows"]
    assert status == 0
    assert [(row["implementation"], row["backward"]) for row in rows] == [
        *(("xla", backward) for backward in (False, True)),
        *((peer, backward) for backward in (False, True) for peer in ("fla", "jla")),
    ]
    assert rows[0]["command"] == " ".join(map(str, ("gdn bench chunk", *arguments)))
    forward, both = rows[:2]
    assert both["case"] == f"{forward['case']}, forward and backward"
    assert both["nbytes"] == 2 * forward["nbytes"]
    assert both["us"] > 0
    assert both["tflop_per_s"] * both["us"] == pytest.approx(3 * forward["tflop_per_s"] * forward["us"])
    assert 1e-8 < both["rms_rel"] <= both["max_rel"] <= both["bound"] == both["rms_bound"] == 2e-6


@on_cpu
def test_sequences_can_be_computed_in_pieces(capsys, known_ceiling):
    """The record says how many there were, which are no more than chunks; its command, how many were asked for."""
    arguments = ("--geometry", GEOMETRY, "--tokens", "1,130", "--precision", "exact", "--pieces", 99, "--json")
    status, out, _ = run(capsys, *arguments)
    one, several = json.loads(out)["sections"][0]["rows"]
    assert status == 0
    assert (one["case"], one["pieces"]) == ("1 tokens, 6 heads 32x16", 1)
    assert (several["case"], several["pieces"]) == ("130 tokens, 6 heads 32x16, in 3 pieces", 3)
    assert "--pieces 99" in one["command"]


@on_cpu
def test_a_kernel_can_be_asked_for_by_name(capsys, known_ceiling, quiet_machine):
    arguments = ("--geometry", "32,1,1,16,16,4", "--tokens", 3, "--precision", "exact", "--implementation", "interpret")
    status, out, _ = run(capsys, *arguments, "--json")
    [row] = json.loads(out)["sections"][0]["rows"]
    assert status == 0
    assert (row["implementation"], row["tokens"]) == ("interpret", 3)
    assert row["us"] > 0
    assert row["max_rel"] <= row["bound"] == 2e-6


@on_cpu
@pytest.mark.parametrize(("part", "precision"), [("o", "bf16"), ("S", "exact"), ("NaN", "exact")])
def test_what_is_wrong_is_not_timed_and_fails_the_run(capsys, monkeypatch, known_ceiling, part, precision):
    """One output of the last token; one value of S."""
    right = ops.delta_chunks

    def wrong(*inputs, **options):
        o, s = right(*inputs, **options)
        if part == "S":
            return o, s.at[-1, -1, -1, -1].add(jnp.max(jnp.abs(s)) / 8)
        return o.at[-1, -1, -1, -1].add(jnp.nan if part == "NaN" else jnp.max(jnp.abs(o)) / 8), s

    monkeypatch.setattr(ops, "delta_chunks", wrong)
    monkeypatch.setattr(chunk_case, "timed", None)  # timing it would fail
    status, out, _ = run(capsys, "--geometry", GEOMETRY, "--tokens", 65, "--precision", precision)
    assert status == 1
    assert "not timed: wrong result" in out
    assert "gdn bench: FAILED" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chunk", "--precision", "q8"], "--precision must be exact or bf16 for chunk, got q8"),
        (["chunk", "--precision", "fp8"], "--precision must be exact or bf16 for chunk, got fp8"),
        (["chunk", "--geometry", ""], "geometry must be one of qwen3.5-0.8b"),
        (["chunk", "--layers", "2"], "--layers belongs to layer, not to chunk"),
        (["delta", "--backward"], "--backward belongs to chunk, not to delta"),
        (["delta", "--tokens", "64"], "--tokens belongs to chunk, decode, prefill"),
        (["prefill", "--tokens", "64,128"], "--tokens must be one number for prefill, got 64,128; chunk "),
        (["chunk", "--geometry", "27b"], "geometry must be one of qwen3.5-0.8b"),
        (["chunk", "--implementation", "cuda"], "implementation must be None or one of"),
    ],
)
def test_a_request_that_cannot_be_met_is_status_2_with_a_reason(capsys, known_ceiling, arguments, message):
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


@on_cpu
def test_a_named_kernel_that_cannot_do_it_is_refused(capsys, known_ceiling):
    status, out, err = run(capsys, "--implementation", "mosaic", "--precision", "exact")
    assert (status, out) == (2, "")
    assert "implementation='mosaic' cannot carry out delta_chunks" in err
    sizes = ("--geometry", "64,1,1,128,128,4", "--tokens", 130, "--pieces", 2, "--precision", "exact")
    status, out, err = run(capsys, *sizes, "--implementation", "interpret")
    assert (status, out) == (2, "")
    assert (
        "implementation='interpret' cannot carry out delta_chunks: K and V must be at most 128, got K = 128, V" in err
    )


@pytest.mark.parametrize("tokens", ["0", "64,", "64x", "", "99999999999999999999", "3,3"])
def test_lengths_are_integers_with_commas_between(tokens):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "chunk", "--tokens", tokens])
    assert stopped.value.code == 2


@pytest.mark.parametrize("option", ["--tokens=3,03", "--batch=1,1", "--shapes=32x32,32x32", "--precision=exact,exact"])
def test_no_case_is_measured_twice(capsys, option):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "gemv", option])
    assert stopped.value.code == 2
    assert "must name each case once, got" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# Gate and figures
# ----------------------------------------------------------------------------------------------------------------------


def test_the_float64_rule_is_the_oracles():
    given = chunk_case.operands_of(SMALL, "bf16")
    reference = chunk_case.exact(given)
    s, *tokens = (np.asarray(x.astype(jnp.float32)) for x in given)
    o, after = gate.serial_delta(s, *tokens)
    assert reference.o.dtype == reference.s.dtype == np.float64
    np.testing.assert_allclose(np.asarray(reference.o), o, rtol=0, atol=1e-13)
    np.testing.assert_allclose(np.asarray(reference.s), after, rtol=0, atol=1e-13)
    assert reference.strays < 1e-14


WITH_GRADIENTS = SMALL._replace(tokens=150, backward=True)


def test_the_float64_gradients_are_those_of_the_oracles_tokens_backwards():
    """Over two blocks of the one and without any of the other; the oracle's slope vouches for the other."""
    given = chunk_case.operands_of(WITH_GRADIENTS, "bf16")
    found = chunk_case.exact(given).gradients
    s, *tokens, do, ds = (np.asarray(x.astype(jnp.float32), np.float64) for x in given)
    want = gate.serial_delta_gradients(do, ds, s, *tokens)
    assert [x.shape for x in found] == [x.shape for x in want] == [x.shape for x in given[:6]]
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_one_wrong_element_of_any_gradient_is_seen():
    case = Sequences(1, 3, 1, 2, 8, 4, backward=True)
    given = chunk_case.operands_of(case, "exact")
    rule = chunk_case.passes(chunk._rule("exact", "xla"), case)
    programs = chunk_case.compiled(Form(rule=rule, inputs=given), case, Effort.here())
    right, reference = programs.once(*given), chunk_case.exact(given)
    bound = gate.BOUNDS[case.gate, "exact"]
    assert max(chunk_case.errors(programs, reference, "exact")) <= bound
    for i, array in enumerate(right):
        wrong = array.at[(-1,) * array.ndim].add(jnp.max(jnp.abs(array)) / 8)
        spoilt = programs._replace(once=lambda *_, i=i, wrong=wrong: (*right[:i], wrong, *right[i + 1 :]))
        assert chunk_case.errors(spoilt, reference, "exact")[0] > bound
    assert len(right) == 8


@pytest.mark.parametrize("reset", [False, True])
def test_the_gates_gradients_are_slopes(reset):
    rng = np.random.default_rng(0)
    s, do, ds = rng.standard_normal((2, 6, 5, 3)), rng.standard_normal((7, 2, 6, 3)), rng.standard_normal((2, 6, 5, 3))
    q, k = rng.standard_normal((2, 7, 2, 2, 5)) / 2
    point = [s, q, k, rng.standard_normal((7, 2, 6, 3)), rng.uniform(0, 1, (7, 2, 6)), -rng.exponential(1, (7, 2, 6))]
    if reset:
        point[5][3] = -np.inf

    def total(point):
        return sum((weight * x).sum() for weight, x in zip((do, ds), gate.serial_delta(*point), strict=True))

    gradients = gate.serial_delta_gradients(do, ds, *point)
    for i, gradient in enumerate(gradients):
        direction = np.where(np.isfinite(point[i]), rng.standard_normal(point[i].shape), 0)
        ends = [total([*point[:i], point[i] + step * direction, *point[i + 1 :]]) for step in (1e-6, -1e-6)]
        assert np.sum(gradient * direction) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-7)
        assert np.isfinite(gradient).all()
    assert bool(np.any(gradients[5][3])) is not reset


def test_a_reference_that_strays_from_the_oracle_passes_nothing():
    given = chunk_case.operands_of(SMALL, "exact")
    form = Form(rule=chunk._rule("exact", "xla"), inputs=given)
    programs, reference = chunk_case.compiled(form, SMALL, Effort.here()), chunk_case.exact(given)
    assert max(chunk_case.errors(programs, reference, "exact")) <= 2e-6
    assert chunk_case.errors(programs, reference._replace(strays=1e-9), "exact") == (np.inf, np.inf)
    assert chunk_case.errors(programs, reference._replace(strays=np.nan), "exact") == (np.inf, np.inf)


def test_the_gate_takes_the_worst_of_both_arrays_and_of_both_errors():
    rng = np.random.default_rng(0)
    exact = (rng.standard_normal((100, 64)), rng.standard_normal((8, 8)))
    assert gate.chunk_errors(exact, exact, "bf16") == (0, 0)
    one = exact[0].copy()
    one[-1, -1] += 1e-2 * np.abs(exact[0]).max()
    worst, rms = gate.chunk_errors((one, exact[1]), exact, "bf16")
    assert worst == pytest.approx(1e-2)
    assert rms < 1e-3
    everywhere = (exact[0], exact[1] * (1 + 6e-3))
    assert gate.chunk_errors(everywhere, exact, "bf16") == (np.inf, pytest.approx(6e-3))
    one[0, 0] = np.nan
    assert gate.chunk_errors((one, exact[1]), exact, "bf16") == (np.inf, np.inf)
    assert gate.chunk_errors((exact[0], one[:8, :8]), exact, "bf16")[0] == np.inf


def test_operands_are_those_of_a_layer():
    s, q, k, v, beta, g = chunk_case.operands_of(OF_27B._replace(tokens=64), "exact")
    np.testing.assert_allclose(np.linalg.norm(k, axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(q, axis=-1), 128**-0.5, rtol=1e-6)
    assert 0 < beta.min() < beta.max() < 1
    assert g.max() <= 0
    kept = np.exp(np.asarray(g).mean(axis=0))  # a token
    assert kept.min() < 0.01
    assert kept.max() > 0.99
    assert {x.dtype for x in (s, q, k, v, beta, g)} == {jnp.dtype("float32")}
    rounded = chunk_case.operands_of(SMALL, "bf16")
    assert [x.dtype.name for x in rounded] == ["float32", *["bfloat16"] * 3, "float32", "float32"]


def test_bytes_and_operations_of_the_27b_geometry():
    """436.2 MFLOP a chunk: of 48 heads 6·64·128² + 4·64²·128, of 16 4·64²·128. S twice, q and k, v, o, gates."""
    assert chunk_case.flop(OF_27B._replace(tokens=64)) == 436_207_616
    assert chunk_case.flop(OF_27B._replace(tokens=4096, batch=2)) == 128 * 436_207_616
    for precision, width in (("bf16", 2), ("exact", 4)):
        inputs = jax.eval_shape(lambda precision=precision: chunk_case.operands_of(OF_27B, precision))
        form = Form(rule=chunk._rule(precision, "xla"), inputs=inputs)
        expected = 2 * 3_145_728 + 512 * (width * 128 * (2 * 16 + 48) + 4 * 128 * 48 + 2 * 4 * 48)
        assert chunk_case.moved(chunk_case.Programs(form, None, None, None, 1, "xla")) == expected


def test_rates_and_versions_are_in_the_note():
    row = Row(subject="chunk", case="", batch=1, implementation="fla", precision="bf16", nbytes=0)
    found = chunk.with_rates(row, OF_27B)
    none = dict.fromkeys(("us_per_chunk", "tflop_per_s"))
    assert (found.note, found.details) == ("", {"tokens": 512, "backward": False, **none})
    row = Row(
        subject="chunk",
        case="",
        batch=1,
        implementation="fla",
        precision="bf16",
        nbytes=0,
        timing=Timing(32.0, 31.0, 33.0, 34.0, 128, 9),
        details={"rms_rel": 3e-3, "version": "flash-linear-attention 0.6.0"},
    )
    found = chunk.with_rates(row, OF_27B)
    assert found.note == "4 µs a chunk, 109 TFLOP/s, rms 3.0e-03, flash-linear-attention 0.6.0"
    assert found.details["tflop_per_s"] == pytest.approx(8 * 436.207616e6 / 32e-6 / 1e12)


@pytest.mark.parametrize(
    ("tokens", "used", "kernels"), [(512, "mosaic", 833), (16384, "triton", 26), (16384, "xla", 2)]
)
def test_a_program_lasts_some_hundredths_of_a_second(tokens, used, kernels):
    assert chunk_case._kernels(OF_27B._replace(tokens=tokens), used, Effort()) == kernels
    assert 2 <= chunk_case._kernels(OF_27B._replace(tokens=tokens, backward=True), used, Effort()) <= min(kernels, 20)


@pytest.mark.deviceless
def test_the_timed_loop_does_all_of_the_work_in_every_turn():
    """Before it, nothing; in it, what a turn without a loop has."""
    effort = Effort(unroll=1)
    inputs = jax.eval_shape(lambda: chunk_case.operands_of(OF_27B, "bf16"))
    form = Form(rule=chunk._rule("bf16", "xla"), inputs=inputs)
    step = chunk_case.step_of(form)
    loop = compile_for_h200(timing.program(step, 1, 16, effort), inputs[0], inputs[1:])
    once = compile_for_h200(jax.jit(lambda s, rest: step.advance(s, jnp.int32(0), rest)), inputs[0], inputs[1:])
    glue = Step(lambda s, *_: touch(s, s))
    glue = compile_for_h200(timing.program(glue, 1, 16, effort), inputs[0], ())
    before = loop.as_text().partition("\nENTRY ")[2]
    assert " while(" in before
    assert " fusion(" not in before
    assert launches(loop) >= launches(once)
    assert launches(glue) < 5
    assert loop.memory_analysis().alias_size_in_bytes == operands.nbytes(inputs[0])


def launches(compiled):
    return sum(compiled.as_text().count(f" {kind}(") for kind in ("fusion", "custom-call", "dot"))


# ----------------------------------------------------------------------------------------------------------------------
# Peers
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def program():
    """Makes a program whose answer to `case` is what `body` makes of it."""
    made = []

    def make(body, timeout=20.0):
        lines = ("from gdn_jax.bench.dialogue import answer_lines", "import os, sys, time", "def answer(case):", *body)
        made.append(Program(sys.executable, "-c", "\n".join([*lines, "answer_lines(answer)"]), timeout=timeout))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_a_program_stays_for_the_next_case_and_may_print_what_it_likes(program):
    asked = program([" print('compiling')", " return {**case, 'pid': os.getpid()}"])
    asked.start()
    answers = [asked.ask({"tokens": tokens}) for tokens in (64, 128)]
    assert [answer["tokens"] for answer in answers] == [64, 128]
    assert answers[0]["pid"] == answers[1]["pid"]


def test_a_program_that_dies_says_why_and_is_there_for_the_next_case(program):
    body = [
        " if case['tokens'] > 128: sys.exit('killed')",
        " if case['tokens'] > 64: raise MemoryError('full\\nof it')",
    ]
    asked = program([*body, " return case"])
    with pytest.raises(RuntimeError, match="ended with status 1: killed"):
        asked.ask({"tokens": 256})
    with pytest.raises(RuntimeError, match=r"ended with status 1: MemoryError: full$"):
        asked.ask({"tokens": 128})
    assert asked.ask({"tokens": 64}) == {"tokens": 64}


def test_a_program_that_hangs_is_stopped(program):
    asked = program([" time.sleep(60)"], timeout=0.5)
    with pytest.raises(RuntimeError, match=r"no answer within 0\.5 s"):
        asked.ask({})


def test_a_peers_answer_is_its_row(monkeypatch, program):
    times = Timing(100.0, 99.0, 101.0, 102.0, 16, 9)._asdict()
    body = [f" return {{'nbytes': 7, 'max_rel': 4e-3, 'rms_rel': 3e-3, 'version': 'x 1', **{times}}}"]
    asked = program(body)
    made = peers.Peer(
        name="x",
        subject="chunk",
        precision="bf16",
        available=lambda: None,
        measure=functools.partial(peers._program_measure, asked),
        begin=asked.start,
    )
    monkeypatch.setattr(peers, "PEERS", (made,))
    peers.begin("chunk")
    [row] = peers.rows("chunk", SMALL, Effort.here())
    assert (row.case, row.nbytes, row.max_rel, row.timing) == (str(SMALL), 7, 4e-3, Timing(**times))
    assert row.details == {"rms_rel": 3e-3, "version": "x 1"}


@pytest.mark.parametrize("backward", [False, True])
def test_jax_linear_attention_is_given_what_it_takes(monkeypatch, quiet_machine, backward):
    """A library of that name and signature, which our own rule carries out."""

    def linear_attention(kind, q, k, v, *, impl, scale, g, beta, initial_state, output_final_state):
        assert (kind, impl, scale, output_final_state) == ("gated_deltanet", "mosaic_gpu", 1.0, True)
        q, k, v, beta, g = (jnp.moveaxis(x, 1, 0) for x in (q, k, v, beta, g))
        o, s = chunk._rule("bf16", "xla")(initial_state, q, k, v, beta, g)
        return jnp.moveaxis(o, 0, 1).astype(jnp.bfloat16), s

    jla, of_it = types.ModuleType("jla"), types.ModuleType("jla.ops")
    monkeypatch.setattr(jla, "__version__", "0.1.0", raising=False)
    monkeypatch.setattr(of_it, "linear_attention", linear_attention, raising=False)
    monkeypatch.setitem(sys.modules, "jla", jla)
    monkeypatch.setitem(sys.modules, "jla.ops", of_it)
    case = SMALL._replace(backward=backward)
    answer = jax_peers._jla_chunk({**case._asdict(), "seconds": 0.0, "warm": 0.0, "rotate": 0})
    assert answer["version"] == "jax-linear-attention 0.1.0"
    assert 1e-3 < answer["rms_rel"] < answer["max_rel"] <= 1e-2
    assert answer["us"] > 0
    tokens = 2 * 70 * (2 * (2 * 2 * 32 + 2 * 6 * 16) + 2 * 4 * 6)  # o is bfloat16, too
    assert answer["nbytes"] == (1 + backward) * (2 * 4 * 2 * 6 * 32 * 16 + tokens)


# ----------------------------------------------------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------------------------------------------------


def test_the_table_has_kernel_xla_and_peers_side_by_side(monkeypatch):
    def line(implementation, precision, us, **more):
        usual = {"tokens": 4096, "batch": 1, "nbytes": 142_000_000, "ceiling_gb_per_s": 4550.0}
        quality = {"max_rel": 5e-3, "rms_rel": 3e-3, "us_per_chunk": us and us / 64, "tflop_per_s": us and 27917 / us}
        named = {"implementation": implementation, "precision": precision, "us": us}
        return {**usual, **quality, **named, **more}

    lines = [line("mosaic", "bf16", 164.5), line("xla", "bf16", 4000.0), line("xla", "exact", 5000.0)]
    lines += [line("fla", "bf16", None), line("jla", "bf16", 200.0)]
    lines += [line("mosaic", "bf16", 900.0, backward=True), line("fla", "bf16", 700.0, backward=True)]
    monkeypatch.setattr(tables, "recorded", lambda subject: lines)
    head, rounded, exact, both = tables.chunk()
    assert rounded == (
        *("4,096", "1", "bf16", "164.5", "2.57", "170", "31.2", "5.0e-03", "3.0e-03", "4,000.0", "", "200.0"),
    )
    assert exact == ("4,096", "1", "exact", "", "", "", "", "", "", "5,000.0", "", "")
    assert both[2:5] == ("bf16, and backward", "900.0", "14.06")
    assert both[-3:] == ("", "700.0", "")
    assert len(head) == len(rounded) == len(exact) == len(both)
