"""The README's code runs, its commands exist, and its figures are those of the recorded runs."""

import json
import pathlib
import re

import pytest

from gdn_jax import cli

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_code_runs():
    """In order, one block after the other, as a reader would."""
    assert len(BLOCKS) == 3
    names = {}
    for code in BLOCKS:
        exec(compile(code, "README.md", "exec"), names)


def test_every_command_is_one_of_ours():
    commands = set(
        re.findall(r"gdn (check|info|trace|convert|[a-z]+) ", "\n".join(re.findall(r"^\$ .*", README, re.M)))
    )
    assert commands
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        assert stopped.value.code == 0


def test_ci_calls_the_commands_of_the_readme():
    script = (ROOT / ".ci/run").read_text()
    for command in ("uv run gdn check", "uv run pytest"):
        assert f"$ {command}" in README
        assert re.search(rf"^{command}$", script, re.M)


def test_figures_are_those_of_the_recorded_runs():
    """Every figure of the table of measurements stands in a recorded run, and names it."""
    results = ROOT / "experiments/results"
    rows = re.findall(r"^\| .* \| (.*) \| (\S+\.jsonl):(\d+) \|$", README, re.M)
    assert rows
    for figures, file, line in rows:
        record = json.loads((results / file).read_text().splitlines()[int(line) - 1])
        assert not record["commit"].endswith("-dirty")
        if "us" not in record:
            assert record["status"] == 0
            assert record["report"]["passed"] is True
            continue
        assert record["passed"] is True if "passed" in record else record["max_rel"] <= 1e-6
        stated = re.findall(r"(\d+\.\d+) (µs|ms|tok/s)", figures)
        assert stated
        for figure, unit in stated:
            assert figure == f"{record['us']:.1f}" if unit == "µs" else f"{figure} {unit}" in record["note"]
        for share in re.findall(r"(\d+) %", figures):
            assert int(share) == round(100 * record["fraction"])
