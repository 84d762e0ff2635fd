"""`gdn budget`: its bytes against those of real arrays, what fits where, and requests that cannot be met."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest

from gdn_jax import cli, memory
from gdn_jax.bench import models
from gdn_jax.decoder.config import DECODERS, DecoderConfig
from gdn_jax.decoder.generate import LARGEST_PIECE, new_rows
from gdn_jax.decoder.state import init_decoder_state
from gdn_jax.errors import CheckpointError
from tests.support import decoders
from tests.support.paths import FIXTURES

MB = 1_000_000


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def run(capsys, *arguments):
    status = cli.main(["budget", *map(str, arguments)])
    return status, *capsys.readouterr()


def a_load(**given):
    return memory.Load(**{"cfg": DECODERS["qwen3.5-27b"], "tier": "q4", **given})


# ----------------------------------------------------------------------------------------------------------------------
# Bytes
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["f32", "bf16", "q4"])
@pytest.mark.parametrize("name", [decoders.TIED, None], ids=["tied", "experts"])
def test_weights_are_what_loading_takes(name, tier):
    cfg, weights = (decoders.SMALL, decoders.small(tier)) if name is None else decoders.load(name, tier)
    parts = memory.weights_nbytes(cfg, tier)
    assert sum(parts.values()) == nbytes(weights)
    assert parts["GDN"] == nbytes(weights.gdn)
    assert parts["attention"] == nbytes(weights.attention)
    assert parts["norms"] == nbytes((weights.norm, weights.input_norm, weights.post_norm))
    assert ("head" in parts) == (weights.head is not None)
    assert ("experts" in parts) == (cfg.moe is not None)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_the_state_is_what_generating_takes(kv_dtype):
    cfg = decoders.SMALL
    state = init_decoder_state(cfg, batch=3, capacity=70, kv_dtype=kv_dtype)
    parts = memory.state_nbytes(memory.Load(cfg=cfg, batch=3, context=70, kv_dtype=kv_dtype))
    assert sum(parts.values()) == nbytes(new_rows(state, batch=3, vocab=cfg.vocab))
    assert parts["GDN state"] == nbytes(state.gdn)
    assert parts["KV cache"] == nbytes((state.keys, state.values))


def test_a_model_lacks_what_it_has_no_layers_for():
    cfg = decoders.SMALL
    attention_alone = dataclasses.replace(
        cfg, gdn=None, moe=None, layer_types=("full_attention",) * 2, mlp_types=("dense",) * 2
    )
    assert "GDN state" not in memory.state_nbytes(memory.Load(cfg=attention_alone))
    assert {"GDN", "experts"}.isdisjoint(memory.weights_nbytes(attention_alone, "f32"))
    gdn_alone = dataclasses.replace(cfg, moe=None, layer_types=("linear_attention",) * 2, mlp_types=("dense",) * 2)
    near, far = (memory.budget(memory.Load(cfg=gdn_alone, context=n)).total for n in (LARGEST_PIECE, 1 << 20))
    assert near == far
    [_, cards] = memory.tables(memory.Load(cfg=gdn_alone), memory.card("1GB"), None)
    assert dict(zip(cards[2], cards[3][0], strict=True))["largest_context"] is None


def test_the_27b_model_is_that_of_its_floor():
    """4.5 bits for each weight, and the published state of 157 MB."""
    found = memory.budget(a_load(context=1024))
    assert {name: round(n / MB) for name, n in found.weights.items()} == {
        "GDN": 3217, "attention": 944, "MLP": 9626, "embedding": 715, "head": 715, "norms": 3
    }  # fmt: skip
    assert round(found.state["GDN state"] / MB) == 157
    assert found.state["KV cache"] == 2 * 16 * 1024 * 4 * 256 * 4
    assert found.total == found.held + found.workspace
    assert found.held == sum(found.weights.values()) + sum(found.state.values())


# ----------------------------------------------------------------------------------------------------------------------
# Cards
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "answer"), [(100, 41), (41, 41), (40, 40), (1, 1)])
def test_the_largest_that_fits(limit, answer):
    assert memory.largest(lambda n: n <= 41, limit) == answer


def test_nothing_fits():
    assert memory.largest(lambda n: False) == 0


def test_what_is_said_to_fit_does_and_one_more_does_not():
    load, card = a_load(batch=2, context=3000), memory.card("24GB")
    [_, (_, _, columns, [row], verdict)] = memory.tables(load, card, None)
    said = dict(zip(columns, row, strict=True))
    assert verdict is True
    assert said["fits"] == "yes"

    def total(**changed):
        return memory.budget(dataclasses.replace(load, **changed)).total

    for name in ("context", "batch"):
        most = said[f"largest_{name}"]
        assert total(**{name: most}) <= card.usable < total(**{name: most + 1})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("1.5 GB", 1_500_000_000), ("512MiB", 2**29), ("4096", 4096)],
)
def test_bytes_are_taken_as_they_are(text, nbytes):
    assert memory.card(text) == memory.Card(text, nbytes, nbytes)


def test_a_card_by_name_gives_the_share_that_jax_takes(monkeypatch):
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    nbytes = memory.CARDS["H200"]
    assert memory.card("h200") == memory.Card("H200", nbytes, int(nbytes * 0.75))
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".95")
    assert memory.card("H200").usable == int(nbytes * 0.95)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "much")
    with pytest.raises(ValueError, match="XLA_CLIENT_MEM_FRACTION must be a number"):
        memory.card("H200")


@pytest.mark.parametrize("text", ["", "H2000", "24 apples", "-1", "0", "0GB", "nan", "1e9", "24PB"])
def test_what_is_no_card_is_refused_with_what_would_be(text):
    with pytest.raises(ValueError, match="a card must be one of B200, H200"):
        memory.card(text)


# ----------------------------------------------------------------------------------------------------------------------
# The command
# ----------------------------------------------------------------------------------------------------------------------


def test_budget_of_a_geometry(capsys):
    status, out, _ = run(capsys, "--geometry", "qwen3.5-27b", "--tier", "bf16", "--kv", "bfloat16")
    assert status == 0
    assert "tier bf16, batch 1, context 4096, keys and values in bfloat16" in out
    rows = {line.split()[0]: line.split() for line in out.split("Where it fits")[1].splitlines()[3:] if line.strip()}
    assert rows["H200"][3] == "yes"
    assert rows["RTX-5090"][3:] == ["no", rows["RTX-5090"][4], "0", "0"]


def test_budget_of_a_checkpoint_as_json(capsys):
    status, out, err = run(capsys, "--model", FIXTURES / decoders.TIED, "--context", 512, "--card", "1GB", "--json")
    report = json.loads(out)
    rows = {(row["kind"], row["part"]): row["bytes"] for row in report["sections"][0]["rows"]}
    [card] = report["sections"][1]["rows"]
    assert status == 0
    assert report["passed"] is True
    assert rows["weights", "GDN"] == memory.weights_nbytes(decoders.load(decoders.TIED)[0], "q4")["GDN"]
    assert rows["total", ""] == sum(n for (kind, _), n in rows.items() if kind != "total")
    assert card["largest_context"] == 512  # no further than the model was made for
    assert "warning" not in err


def test_a_load_that_does_not_fit_is_status_1(capsys):
    status, out, _ = run(capsys, "--tier", "f32", "--card", "RTX-4090")
    assert status == 1
    assert "gdn budget: FAILED (cards)" in out


@pytest.mark.parametrize("subject", [(), ("--model", FIXTURES / decoders.TIED)])
def test_a_context_beyond_the_models_own_is_a_warning(capsys, subject):
    status, _, err = run(capsys, *subject, "--context", 300_000, "--card", "200GB")
    assert status == 0
    assert "warning: context 300000 is beyond the" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--geometry", "27b"], "geometry must be one of qwen3.5-0.8b"),
        (["--card", "H2000"], "a card must be one of"),
        (["--model", "/nonexistent"], "no such file or directory"),
        (["--model", FIXTURES / "qwen3_5-f32", "--tier", "q4"], "needs matrices whose columns divide by 32"),
    ],
)
def test_a_request_that_cannot_be_met_is_status_2_with_a_reason(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU answers")
def test_a_cpu_does_not_say_how_much_memory_it_has(capsys):
    status, _, err = run(capsys, "--card", "auto")
    assert status == 2
    assert "does not say how much memory it has" in err


@pytest.mark.parametrize("arguments", [["--context", "0"], ["--batch", "-1"], ["--tier", "q8"], ["--kv", "float16"]])
def test_a_malformed_command_line_is_status_2(arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["budget", *arguments])
    assert stopped.value.code == 2


@pytest.mark.parametrize("longest", [None, "long", 0, True])
def test_a_checkpoint_need_not_say_how_long(tmp_path, longest):
    config = json.loads((FIXTURES / decoders.TIED / "config.json").read_text())
    config.pop("max_position_embeddings")
    if longest is not None:
        config["max_position_embeddings"] = longest
    for path in (FIXTURES / decoders.TIED).glob("*.safetensors"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    cfg, found = memory.of_checkpoint(tmp_path)
    assert isinstance(cfg, DecoderConfig)
    assert found is None


def test_nothing_at_a_path_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError):
        memory.of_checkpoint(tmp_path / "nothing")


# ----------------------------------------------------------------------------------------------------------------------
# On a card
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_card_holds_what_the_budget_says():
    """A model of about 1 GB: bytes in use after it and a state were made, within 3 %.

    In regions that grow as needed JAX's allocator rounds large arrays up, and counts what it rounds.
    """
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("0", "false"):
        pytest.skip("the allocator counts more than it was asked for unless it preallocates")
    device, cfg = jax.devices()[0], DECODERS["qwen3.5-2b"]
    load = memory.Load(cfg=cfg, tier="q4", batch=2, context=2048)
    before = device.memory_stats()["bytes_in_use"]
    weights = models.decoder_weights(0, cfg, "q4")
    rows = jax.block_until_ready(new_rows(init_decoder_state(cfg, batch=2, capacity=2048), batch=2, vocab=cfg.vocab))
    used = device.memory_stats()["bytes_in_use"] - before
    np.testing.assert_allclose(used, memory.budget(load).held, rtol=0.03)
    assert 0.8e9 < memory.budget(load).held < 1.5e9
    del weights, rows
