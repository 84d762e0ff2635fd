"""Speculative decoding on the command line: `gdn check --speculation`, `gdn generate --speculate`, `gdn bench`."""

import dataclasses
import enum
import json
import re
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax import cli
from gdn_jax.bench import models, naming
from gdn_jax.bench import speculation as benchmark
from gdn_jax.bench.request import Request
from gdn_jax.bench.timing import Effort, Step
from gdn_jax.config import GdnConfig
from gdn_jax.decoder import decoder
from gdn_jax.decoder.decoder import Decoder
from gdn_jax.decoder.model_drafter import ModelDrafter
from gdn_jax.decoder.mtp import MtpDrafter
from gdn_jax.decoder.network import TextNetwork
from gdn_jax.decoder.ngram import NgramDrafter
from gdn_jax.decoder.script import ScriptDrafter
from gdn_jax.decoder.speculate import DraftCounts, Drafting, SpeculativeGeneration
from gdn_jax.decoder.state import decoder_state_shapes
from gdn_jax.decoder.weights import abstract_decoder
from gdn_jax.evidence import bounds, speculation
from tests.support import decoders, hf_files, text_files

CFG = dataclasses.replace(decoders.DENSE, layer_types=("linear_attention", "full_attention"), mlp_types=("dense",) * 2)
"""One layer of each kind. Everything is of this model, since programs take longer to compile than to run."""
ROOM, LONGEST_PROMPT = 32, 7
"""What checks and benchmarks have room for, so that they share programs; a check's script is as long."""


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch):
    monkeypatch.setenv("GDN_JAX_CACHE", "off")  # nothing is written outside the tests' folders


@pytest.fixture
def little_room(monkeypatch):
    monkeypatch.setattr(decoder, "_LEAST_CAPACITY", ROOM)


def write_model(folder, label, *, cfg=CFG, mtp=False):
    """A model in Hugging Face files, with a tokenizer."""
    head = decoders.draw_mtp(cfg, label) if mtp else {}
    hf_files.write(folder, decoders.hf_config(cfg), decoders.draw(cfg, label) | head)
    return text_files.write_tokenizer(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "model", "tests/commands", mtp=True)


@pytest.fixture
def run(capsys):
    def call(*arguments):
        status = cli.main([*map(str, arguments)])
        return status, *capsys.readouterr()

    return call


def refused(run, *arguments):
    """The reason for which a command line is status 2."""
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    return err.splitlines()[-1]


# ----------------------------------------------------------------------------------------------------------------------
# gdn check --speculation
# ----------------------------------------------------------------------------------------------------------------------

TOKENS = ROOM - LONGEST_PROMPT
CHECK = ("check", "--speculation", "--tokens", TOKENS)
SOME, ALL, NONE, LOOKED_UP = (("greedy", how) for how in ("some right", "all right", "all wrong", "prompt lookup"))
SAMPLED = ("sampled", "some right")
EVERY = {SOME, ALL, NONE, LOOKED_UP, SAMPLED}


@pytest.fixture
def checked(run, folder, little_room):
    """Checks the model: the rows by what was drafted, those among them that failed, and the errors by layer."""

    def call(*options):
        status, out, _ = run(*CHECK, "--model", folder, "--json", *options)
        report = json.loads(out)
        drafts, layers = report["sections"]
        rows = {(row["drawing"], row["drafts"]): row for row in drafts["rows"]}
        failed = {key for key, row in rows.items() if not row["passed"]}
        assert set(rows) == EVERY
        assert drafts["passed"] == (not failed)
        assert layers["passed"] == all(row["passed"] for row in layers["rows"])
        assert report["passed"] == (drafts["passed"] and layers["passed"])
        assert status == (0 if report["passed"] else 1)
        return rows, failed, layers["rows"]

    return call


@pytest.mark.slow
def test_drafts_of_every_kind_change_nothing(checked):
    rows, failed, layers = checked()
    assert not failed
    columns = "drawing drafts tokens differing rounds proposed accepted rounds_by_accepted S_max_rel bound passed"
    for row in rows.values():
        assert list(row) == columns.split()
        assert (row["tokens"], row["differing"]) == (2 * TOKENS, 0)
        assert row["S_max_rel"] <= row["bound"] == bounds.SPECULATION_STATE
        by_accepted = [int(count) for count in row["rounds_by_accepted"].split("/")]
        assert len(by_accepted) == 4  # three proposals at a time
        assert row["rounds"] == sum(by_accepted)
        assert row["accepted"] == sum(accepted * count for accepted, count in enumerate(by_accepted))
        # A round draws a token beyond what it accepts; the first token of each row is the prompt's.
        assert row["rounds"] + row["accepted"] == 2 * (TOKENS - 1)
        assert row["proposed"] <= 3 * row["rounds"]
        if row["drafts"] == "some right":
            assert min(by_accepted) > 0
    assert rows[ALL]["accepted"] == rows[ALL]["proposed"] > 0
    assert rows[NONE]["accepted"] == 0 < rows[NONE]["proposed"]
    assert [row["layer"] for row in layers] == [0]
    assert layers[0]["max_rel"] == max(row["S_max_rel"] for row in rows.values())


@pytest.mark.usefixtures("little_room")
def test_the_tables_are_for_people_too(run, folder):
    status, out, _ = run(*CHECK, "--model", folder)
    assert status == 0
    assert "[PASS] model: 2 rows of 25 tokens, with drafts against without" in out
    assert "[PASS] S and history after 25 tokens, max_rel of the worst run above by GDN layer" in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith(("  greedy", "  sampled"))] == ["pass"] * 5
    assert out.rstrip().endswith("gdn check: passed")


class Fault(enum.IntEnum):
    """What may be wrong with looking at tokens and taking them."""

    NOTHING = enum.auto()
    ONE_TAKEN_TOO_FEW = enum.auto()
    ONE_TAKEN_TOO_MANY = enum.auto()
    S_STAYS = enum.auto()
    S_IS_SLIGHTLY_OFF = enum.auto()
    HISTORY_STAYS = enum.auto()
    KEYS_ARE_LOST = enum.auto()
    ONE_TOKEN_IS_WRONG = enum.auto()
    WHAT_IS_WRONG_IS_ACCEPTED = enum.auto()


WRONG_AT = 12


@dataclasses.dataclass(frozen=True)
class Faulty(TextNetwork):
    """Its weights come with the number of a fault, so that one program has them all."""

    def look(self, weights, state, tokens, lengths):
        weights, fault = weights
        logits, hidden, after, window = super().look(weights, state, tokens, lengths)
        place = state.position[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        wrong = (fault == Fault.ONE_TOKEN_IS_WRONG) & (place == WRONG_AT)
        logits = jnp.where(wrong[..., None], jnp.roll(logits, 1, axis=-1), logits)
        likely = jnp.float32(1e3) * jax.nn.one_hot(tokens[:, 1:], self.cfg.vocab, dtype=jnp.float32)
        proposed = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        believed = (fault == Fault.WHAT_IS_WRONG_IS_ACCEPTED) & proposed
        likely = jnp.where(believed[..., None], likely, jnp.float32(0))
        keys = jnp.where(fault == Fault.KEYS_ARE_LOST, state.keys, after.keys)
        return logits.at[:, :-1].add(likely), hidden, after.replace(keys=keys), window

    def take(self, weights, state, window, counts):
        weights, fault = weights
        here = (state.position <= WRONG_AT) & (state.position + counts > WRONG_AT)
        wrong = jnp.int32(fault == Fault.ONE_TAKEN_TOO_MANY) - jnp.int32(fault == Fault.ONE_TAKEN_TOO_FEW)
        after = super().take(weights, state, window, counts + jnp.where(here, wrong, 0))
        s = jnp.where(fault == Fault.S_STAYS, state.gdn.S, after.gdn.S)
        s = s * jnp.where(fault == Fault.S_IS_SLIGHTLY_OFF, jnp.float32(1 + 3e-5), jnp.float32(1))
        history = jnp.where(fault == Fault.HISTORY_STAYS, state.gdn.conv_hist, after.gdn.conv_hist)
        return after.replace(gdn=after.gdn.replace(S=s, conv_hist=history))


@pytest.fixture
def with_fault(monkeypatch):
    """Has what follows draft by the faulty network; prompts, and texts without drafts, are right."""

    def install(fault):
        class Generation(SpeculativeGeneration):
            def _advance(self, rows, left):
                network, weights = self._speculative, self._weights
                self._speculative, self._weights = Faulty(**vars(network)), (weights, jnp.int32(fault))
                found = super()._advance(rows, left)
                self._speculative, self._weights = network, weights
                return found

        monkeypatch.setattr(decoder, "SpeculativeGeneration", Generation)

    return install


@pytest.fixture
def nothing_looked_up(monkeypatch):
    """A script without words in the place of prompt lookup, which finds next to nothing and is one more to compile."""
    drafting = Drafting(ScriptDrafter(3), jnp.full((2, ROOM), -1, jnp.int32))
    monkeypatch.setattr(speculation, "draft_by_ngrams", lambda size: drafting)


@pytest.mark.usefixtures("nothing_looked_up")
@pytest.mark.parametrize(
    ("fault", "seen_by"),
    [
        (Fault.NOTHING, set()),
        (Fault.ONE_TAKEN_TOO_FEW, EVERY),
        (Fault.ONE_TAKEN_TOO_MANY, {SOME, NONE, SAMPLED}),  # no more can be taken than was looked at
        (Fault.S_STAYS, EVERY),
        (Fault.S_IS_SLIGHTLY_OFF, EVERY),
        (Fault.HISTORY_STAYS, EVERY),
        (Fault.KEYS_ARE_LOST, EVERY),
        (Fault.ONE_TOKEN_IS_WRONG, EVERY),
        (Fault.WHAT_IS_WRONG_IS_ACCEPTED, {SOME, NONE, SAMPLED}),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
def test_whatever_drafts_change_is_found(checked, with_fault, fault, seen_by):
    with_fault(fault)
    rows, failed, layers = checked()
    assert failed == seen_by
    assert all(row["passed"] for row in layers) == (not seen_by)
    changed = {key for key, row in rows.items() if row["differing"] or row["S_max_rel"] > bounds.SPECULATION_STATE}
    assert changed == seen_by
    if fault == Fault.S_IS_SLIGHTLY_OFF:  # which no token tells
        assert not any(row["differing"] for row in rows.values())
    if fault in (Fault.ONE_TOKEN_IS_WRONG, Fault.WHAT_IS_WRONG_IS_ACCEPTED):
        assert all(rows[key]["differing"] for key in seen_by)


@pytest.mark.usefixtures("little_room", "nothing_looked_up")
def test_a_failure_is_shown_where_it_is(run, folder, with_fault):
    with_fault(Fault.ONE_TAKEN_TOO_MANY)
    status, out, _ = run(*CHECK, "--model", folder)
    assert status == 1
    verdicts = [line.split()[-1] for line in out.splitlines() if line.startswith(("  greedy", "  sampled"))]
    assert verdicts == ["FAIL", "pass", "FAIL", "pass", "FAIL"]
    assert out.count("[FAIL]") == 2
    assert out.rstrip().endswith("gdn check: FAILED (speculation, speculation_state)")


def nothing_proposed(script):
    return jnp.full_like(script, -1)


def never_right(script):
    """Half the vocabulary away from what is right, and from what is one off."""
    return jnp.where(script < 0, script, (script + CFG.vocab // 2) % CFG.vocab)


@pytest.mark.parametrize(
    ("spoilt", "useless"), [(nothing_proposed, {SOME, ALL, NONE, SAMPLED}), (never_right, {SOME, ALL, SAMPLED})]
)
def test_drafts_that_put_nothing_to_the_test_fail_it(checked, monkeypatch, spoilt, useless):
    """No token differs then, and the state is right; but nobody knows what would have been otherwise."""
    monkeypatch.setattr(speculation, "Drafting", lambda drafter, script: Drafting(drafter, spoilt(script)))
    rows, failed, layers = checked()
    assert failed == useless
    assert not any(row["differing"] for row in rows.values())
    assert all(row["passed"] for row in layers)


def test_drafts_that_are_always_right_show_nothing_about_rejection(checked, monkeypatch):
    right = []

    def only_right(drafter, script):
        right.append(script)
        return Drafting(drafter, right[1] if len(right) > 1 else script)

    monkeypatch.setattr(speculation, "Drafting", only_right)
    _, failed, _ = checked()  # "some right" comes first, and "all right" second
    assert failed == {NONE, SAMPLED}


def test_the_bound_decides(checked, monkeypatch):
    monkeypatch.setattr(bounds, "SPECULATION_STATE", 0.0)
    monkeypatch.setattr(bounds, "SPECULATION_ROWS", 0.0)
    rows, failed, layers = checked()
    assert failed == {key for key, row in rows.items() if row["S_max_rel"]}
    assert failed
    assert not any(row["passed"] for row in layers)


@pytest.mark.parametrize("same", [True, False])
def test_a_model_may_carry_rounding_as_far_as_other_rows_do(checked, monkeypatch, same):
    """If the prompts beside copies of themselves get the same tokens: else their states tell nothing."""
    monkeypatch.setattr(bounds, "SPECULATION_STATE", 1e-12)
    monkeypatch.setattr(bounds, "SPECULATION_ROWS", 1e6)
    continued = speculation._continued

    def beside(model, prompts, sampling, options, draft):
        found = continued(model, prompts, sampling, options, draft)
        if len(prompts) == 8:
            assert prompts == prompts[:2] * 4
            found.tokens[1, -1] += not same
        return found

    monkeypatch.setattr(speculation, "_continued", beside)
    rows, failed, layers = checked()
    assert failed == (set() if same else {key for key, row in rows.items() if row["S_max_rel"] > 1e-12})
    assert failed or same
    assert {row["bound"] for row in [*rows.values(), *layers]} == {1e-12} or same


@pytest.fixture
def small_hybrid(monkeypatch):
    """The GDN geometries that a model was asked for, for each of which it is `CFG`."""
    asked = []

    def hybrid(gdn):
        asked.append(gdn)
        return CFG

    monkeypatch.setattr(models, "hybrid", hybrid)
    return asked


@pytest.mark.usefixtures("little_room")
def test_a_geometry_stands_for_a_model_with_random_weights(run, small_hybrid):
    status, out, _ = run(*CHECK, "--geometry", "32,2,6,12,16,4")
    assert status == 0
    assert small_hybrid == [CFG.gdn]
    assert "[PASS] 32,2,6,12,16,4 f32, random weights: 2 rows" in out


def test_what_was_asked_for_is_what_is_checked(run, folder, monkeypatch):
    asked = []
    monkeypatch.setattr(speculation, "run", lambda *request: asked.append(request) or [])
    assert run("check", "--speculation")[0] == 0
    assert run("check", "--speculation", "--tier", "q4", "--draft-tokens", 7)[0] == 0
    assert run("check", "--speculation", "--model", folder, "--tokens", 9)[0] == 0
    (small, dense, usual), (_, packed, seven), (name, model, nine) = asked
    assert (usual, seven) == (speculation.Options(), speculation.Options(draft_tokens=7))
    assert (nine, usual.tokens, usual.draft_tokens) == (speculation.Options(tokens=9), 512, 3)
    gdn = GdnConfig(hidden=64, key_heads=2, value_heads=6, key_dim=16, value_dim=32, conv_width=4)
    assert (small, name) == ("64,2,6,16,32,4 f32, random weights", "model")
    assert dense.cfg == packed.cfg == models.hybrid(gdn)
    assert (dense.weights.tier, packed.weights.tier) == ("f32", "q4")
    assert model.cfg == CFG


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("--draft-tokens belongs to --speculation", ["--draft-tokens", 2]),
        ("--draft-tokens belongs to --speculation", ["--geometry", "40,2,6,12,20,4", "--draft-tokens", 2]),
        ("--layer does not belong to --speculation", ["--speculation", "--model", "{folder}", "--layer", 1]),
        ("--batch does not belong to --speculation", ["--speculation", "--batch", 2]),
        ("--inputs does not belong to --speculation", ["--speculation", "--inputs", "heavy"]),
        ("--long does not belong to --speculation", ["--speculation", "--long"]),
        ("no such file", ["--speculation", "--model", "{folder}/nothing"]),
        ("geometry must be one of qwen3.5-0.8b", ["--speculation", "--geometry", "27b"]),
        ("divide by 32", ["--speculation", "--geometry", "40,2,6,12,20,4", "--tier", "q4"]),
    ],
)
def test_a_check_that_cannot_be_made_is_status_2_with_a_reason(run, folder, message, arguments):
    arguments = [str(argument).format(folder=folder) for argument in arguments]
    assert message in refused(run, "check", *arguments)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("argument --draft-tokens", ["check", "--speculation", "--draft-tokens", "0"]),
        ("argument --draft-tokens", ["check", "--speculation", "--draft-tokens", "x"]),
        ("argument --tokens", ["check", "--speculation", "--tokens", "0"]),
        ("not allowed with", ["check", "--speculation", "--geometry", "40,2,6,12,20,4", "--model", "x"]),
        ("argument --draft-tokens", ["generate", "--model", "x", "x", "--speculate", "ngram", "--draft-tokens", "0"]),
        ("unrecognized arguments", ["chat", "--model", "x", "--speculate", "ngram"]),
        ("argument --tokens", ["bench", "speculation", "--tokens", "2,0"]),
        ("argument --tokens", ["bench", "speculation", "--tokens", "2,,3"]),
    ],
)
def test_a_malformed_command_line_is_status_2(capsys, message, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# gdn generate --speculate
# ----------------------------------------------------------------------------------------------------------------------

SINGLE = dataclasses.replace(CFG, layer_types=("linear_attention",), mlp_types=("dense",))
LONG = 120  # tokens, for which several calls are needed, whatever is accepted: speed is that of all but the first
DRAWING = ("--temperature", 0.9, "--top-p", 0.95, "--seed", 5)
DRAFTING = re.compile(
    r"gdn generate: (?P<accepted>\d+) of (?P<proposed>\d+) drafts accepted(?: \((?P<share>\d+)%\))?, "
    r"(?:(?P<a_round>[\d.]+) tokens a round|no rounds)(?:; (?P<speed_up>[\d.]+) times as fast as without drafts)?"
)


def told(err):
    """What the last line on standard error says of drafts."""
    found = DRAFTING.fullmatch(err.splitlines()[-1])
    assert found is not None, err
    return found.groupdict()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A model of one layer, which is sooner compiled."""
    return write_model(tmp_path_factory.mktemp("models") / "single", "tests/single", cfg=SINGLE, mtp=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "other", "tests/other", cfg=SINGLE)


@pytest.fixture
def continued(run, single):
    def call(*arguments, tokens=LONG):
        return run("generate", "--model", single, "--raw", "the state", "--max-new-tokens", tokens, *arguments)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("drawing", [(), DRAWING], ids=["greedy", "drawn"])
@pytest.mark.parametrize("how", ["ngram", "{single}", "{other}"], ids=["n-grams", "itself", "another model"])
def test_drafts_change_how_fast_a_text_comes_and_not_the_text(continued, single, other, how, drawing):
    plain = json.loads(continued("--json", *drawing)[1])
    drafting = ("--speculate", how.format(single=single, other=other), *drawing)
    status, out, err = continued("--json", *drafting)
    found = json.loads(out)
    assert status == 0
    assert "drafts" not in plain
    for name in ("tokens", "text", "finish_reason", "sampling"):
        assert found[name] == plain[name]
    drafts = found["drafts"]
    assert list(drafts) == ["rounds", "proposed", "accepted", "speed_up"]
    new = len(found["tokens"])
    assert new == LONG or drawing  # which may end the text sooner
    assert drafts["rounds"] + drafts["accepted"] == new - 1
    assert drafts["accepted"] <= drafts["proposed"] <= 3 * drafts["rounds"]
    assert drafts["speed_up"] > 0
    if how == "{single}":
        assert drafts["accepted"] >= 0.9 * drafts["proposed"] > 0
    said = told(err)
    assert (int(said["accepted"]), int(said["proposed"])) == (drafts["accepted"], drafts["proposed"])
    assert float(said["a_round"]) == pytest.approx((new - 1) / drafts["rounds"], abs=0.006)
    assert float(said["speed_up"]) == pytest.approx(drafts["speed_up"], abs=0.006)
    if drafts["proposed"]:
        assert int(said["share"]) == pytest.approx(100 * drafts["accepted"] / drafts["proposed"], abs=0.6)


def test_text_comes_on_standard_output_as_without_drafts(continued):
    plain, drafted = continued(), continued("--speculate", "ngram")
    assert plain[:2] == drafted[:2]
    assert "drafts accepted" not in plain[2]
    assert told(drafted[2])["speed_up"]


@pytest.mark.parametrize("tokens", [1, 9])
def test_of_a_short_text_no_speed_is_told(continued, tokens):
    status, out, err = continued("--speculate", "ngram", "--json", tokens=tokens)
    drafts = json.loads(out)["drafts"]
    said = told(err)
    assert status == 0
    assert (drafts["speed_up"], said["speed_up"]) == (None, None)
    assert drafts["rounds"] + drafts["accepted"] == tokens - 1
    assert (said["a_round"] is None) == (tokens == 1)


def test_a_capacity_that_the_text_fills_leaves_no_room_to_measure_it_without(continued):
    status, out, err = continued("--speculate", "ngram", "--json", "--capacity", 256, tokens=240)
    assert status == 0
    assert len(json.loads(out)["tokens"]) == 240
    assert json.loads(out)["drafts"]["speed_up"] is None
    assert told(err)["speed_up"] is None


def test_an_interrupted_text_is_not_compared(continued, monkeypatch):
    monkeypatch.setattr("gdn_jax.decoder.command._show", lambda piece: signal.raise_signal(signal.SIGINT))
    status, _, err = continued("--speculate", "ngram")
    assert status == 130
    assert "ended: interrupted" in err
    assert told(err)["speed_up"] is None


@pytest.mark.parametrize(
    ("how", "drafter", "options", "count"),
    [
        ("ngram", NgramDrafter, [], 3),
        ("ngram", NgramDrafter, ["--draft-tokens", 5], 5),
        ("mtp", MtpDrafter, [], 3),
        ("mtp", MtpDrafter, ["--draft-tokens", 1], 1),
        ("{other}", ModelDrafter, ["--draft-tokens", 2], 2),
    ],
)
def test_the_drafter_is_the_one_that_was_named(continued, other, monkeypatch, how, drafter, options, count):
    asked = []

    def generate(self, prompt, **request):
        asked.append((self, request["draft"]))
        raise ValueError("no need to go on")

    monkeypatch.setattr(Decoder, "generate", generate)
    assert continued("--speculate", how.format(other=other), *options)[0] == 2
    [(model, draft)] = asked
    assert isinstance(draft.drafter, drafter)
    assert draft.drafter.count == count
    assert (model.mtp is not None) == (how == "mtp")
    if how == "mtp":
        assert draft.weights is model.mtp
    if how == "{other}":
        ours, theirs = (np.asarray(weights.embed) for weights in (model.weights, draft.weights))
        assert not np.array_equal(ours, theirs)


def test_drafts_that_cannot_be_had_are_status_2_with_a_reason(continued, run, other, tmp_path):
    larger = write_model(tmp_path / "larger", "tests/larger", cfg=dataclasses.replace(SINGLE, vocab=128))
    (tmp_path / "empty").mkdir()
    for how, message in {
        "": "--speculate must be ngram, mtp or the path of a model, got ''",
        "nonsense": "--speculate must be ngram, mtp or the path of a model, got 'nonsense'",
        str(tmp_path / "nothing"): "--speculate must be ngram, mtp or the path of a model, got",
        str(tmp_path / "empty"): str(tmp_path / "empty"),
        str(larger): "a drafter must draw from the model's vocabulary of 96 tokens, got one of 128",
    }.items():
        assert message in refused(continued, "--speculate", how, "--json")
    headless = ("generate", "--model", other, "--raw", "the state", "--speculate", "mtp")
    assert "has no multi-token-prediction head" in refused(run, *headless)


def test_a_draft_model_of_another_vocabulary_is_refused_before_weights_are_read(continued, tmp_path, monkeypatch):
    larger = write_model(tmp_path / "larger", "tests/larger", cfg=dataclasses.replace(SINGLE, vocab=128))
    monkeypatch.setattr(decoder, "read_decoder", None)
    assert "a drafter must draw from the model's vocabulary of 96 tokens" in refused(continued, "--speculate", larger)


def test_draft_tokens_without_drafts_are_refused_before_weights_are_read(continued, monkeypatch):
    monkeypatch.setattr(decoder, "read_decoder", None)
    assert refused(continued, "--draft-tokens", 2) == "gdn generate: --draft-tokens belongs to --speculate"


# ----------------------------------------------------------------------------------------------------------------------
# gdn bench speculation
# ----------------------------------------------------------------------------------------------------------------------

SMALL = "32,2,6,12,16,4"  # the geometry of `CFG`
ALIKE = ("--geometry", SMALL, "--tier", "f32", "--batch", 2, "--context", ROOM)
"""What shares programs with the checks."""
NEW = ROOM - 4  # tokens behind the prompt
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU answers")


@pytest.fixture
def bench(run, tmp_path, small_hybrid, known_ceiling):
    """Runs the subject without measuring the ceiling: exit status, rows by their order, what was printed."""
    lines = tmp_path / "rows.jsonl"

    def call(*arguments):
        status, out, _ = run("bench", "speculation", *ALIKE, *arguments, "--jsonl", lines)
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        assert all(row["case"].startswith(f"{SMALL} ") for row in rows)
        return status, [row | {"case": row["case"].removeprefix(f"{SMALL} ")} for row in rows], out

    return call


@pytest.fixture
def green(monkeypatch):
    """A gate that lets everything through, and compiles nothing."""
    monkeypatch.setattr(models, "judged", lambda *_: models.Verdict(1e-7, 1e-5, "xla"))


@pytest.fixture
def idle(monkeypatch):
    """Programs of windows that do nothing, and need not be compiled."""
    nothing = models.Compiled(lambda carry, operands: carry, 0.0, "none", 0)
    monkeypatch.setattr(models, "compiled", lambda *_: nothing)


def cases(*windows):
    looked_at = [f"verify {tokens}{commit}" for tokens in windows for commit in ("", ", commit")]
    generated = [f"generate, half of {tokens - 1} drafts right" for tokens in windows]
    return ["step", *looked_at, "generate", *generated, "snapshot, restore of S and history"]


@on_cpu
@pytest.mark.usefixtures("green")
def test_bench_times_windows_and_what_becomes_of_them(bench):
    status, rows, out = bench("--tokens", 4)
    assert status == 0
    assert "gdn bench: passed" in out
    assert [row["case"] for row in rows] == cases(4)
    named = f"gdn bench speculation --geometry {SMALL} --tier f32 --context {ROOM} --batch 2 --tokens 4"
    for row in rows:
        assert (row["subject"], row["batch"], row["precision"], row["command"]) == ("speculation", 2, "exact", named)
        assert (row["tier"], row["context"], row["kv_dtype"]) == ("f32", ROOM, "float32")
        assert row["passed"]
        assert 0 < row["us_p10"] <= row["us"] <= row["us_p90"]
    step, *windows = rows[:3]
    for row, window in zip((step, *windows), (1, 4, 4), strict=True):
        assert row["window"] == window
        assert row["of_a_step"] == pytest.approx(row["us"] / step["us"])
        assert f"{row['us'] / 1e3:.3f} ms, {row['of_a_step']:.2f} of a step; compiled in" in row["note"]
        assert (row["max_rel"], row["bound"]) == (1e-7, 1e-5)
        assert row["gate_implementation"] == row["implementation"] == "xla"
        assert row["compile_seconds"] > 0
        assert row["temp_bytes"] > 0
        assert row["nbytes"] == step["nbytes"]
    alone, drafted, copies = rows[3:]
    for row in (alone, drafted):
        assert (row["max_rel"], row["bound"], row["kernels"]) == (0, 0, NEW - 1)
        assert row["tok_per_s"] == pytest.approx(2e6 / row["us"])
        assert row["note"].startswith(f"{row['tok_per_s']:,.1f} tok/s")
    assert "speed_up" not in alone
    assert drafted["same_tokens"] is True
    assert drafted["speed_up"] == pytest.approx(alone["us"] / drafted["us"])
    assert drafted["rounds"] + drafted["accepted"] == 2 * (NEW - 1)
    assert 0 < drafted["accepted"] < drafted["proposed"]
    assert (
        f"{drafted['speed_up']:.2f} times as fast; {drafted['accepted']} of {drafted['proposed']} accepted in "
        f"{drafted['rounds']} rounds, the same tokens"
    ) in drafted["note"]
    state = 4 * 2 * (6 * 12 * 16 + 3 * CFG.gdn.conv_channels)  # S and history of two rows
    assert copies["nbytes"] == 4 * state  # read and written, twice
    assert f"{copies['us'] / 1e3:.3f} ms for both" in copies["note"]


@on_cpu
def test_what_is_wrong_is_neither_timed_nor_generated_by(bench, monkeypatch):
    monkeypatch.setattr(models, "judged", lambda *_: models.Verdict(2e-5, 1e-5, "xla"))
    monkeypatch.setattr(models, "compiled", None)  # timing it would fail
    monkeypatch.setattr(benchmark, "Decoder", None)
    status, rows, out = bench("--tokens", "2,3")
    assert status == 1
    assert "gdn bench: FAILED" in out
    *judged, copies = rows
    assert [row["case"] for row in judged] == [case for case in cases(2, 3)[:-1] if "generate" not in case]
    for row in judged:
        assert (row["passed"], row["us"]) == (False, None)
        assert "not timed: wrong result" in row["note"]
        assert "of_a_step" not in row
    assert copies["us"] > 0


class Settled(Decoder):
    """Its answers are there already: without drafts zeros, with drafts the same but for one, which `wrong` is."""

    wrong = 0

    def generate(self, prompts, *, max_new_tokens, ignore_eos, draft):
        assert ignore_eos
        tokens = np.zeros((len(prompts), max_new_tokens), np.int32)
        counts = None
        if draft is not None:
            tokens[-1, -1] = self.wrong
            counts = DraftCounts([3, 4], proposed=7)
        timings = types.SimpleNamespace(decode_seconds=(max_new_tokens - 1) * (2e-3 if draft is None else 1e-3))
        return types.SimpleNamespace(tokens=tokens, timings=timings, drafts=counts)


@on_cpu
@pytest.mark.usefixtures("green", "idle")
@pytest.mark.parametrize("wrong", [0, 1])
def test_one_token_that_differs_fails_the_run(bench, monkeypatch, wrong):
    monkeypatch.setattr(benchmark, "Decoder", Settled)
    monkeypatch.setattr(Settled, "wrong", wrong)
    status, rows, out = bench("--tokens", "2,3")
    assert status == wrong
    assert ("gdn bench: FAILED" in out) == bool(wrong)
    assert [row["case"] for row in rows] == cases(2, 3)
    for row in rows:
        assert row["passed"] == (not wrong or "drafts right" not in row["case"])
        if "drafts right" in row["case"]:
            assert row["same_tokens"] == (not wrong)
            assert row["speed_up"] == pytest.approx(2)
            assert row["us"] == pytest.approx(1e3)
            assert row["tok_per_s"] == pytest.approx(2e3)
            assert ("OTHER tokens" in row["note"]) == bool(wrong)


@on_cpu
@pytest.mark.usefixtures("green", "idle")
@pytest.mark.parametrize("fault", [Fault.NOTHING, Fault.ONE_TAKEN_TOO_FEW], ids=lambda fault: fault.name)
def test_a_wrong_commit_fails_the_run(bench, with_fault, fault):
    """The gate sees logits of a window; what taking it leaves is seen by the tokens."""
    with_fault(fault)
    status, rows, _ = bench("--tokens", 4)
    assert status == (fault != Fault.NOTHING)
    assert {row["case"] for row in rows if not row["passed"]} == ({cases(4)[4]} if status else set())


@on_cpu
@pytest.mark.usefixtures("green", "idle")
def test_precisions_and_batches_come_one_after_the_other(bench, monkeypatch):
    monkeypatch.setattr(benchmark, "Decoder", Settled)
    monkeypatch.setattr(benchmark, "implementation_of", lambda *_: "xla")  # which traces the model
    wider = dataclasses.replace(CFG, gdn=dataclasses.replace(CFG.gdn, value_dim=32))
    monkeypatch.setattr(models, "hybrid", lambda gdn: wider)
    status, rows, _ = bench("--tier", "q4", "--batch", "1,3", "--precision", "exact,q8", "--tokens", 2)
    one, copies = [], cases(2)[-1]
    for batch in (1, 3):
        one += [(batch, precision, case) for precision in ("exact", "q8") for case in cases(2)[:-1]]
        one.append((batch, "exact", copies))
    assert status == 0
    assert [(row["batch"], row["precision"], row["case"]) for row in rows] == one


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("--tokens must be windows of at least 2 tokens, and --context at least 7", ["--tokens", 1]),
        ("and --context at least 10 for them, got 4,1 and 16", ["--tokens", "4,1", "--context", 16]),
        ("--context at least 10 for them, got 2,4 and 9", ["--tokens", "2,4", "--context", 9]),
        ("--no-parts belongs to decode, not to speculation", ["--no-parts"]),
        ("--shapes belongs to gemv, gemm, not to speculation", ["--shapes", "64x64"]),
        ("--layers belongs to layer, not to speculation", ["--layers", 2]),
        ("--backward belongs to chunk, not to speculation", ["--backward"]),
        ("--precision must be exact or q8 for speculation, got bf16", ["--precision", "bf16"]),
        ("precision must be one of exact for weights of tier 'f32'", ["--tier", "f32", "--precision", "q8"]),
        ("geometry must be one of qwen3.5-0.8b", ["--geometry", "27b"]),
        ("divide by 32", ["--geometry", "40,2,6,12,20,4"]),
        ("implementation must be None or one of", ["--implementation", "cuda"]),
    ],
)
def test_a_benchmark_that_cannot_be_made_is_status_2_with_a_reason(run, known_ceiling, message, arguments):
    assert message in refused(run, "bench", "speculation", *arguments)


def test_windows_of_several_lengths_are_for_those_who_take_them(run):
    message = refused(run, "bench", "decode", "--tokens", "2,3")
    assert "--tokens must be one number for decode, got 2,3; chunk and speculation take several" in message


def test_the_gate_sees_the_kernels():
    """Traced, not run: looking at a window of the small model calls what looking at one of the large model calls."""
    request = Request(
        batches=(1,),
        shapes=(),
        geometry=SMALL,
        cfg=SINGLE.gdn,
        layers=1,
        precisions=("exact",),
        implementation="interpret",
        peers=False,
        effort=Effort.here(),
        decoder=SINGLE,
    )
    cfg = models.miniature(SINGLE)
    carry = (decoder_state_shapes(cfg, batch=2, capacity=8), jax.ShapeDtypeStruct((2, 6), jnp.int32))
    named = models.named(request, "exact") | {"cfg": cfg}
    step = Step(lambda carry, _, w: benchmark._logits(w, *carry, **named), abstract_decoder(cfg, tier="q4"))
    assert naming.implementation_of(step, carry) == "interpret"
