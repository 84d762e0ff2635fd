"""The error budget: which figure comes from weights, which from activations, and that the gates carry neither."""

import json

import numpy as np
import pytest

from gdn_jax import cli
from gdn_jax.evidence import budget
from gdn_jax.evidence.subjects import parse_geometry
from tests.support.models import save_model
from tests.support.paths import FIXTURES

GEOMETRY = "256,2,6,32,64,4"


def sections(**options):
    return {section.name: section for section in budget.run(budget.Options(**options))}


def cells(section):
    return [dict(zip(section.columns, row, strict=True)) for row in section.rows]


@pytest.fixture(scope="module")
def tables():
    return sections(geometry=GEOMETRY, tokens=6, stack=6)


@pytest.mark.slow
def test_every_tap_is_listed_and_the_gates_differ_in_nothing(tables):
    rows = {row["tap"]: row for row in cells(tables["operators"])}
    assert set(rows) == {"XC", "XCV", "Z", "Q", "K", "A", "B", "BETA", "G", "ON", "ONN", "OUT", "S", "HIST"}
    for tap, row in rows.items():
        figures = [row[f"{figure}_{token}"] for figure in ("max_rel", "rms_rel") for token in ("first", "last")]
        if tap in ("A", "B", "BETA", "G"):
            assert figures == [0, 0, 0, 0]
            assert row["exactly_0"] is True
        else:
            assert min(figures) > 1e-3
            assert row["exactly_0"] is None
    assert tables["operators"].passed


def test_a_gate_that_differs_fails_the_table(monkeypatch):
    tapped = budget.run_tapped

    def disturbed(subject, weights, tokens):
        found = tapped(subject, weights, tokens)
        if weights.tier == "q4":
            found[0]["BETA"] = np.nextafter(found[0]["BETA"], np.float32(2))
        return found

    monkeypatch.setattr(budget, "run_tapped", disturbed)
    assert sections(geometry=GEOMETRY, tokens=2)["operators"].passed is False


def test_weights_and_activations_are_told_apart(tables):
    """4-bit weights cost the same on any input; 8-bit activations cost little, and more on heavy tails."""
    for projection in ("qkv", "z", "out"):
        rows = {row["inputs"]: row for row in cells(tables["projections"]) if row["projection"] == projection}
        weights = [row["weights_rms_rel"] for row in rows.values()]
        assert max(weights) < 1.5 * min(weights)
        assert min(weights) > 7e-2
        assert 2.5e-3 < rows["uniform"]["activations_rms_rel"] < 5e-3
        assert rows["uniform"]["activations_rms_rel"] < rows["gaussian"]["activations_rms_rel"]
        assert rows["gaussian"]["activations_rms_rel"] < rows["heavy"]["activations_rms_rel"] < 2e-2


def test_the_error_grows_slowly_through_a_stack(tables):
    rows = cells(tables["stack"])
    assert [row["after_layer"] for row in rows] == list(range(6))
    assert rows[0]["every_second_layer_q4"] == 0  # its first layer is float32
    assert all(0 < row["every_second_layer_q4"] < row["every_layer_q4"] for row in rows[1:])


def test_the_budget_of_a_model(capsys, tmp_path):
    path = save_model(tmp_path / "model", parse_geometry("96,1,2,20,32,4")[1], layers=2)
    status = cli.main(["trace", "--model", str(path), "--layers", "0,1", "--tokens", "3", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == 0
    assert [section["name"] for section in document["sections"]] == ["operators", "projections"] * 2
    assert "model layer 1 q4 heavy" in document["sections"][2]["title"]


@pytest.mark.parametrize("command", ["trace", "check"])
def test_a_model_that_cannot_have_the_tier_is_refused(capsys, command):
    path = str(FIXTURES / "qwen3_5-f32")
    assert cli.main([command, "--model", path, *(["--tier", "q4"] if command == "check" else [])]) == 2
    assert "columns divide by 32: D=32, H·V=120" in capsys.readouterr().err


def test_recorded_activations_are_used(tmp_path):
    xs = np.linspace(-2, 2, 4 * 1 * 256, dtype=np.float32).reshape(4, 1, 256)
    np.save(tmp_path / "x.npy", xs)
    found = sections(geometry=GEOMETRY, activations=tmp_path / "x.npy")
    assert "first and last of 4 tokens" in found["operators"].title
    assert {row["tap"]: row for row in cells(found["operators"])}["XC"]["max_first"] > 0


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 1, 128), np.float32), "D=256"),
        (np.zeros((4, 256), np.float32), r"float32 \[T, B, D\]"),
        (np.zeros((4, 1, 256)), r"float32 \[T, B, D\]"),
        (np.full((4, 1, 256), np.nan, np.float32), "NaN or inf"),
    ],
)
def test_malformed_activations_are_refused(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match=message):
        sections(geometry=GEOMETRY, activations=tmp_path / "x.npy")


@pytest.mark.parametrize("arguments", [["--layers", "x"], ["--layers", "-1"], ["--tokens", "0"]])
def test_a_malformed_command_line_is_status_2(arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["trace", *arguments])
    assert stopped.value.code == 2
