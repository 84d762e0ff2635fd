"""The self-check: it passes where the kernels are right, and sees every operation go wrong."""

import json

import jax
import jax.numpy as jnp
import pytest

from gdn_jax import cli, ops, self_check
from gdn_jax.errors import UnsupportedError
from gdn_jax.self_check import Check

OPERATIONS = [*(f"project, batch {batch}" for batch in (1, 2, 4, 8)), "project_rows", "layer_input", "delta_layer"]
OPERATIONS += ["delta_chunks", "delta_window", "attend"]


def test_every_operation_agrees_here():
    checks = self_check.self_check()
    assert [check.operation for check in checks] == OPERATIONS
    for check in checks:
        assert check.passed, check
        assert check.implementation in (("interpret",) if jax.default_backend() == "cpu" else ("triton", "mosaic"))


def test_a_wrong_result_is_seen_wherever_it_arises(monkeypatch):
    """One element of the last result of each operation is off."""
    look = self_check.look

    def off(result):
        leaves, tree = jax.tree.flatten(result)
        leaves[-1] = leaves[-1].at[(-1,) * leaves[-1].ndim].add(1e-3)
        return jax.tree.unflatten(tree, leaves)

    def wrong(function):
        return lambda *operands, **options: off(function(*operands, **options))

    def wrong_where_named(function):
        """By XLA, which is faster, and off unless XLA was asked for."""

        def either(*operands, implementation, **options):
            result = function(*operands, implementation="xla", **options)
            return result if implementation == "xla" else off(result)

        return either

    def wrong_take(*operands):
        state = take(*operands[:-1], "xla")
        return state if operands[-1] == "xla" else off(state)

    take = self_check.take
    for name in ("project", "project_rows", "delta_chunks"):
        monkeypatch.setattr(ops, name, wrong_where_named(getattr(ops, name)))
    for name in ("layer_input", "delta_layer"):
        monkeypatch.setattr(ops, name, wrong(getattr(ops, name)))
    monkeypatch.setattr(self_check, "take", wrong_take)
    monkeypatch.setattr(self_check, "look", lambda *operands: look(*operands[:-1], "xla"))
    monkeypatch.setattr(self_check, "attention_step", wrong_where_named(self_check.attention_step))
    assert [check.operation for check in self_check.self_check("interpret") if not check.passed] == OPERATIONS


def test_a_nan_disagrees():
    assert float(self_check._max_rel(jnp.array([1.0, jnp.nan]), jnp.ones(2))) == float("inf")
    assert not Check("project", "triton", float("nan")).passed


def test_a_kernel_that_does_not_run_is_a_disagreement(monkeypatch):
    def fail(*operands, **options):
        raise RuntimeError("no compiler\nand a long story")

    for name in ("layer_input", "delta_layer"):
        monkeypatch.setattr(ops, name, fail)
    for part in ("_products", "_chunks", "_window", "_attention"):
        monkeypatch.setattr(self_check, part, lambda implementation: [])
    checks = self_check.self_check("interpret")
    assert [check.passed for check in checks] == [False, False]
    assert checks[-1].note == "RuntimeError: no compiler"


def test_what_there_is_nothing_to_compare_with_is_refused():
    with pytest.raises(ValueError, match="is what kernels are compared with"):
        self_check.self_check("xla")
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        self_check.self_check("cuda")
    if jax.default_backend() == "cpu":
        with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU"):
            self_check.self_check("triton")


@pytest.mark.parametrize("good", [True, False])
def test_info_shows_it_and_its_verdict_is_the_exit_status(capsys, monkeypatch, good):
    checks = (Check("project", "triton", 1e-7), Check("delta_layer", "triton", 1e-7 if good else float("inf"), "why"))
    monkeypatch.setattr(self_check, "self_check", lambda: checks)
    assert cli.main(["info", "--self-check"]) == (0 if good else 1)
    out = capsys.readouterr().out
    assert "self-check      project: triton agrees with xla (max_rel 1.0e-07)" in out
    assert ("delta_layer: triton DISAGREES with xla (max_rel inf): why" in out) != good
    assert cli.main(["info", "--self-check", "--json"]) == (0 if good else 1)
    found = json.loads(capsys.readouterr().out)["self_check"]
    assert [row["passed"] for row in found] == [True, good]
    assert found[1]["error"] == (1e-7 if good else "inf")


def test_info_without_it_runs_no_kernel(capsys, monkeypatch):
    monkeypatch.setattr(self_check, "self_check", lambda: pytest.fail("not asked for"))
    assert cli.main(["info"]) == 0
    assert "self-check" not in capsys.readouterr().out
