"""`gdn bench decode` and `prefill` as a user calls them, on a CPU and small; the gate and the bytes behind them."""

import dataclasses
import inspect
import json
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import gdn_jax as gdn
from gdn_jax import cli, memory
from gdn_jax.bench import decode, gate, models, naming, operands, prefill, timing
from gdn_jax.bench.compile_cache import CacheWatch
from gdn_jax.bench.request import Request
from gdn_jax.bench.timing import Effort, Step
from gdn_jax.decoder.config import DECODERS
from gdn_jax.decoder.decoder import Decoder
from gdn_jax.decoder.model import prefill_tokens
from gdn_jax.decoder.state import decoder_state_shapes
from gdn_jax.decoder.weights import abstract_decoder, check_decoder_weights
from tests.support import decoders
from tests.support.deviceless import compile_for_h200

pytestmark = pytest.mark.usefixtures("known_ceiling")
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU answers")

GDN = gdn.GdnConfig(hidden=64, key_heads=2, value_heads=6, key_dim=32, value_dim=32, conv_width=4)


@pytest.fixture
def green(monkeypatch):
    """A gate that lets everything through, and compiles nothing."""
    monkeypatch.setattr(models, "judged", lambda *_: models.Verdict(1e-7, 1e-5, "xla"))


def run(capsys, *arguments):
    status = cli.main(["bench", *map(str, arguments)])
    return status, *capsys.readouterr()


def a_request(cfg=None, **given):
    cfg = models.hybrid(GDN) if cfg is None else cfg
    usual = {"batches": (1,), "shapes": (), "geometry": "small", "cfg": cfg.gdn, "layers": 1, "precisions": ("exact",)}
    usual |= {"implementation": None, "peers": False, "effort": Effort.here(), "decoder": cfg}
    return Request(**{**usual, "context": 8, "tokens": 4, **given})


# ----------------------------------------------------------------------------------------------------------------------
# The commands
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_cache():
    """No folder for compiled programs, whatever the surroundings say; afterwards what was there before."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    compilation_cache.reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)


@on_cpu
def test_decode_with_its_parts(capsys, monkeypatch, tmp_path, green, no_cache):
    monkeypatch.setattr(models, "hybrid", lambda _: a_small_attention_model())

    def measure(steps, carry, *, layers, kernels, effort):
        return {"glue": np.full(3, 1e-6), "part": np.full(3, 3e-6)}

    class Quick(Decoder):
        """The real one, but for the programs that it would compile."""

        def generate(self, *prompts, **options):
            request = inspect.signature(Decoder.generate).bind(self, *prompts, **options).arguments
            assert (request["max_new_tokens"], request["ignore_eos"]) == (5, True)
            return types.SimpleNamespace(timings=types.SimpleNamespace(decode_seconds=8e-3, compile_seconds=9.0))

    monkeypatch.setattr(decode, "measure", measure)
    monkeypatch.setattr(decode, "Decoder", Quick)
    lines = tmp_path / "rows.jsonl"
    status, out, _ = run(capsys, "decode", "--geometry", "64,2,6,32,32,4", "--context", 20, "--jsonl", lines)
    rows = {row["case"].split()[1]: row for row in map(json.loads, lines.read_text().splitlines())}
    assert status == 0
    assert "gdn bench: passed" in out
    assert list(rows) == ["step", "generate", "gdn", "attention", "mlp", "head", "rest"]
    step = rows["step"]
    assert step["command"] == "gdn bench decode --geometry 64,2,6,32,32,4 --context 20"
    assert step["tok_per_s"] == pytest.approx(1e6 / step["us"])
    assert step["ms_per_step"] == step["ms_per_token"] == pytest.approx(step["us"] / 1e3)
    assert step["compile_seconds"] > 0
    assert step["compile_cache"] == rows["generate"]["compile_cache"] == "none"
    assert f"compiled in {step['compile_seconds']:.1f} s" in step["note"]
    assert step["max_rel"] <= step["bound"]
    assert (step["tier"], step["context"], step["kv_dtype"], step["tokens"]) == ("q4", 20, "float32", 4)
    assert step["fraction"] == pytest.approx(step["nbytes"] / step["us"] / 1e3)
    assert step["temp_bytes"] > 0
    assert rows["generate"]["tok_per_s"] == pytest.approx(500)
    assert rows["generate"]["compile_seconds"] == 9
    assert {name: row["layers"] for name, row in rows.items() if "layers" in row} == {
        "gdn": 1, "attention": 1, "mlp": 2, "head": 1, "rest": 1
    }  # fmt: skip
    assert rows["gdn"]["us"] == pytest.approx(2.0)
    parts = [row for name, row in rows.items() if name not in ("step", "generate")]
    assert sum(row["ms_per_step"] for row in parts) == pytest.approx(step["ms_per_step"])
    assert sum(row["share"] for row in parts) == pytest.approx(1)
    assert sum(row["layers"] * row["nbytes"] for row in parts) == step["nbytes"]


@pytest.mark.slow
@on_cpu
def test_prefill_behind_its_gate(capsys, monkeypatch):
    monkeypatch.setattr(models, "hybrid", lambda _: a_small_attention_model())
    status, out, _ = run(capsys, "prefill", "--tier", "bf16", "--batch", 2, "--kv", "bfloat16", "--json")
    [row] = json.loads(out)["sections"][0]["rows"]
    assert status == 0
    assert row["case"] == "64,2,6,32,32,4 4 tokens"
    assert row["max_rel"] == 0  # plain XLA is what there is here, and what the gate compares with
    assert 0 < row["temp_bytes"] < row["budget_workspace_bytes"]
    assert row["gate_implementation"] == row["implementation"] == "xla"
    assert row["tok_per_s"] == pytest.approx(2 * 4 / row["first_token_seconds"])
    assert row["first_token_seconds"] == pytest.approx(row["us"] / 1e6)
    assert row["budget_bytes"] > row["nbytes"] / 2


@on_cpu
def test_what_is_wrong_is_not_timed_and_fails_the_run(capsys, monkeypatch):
    monkeypatch.setattr(models, "judged", lambda *_: models.Verdict(2e-5, 1e-5, "xla"))
    monkeypatch.setattr(models, "compiled", None)  # timing it would fail
    for subject in ("decode", "prefill"):
        status, out, _ = run(capsys, subject)
        assert status == 1
        assert "not timed: wrong result" in out
        assert "gdn bench: FAILED" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--context", 5, "--tokens", 4], "--context must be at least 6 for --tokens 4, got 5"),
        (["prefill", "--context", 3, "--tokens", 4], "--context must be at least the --tokens of the prompt, 4; got 3"),
        (["decode", "--tier", "f32", "--precision", "q8"], "precision must be one of exact for weights of tier 'f32'"),
        (["decode", "--precision", "bf16"], "--precision must be exact or q8 for decode, got bf16"),
        (["prefill", "--tier", "f32", "--precision", "q8"], "precision must be one of exact, bf16 for weights of tier"),
        (["decode", "--geometry", "27b"], "geometry must be one of qwen3.5-0.8b"),
        (["decode", "--geometry", "40,2,6,12,20,4"], "divide by 32"),
        (["layer", "--tier", "q4"], "--tier belongs to decode, prefill, speculation, not to layer"),
        (["prefill", "--no-parts"], "--no-parts belongs to decode, not to prefill"),
        (["gemv", "--kv", "bfloat16"], "--kv belongs to decode, prefill, speculation, not to gemv"),
        (["decode", "--layers", 2], "--layers belongs to layer, not to decode"),
    ],
)
def test_a_request_that_cannot_be_met_is_status_2_with_a_reason(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_a_row_says_whether_its_program_came_from_the_cache(no_cache, tmp_path):
    def doubled():
        return models.compiled(jax.jit(lambda x: 2 * x), jnp.ones(3))

    assert doubled().cache == "none"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    cold, warm = doubled(), doubled()
    assert cold.details == {"compile_seconds": cold.seconds, "compile_cache": "cold"}
    assert warm.details == {"compile_seconds": warm.seconds, "compile_cache": "warm"}
    assert cold.note == f"compiled, cold cache, in {cold.seconds:.1f} s"
    assert warm.note == f"read from a cache in {warm.seconds:.1f} s"
    with CacheWatch() as watch:
        doubled()
        models.compiled(jax.jit(lambda x: 3 * x), jnp.ones(3))
    assert watch.answer == "mixed"
    doubled()
    assert watch.answer == "mixed"  # closed


# ----------------------------------------------------------------------------------------------------------------------
# The gate
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "error"), [(1.0, 0.0), (1 + 2**-10, 2**-10), (jnp.nan, np.inf)])
def test_the_gate_compares_the_implementation_with_xla(factor, error):
    def logits(weights, state, tokens, *, implementation, **_):
        y = weights.norm[tokens]
        return y if implementation == "xla" else y * jnp.float32(factor)

    verdict = models.judged(logits, 2, "exact", a_request())
    assert verdict.max_rel == pytest.approx(error, rel=1e-3)
    assert verdict.passed == (error == 0)


def test_the_gate_sees_the_kernels():
    """Traced, not run: the small model calls what the large one calls, in every step of its sequence."""
    request = a_request(a_small_attention_model(), implementation="interpret")
    for logits in (decode._logits, prefill._logits):
        cfg = models.miniature(request.decoder)
        state = decoder_state_shapes(cfg, batch=2, capacity=8)
        carry = (state, jax.ShapeDtypeStruct((2, 6), jnp.int32))
        named = models.named(request, "exact") | {"cfg": cfg}
        step = Step(lambda carry, _, w, logits=logits, named=named: logits(w, *carry, **named))
        step = step._replace(operands=abstract_decoder(cfg, tier="q4"))
        assert naming.implementation_of(step, carry) == "interpret"


@pytest.mark.parametrize("name", DECODERS)
def test_the_model_of_the_gate_is_small_and_alike(name):
    cfg = DECODERS[name]
    small = models.miniature(cfg)
    assert operands.nbytes(abstract_decoder(small, tier="q4")) < 20e6
    assert small.gdn.ratio == cfg.gdn.ratio
    assert (small.gdn.key_dim, small.gdn.value_dim, small.head_dim) == (128, 128, 256)
    assert small.heads // small.kv_heads == cfg.heads // cfg.kv_heads
    assert small.layers == 2 * cfg.period
    assert small.layer_types == cfg.layer_types[: small.layers]
    assert small.tied == cfg.tied
    assert (small.moe is None) == (cfg.moe is None)


# ----------------------------------------------------------------------------------------------------------------------
# Weights, steps, bytes
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["f32", "bf16", "q4"])
def test_random_weights_are_a_model_and_the_same_again(tier):
    weights, again = (models.decoder_weights(1, decoders.SMALL, tier) for _ in range(2))
    check_decoder_weights(weights, decoders.SMALL)
    chex.assert_trees_all_equal(weights, again)
    layers = weights.gdn.layers
    assert abs(np.asarray(weights.norm)).max() <= 0.1 < 0.9 <= np.asarray(layers.norm).min()
    assert np.asarray(layers.A_log).max() <= 2.8
    assert np.asarray(layers.dt_bias).min() >= -7.0
    if tier != "q4":
        for matrix in (weights.embed, weights.head, weights.mlp.down, weights.attention.q):
            assert np.std(np.asarray(matrix, np.float32)) * matrix.shape[-1] ** 0.5 == pytest.approx(1, rel=0.1)
    one, other = (np.asarray(layers.b)[layer] for layer in (0, 1))
    assert (one != other).any()


def test_a_step_takes_the_last_tokens_of_the_context(monkeypatch):
    """Positions follow the loop's counter, whatever the carry says, and the most likely token comes next."""

    def step(weights, state, tokens, **named):
        assert named == {"cfg": cfg, "precision": "exact", "implementation": None}
        keys = state.keys.at[:, :, state.position[0]].set(jnp.float32(1))
        logits = jnp.zeros((1, cfg.vocab)).at[:, tokens[0] + 1].set(jnp.float32(1))
        return logits, state.replace(keys=keys, position=state.position + 1)

    cfg = decoders.SMALL
    monkeypatch.setattr(decode, "decode_step", step)
    request = a_request(cfg)
    carry = models.new_state(request, 1), jnp.array([3], jnp.int32)
    after, drawn = decode._greedy(request, "exact").advance(carry, jnp.int32(2), None)
    assert after.position.tolist() == [7]
    assert drawn.tolist() == [4]
    written = np.flatnonzero(np.asarray(after.keys).any(axis=(0, 1, 3, 4)))
    assert written.tolist() == [6]


def a_small_attention_model():
    cfg = decoders.SMALL
    return dataclasses.replace(
        cfg, layer_types=("linear_attention", "full_attention"), mlp_types=("dense", "dense"), moe=None
    )


@pytest.mark.parametrize("tied", [False, True])
def test_every_part_can_be_timed_alone(tied):
    """Traced, not run: each takes its carry and gives it back, and reads weights that the step reads."""
    cfg = dataclasses.replace(decoders.SMALL, tied=tied)
    request = a_request(cfg)
    weights = models.decoder_weights(3, cfg, "q4")
    parts = decode._parts(weights, 2, "exact", request)
    assert {name: part.layers for name, part in parts.items()} == {
        "gdn": 2, "attention": 2, "mlp": 2, "experts": 2, "head": 1
    }  # fmt: skip
    for part in parts.values():
        after = jax.eval_shape(part.advance, part.carry, jnp.int32(0), part.weights)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, part.carry)
    read = sum(part.layers * part.nbytes for part in parts.values())
    norms = operands.nbytes((weights.norm, weights.input_norm, weights.post_norm))
    assert read + norms == models.moved(request, 2)


def test_bytes_of_a_27b_step_are_those_of_its_floor():
    """GDN 3.2 GB, attention 0.95, MLPs 9.6, head 0.72, S read and written 0.3, keys and values of 1024 tokens 0.13."""
    cfg = DECODERS["qwen3.5-27b"]
    assert models.moved(a_request(cfg, context=1024), 1) == pytest.approx(14.95e9, rel=1e-3)
    one, sixteen = (models.moved(a_request(cfg, context=1024), batch) for batch in (1, 16))
    assert sixteen - one == 15 * (2 * 156_893_184 + 2 * 16 * 1024 * 4 * 256 * 4)


def test_of_experts_only_those_of_the_tokens_are_read():
    cfg = DECODERS["qwen3-next-80b"]
    one, two, all_of_them = (models.moved(a_request(cfg), batch) for batch in (1, 2, 1000))
    experts = operands.nbytes(abstract_decoder(cfg, tier="q4").moe.experts)
    state = (all_of_them - one - experts * (512 - 10) // 512) / 999
    assert two - one == pytest.approx(experts * 10 / 512 + state, rel=1e-6)


@pytest.mark.deviceless
@pytest.mark.parametrize("batch", [1, 2])
def test_the_timed_program_holds_the_state_once_and_no_more_than_its_budget(batch):
    cfg = DECODERS["qwen3.5-27b"]
    request = a_request(cfg, context=1024, tokens=32, effort=Effort(unroll=1))
    carry = (decoder_state_shapes(cfg, batch=batch, capacity=1024), jax.ShapeDtypeStruct((batch,), jnp.int32))
    loop = timing.program(decode._greedy(request, "exact"), 32, 32, request.effort)
    analysis = compile_for_h200(loop, carry, abstract_decoder(cfg, tier="q4")).memory_analysis()
    budget = memory.budget(memory.Load(cfg=cfg, tier="q4", batch=batch, context=1024, piece=0))
    assert analysis.alias_size_in_bytes == operands.nbytes(carry)
    assert 0 < analysis.temp_size_in_bytes <= budget.workspace
    assert analysis.argument_size_in_bytes == pytest.approx(budget.held, rel=1e-3)


@pytest.mark.deviceless
@pytest.mark.parametrize(("tier", "batch", "tokens"), [("q4", 1, 512), ("q4", 4, 512), ("q4", 1, 16), ("bf16", 1, 64)])
def test_the_program_of_a_prompt_holds_the_state_once_and_no_more_than_its_budget(tier, batch, tokens):
    cfg = DECODERS["qwen3.5-27b"]
    state = decoder_state_shapes(cfg, batch=batch, capacity=4096)
    program = jax.jit(prefill_tokens, static_argnames=decoders.STATIC, donate_argnames=("state",))
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    analysis = compile_for_h200(program, abstract_decoder(cfg, tier=tier), state, ids, cfg=cfg).memory_analysis()
    budget = memory.budget(memory.Load(cfg=cfg, tier=tier, batch=batch, context=4096, piece=tokens))
    assert analysis.alias_size_in_bytes == operands.nbytes(state)
    assert budget.workspace / 8 < analysis.temp_size_in_bytes <= budget.workspace


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["exact", "bf16"])
def test_the_gate_is_green_on_a_card(precision):
    for logits in (decode._logits, prefill._logits)[precision == "bf16" :]:
        tokens = 70 if logits is prefill._logits else 6
        verdict = models.judged(logits, 2, precision, a_request(DECODERS["qwen3.5-27b"]), tokens)
        assert verdict.implementation != "xla"
        assert 0 < verdict.max_rel <= gate.BOUNDS["decoder", precision]
