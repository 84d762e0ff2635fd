"""The commands as a user calls them: output, JSON, exit status, errors."""

import json
import subprocess
import sys

import jax
import pytest

from gdn_jax import cli, environment
from gdn_jax.evidence import bounds
from gdn_jax.evidence.subjects import parse_geometry
from tests.support.models import save_model
from tests.support.paths import FIXTURES, MODELS

SMALL = ("check", "--geometry", "40,2,6,12,20,4")


def run(capsys, *arguments):
    status = cli.main(arguments)
    return status, *capsys.readouterr()


def test_check_prints_every_table_and_passes(capsys):
    status, out, _ = run(capsys, *SMALL, "--tokens", "20", "--batch", "3", "--inputs", "heavy")
    assert status == 0
    assert out.count("[PASS]") == 5
    assert out.count("[info]") == 2
    assert "max_abs_err  max_abs_ref  max_rel" in out
    assert out.rstrip().endswith("gdn check: passed")


def test_check_as_json_holds_every_row(capsys):
    status, out, progress = run(capsys, *SMALL, "--tokens", "20", "--json")
    report = json.loads(out)
    sections = {section["name"]: section for section in report["sections"]}
    assert status == 0
    assert report["passed"] is True
    assert [row["token"] for row in sections["per_token"]["rows"]] == list(range(20))
    assert {row["tap"] for row in sections["per_operator"]["rows"]} >= {"XC", "XCV", "BETA", "G", "ON", "S", "HIST"}
    assert all(row["differing"] == 0 for name in ("replay", "addressing") for row in sections[name]["rows"])
    assert report["environment"]["packages"]["jax"]
    assert "per_token: PASS" in progress


@pytest.mark.parametrize("bound", ["LAYER", "OPERATOR"])
def test_a_failed_verdict_is_the_exit_status(capsys, monkeypatch, bound):
    monkeypatch.setattr(bounds, bound, 0.0)
    status, out, _ = run(capsys, *SMALL)
    assert status == 1
    assert "FAILED (per_" in out.rstrip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("quantiser", ["absmax", "q4_0"])
def test_check_of_4_bit_weights(capsys, tmp_path, quantiser):
    path = save_model(tmp_path / "model", parse_geometry("96,2,6,20,32,4")[1], layers=2)
    tier = ("--tier", "q4", "--quantiser", quantiser, "--inputs", "heavy", "--batch", "2")
    for subject in (("--geometry", "96,2,6,20,32,4"), ("--model", str(path), "--layer", "1")):
        status, out, _ = run(capsys, "check", *subject, *tier)
        assert status == 0, out


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_check_of_a_model_saved_by_transformers(capsys, model):
    status, out, _ = run(capsys, "check", "--model", str(FIXTURES / model), "--layer", "3", "--batch", "2")
    assert status == 0, out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--model", "/nonexistent"], "no such file"),
        (["check", "--model", str(FIXTURES / MODELS[0]), "--layer", "4"], "0 … 3"),
        (["check", "--geometry", "27b"], "geometry must be one of qwen3.5-0.8b"),
        (["check", "--geometry", "40,4,6,12,20,4"], "multiple of key_heads"),
        (["check", "--geometry", "40,2,6,12,20,0"], "conv_width must be at least 1"),
        (["check", "--geometry", "40,2,6,12,20,4", "--long"], "--long belongs to"),
    ],
)
def test_a_request_that_cannot_be_met_is_status_2_with_a_reason(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("gdn check: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["info", "--help"]])
def test_every_command_has_help(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 0
    assert "usage: gdn" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["check", "--tokens", "0"], ["check", "--tokens", "x"]])
def test_a_malformed_command_line_is_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nand more"),
        MemoryError("Unable to allocate 9 bytes"),
        MemoryError(),
    ],
    ids=["device", "host", "no reason"],
)
def test_memory_that_is_not_there_is_a_request_that_cannot_be_met(capsys, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(environment, "describe", fail)
    assert cli.main(["info"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gdn info: not enough memory (")
    assert said.count("\n") == 1
    assert "ask for fewer tokens" in said


def test_what_is_no_lack_of_memory_is_not_taken_for_one(monkeypatch):
    def fail():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(environment, "describe", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        cli.main(["info"])


def test_info_as_text_and_json(capsys):
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert "delta_layer" in out
    assert "qwen3.5-27b" in out
    status, out, _ = run(capsys, "info", "--json")
    assert status == 0
    assert json.loads(out)["implementations"]["delta_layer"] == "xla"


def test_info_warns_of_a_card_that_jax_does_not_see(capsys, monkeypatch):
    monkeypatch.setattr(environment, "gpu_is_present", lambda: True)
    monkeypatch.setattr(environment.jax, "default_backend", lambda: "cpu")
    status, _, err = run(capsys, "info")
    assert status == 0
    assert "a GPU is present" in err.replace("an NVIDIA", "a")


def test_the_command_is_installed():
    ran = subprocess.run([sys.executable, "-m", "gdn_jax.cli", *SMALL], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
