"""`gdn trace --decoder`: logits of a whole model by form of its weights, against f32."""

import dataclasses
import json

import numpy as np
import pytest

from gdn_jax import cli
from gdn_jax.decoder.weights import read_decoder
from gdn_jax.evidence import drift
from tests.support import decoders
from tests.support.paths import FIXTURES

CFG = dataclasses.replace(
    decoders.SMALL, layer_types=("linear_attention", "full_attention"), mlp_types=("dense", "dense"), moe=None
)


@pytest.fixture
def small(monkeypatch):
    """A model of two layers instead of the file that is named; GDN alone stands for the parts."""
    held = decoders.Held(decoders.hf_config(CFG), decoders.draw(CFG, "tests/drift"))
    monkeypatch.setattr(drift, "load_decoder", lambda path, **given: read_decoder(held, **given))
    monkeypatch.setattr(drift, "_PARTS", {"q4 GDN": ("gdn",), "q4 experts": ("moe",)})


def run(capsys, *arguments):
    status = cli.main(["trace", *map(str, arguments)])
    return status, *capsys.readouterr()


@pytest.mark.slow
def test_drift_as_json(capsys, small):
    status, out, _ = run(capsys, "--decoder", "model", "--tokens", 5, "--json")
    report = json.loads(out)
    summary, tokens = (section["rows"] for section in report["sections"])
    rows = {row["weights"]: row for row in summary}
    assert status == 0
    assert list(rows) == ["f32 again", "bf16", "q4", "q4 GDN"]  # it has no experts
    assert rows["f32 again"]["same_bits"] is True
    assert rows["f32 again"]["worst"] == 0
    assert rows["f32 again"]["greedy_agreement"] == "5/5"
    assert 1e-4 < rows["bf16"]["median"] < 5e-2 < rows["q4"]["median"] < 1
    assert 1e-3 < rows["q4 GDN"]["median"] < rows["q4"]["median"]
    assert [row["token"] for row in tokens] == list(range(5))
    for name, row in rows.items():
        errors = [token[name] for token in tokens]
        assert (row["rms_rel_first"], row["last"], row["worst"]) == (errors[0], errors[-1], max(errors))
        assert row["median"] == np.median(errors)


def test_a_replay_that_differs_fails(capsys, small, monkeypatch):
    monkeypatch.setattr(drift, "_forms", lambda *_: iter(()))
    right, calls = drift._logits, []

    def shaky(*arguments):
        calls.append(arguments)
        return right(*arguments) * np.float32(1 + 2**-20 * (len(calls) - 1))

    monkeypatch.setattr(drift, "_logits", shaky)
    status, out, _ = run(capsys, "--decoder", "model", "--tokens", 2)
    assert status == 1
    assert "gdn trace: FAILED (drift)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decoder", "/nonexistent"], "no such file or directory"),
        (["--decoder", FIXTURES / decoders.TIED, "--stack", 3], "belong to single layers, not to --decoder"),
        (["--decoder", FIXTURES / decoders.TIED, "--layers", "1"], "belong to single layers, not to --decoder"),
    ],
)
def test_a_request_that_cannot_be_met_is_status_2_with_a_reason(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_a_model_that_cannot_be_4_bit_is_refused(monkeypatch):
    monkeypatch.setattr(drift, "_logits", lambda *_: np.zeros((2, 3), np.float32))
    monkeypatch.setattr(drift, "_continued", lambda *_: None)
    with pytest.raises(NotImplementedError, match="divide by 32"):
        list(drift.run(drift.Options(model=FIXTURES / "qwen3_5-f32", tokens=2)))
