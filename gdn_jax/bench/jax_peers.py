"""Peers in JAX that have kernels of their own, in a process of their own: `python -m gdn_jax.bench.jax_peers`.

It answers cases as `dialogue.answer_lines` does, each JSON with `seconds` and `warm` of the effort: bytes, errors, and
the times as those of ours are taken.
"""

import dataclasses
import functools
import importlib
from typing import Any

from gdn_jax.bench import chunk_case, gate
from gdn_jax.bench.chunk_case import Form, Sequences
from gdn_jax.bench.dialogue import answer_lines
from gdn_jax.bench.timing import Effort

__all__ = ["main"]


def main() -> None:
    """Answer every line of stdin."""
    importlib.import_module("jla.ops")
    answer_lines(_jla_chunk)


def _jla_chunk(asked: dict[str, Any]) -> dict[str, Any]:
    """`linear_attention("gated_deltanet")` of jax-linear-attention on its Hopper kernels, operands [B, T, …].

    Its gradients are those of kernels too.
    """
    ops, version = importlib.import_module("jla.ops"), importlib.import_module("jla").__version__
    case = Sequences(*(asked[name] for name in Sequences._fields))
    effort = dataclasses.replace(Effort.here(asked["seconds"]), warm=asked["warm"])
    attend = functools.partial(ops.linear_attention, "gated_deltanet", impl="mosaic_gpu", scale=1.0)

    def launch(s, q, k, v, beta, g):
        return attend(q, k, v, g=g, beta=beta, initial_state=s, output_final_state=True)

    given = chunk_case.operands_of(case, "bf16")
    rule = chunk_case.passes(launch, case)
    programs = chunk_case.compiled(Form.with_batch_first(rule, given), case, effort)
    error, rms = chunk_case.errors(programs, chunk_case.exact(given), "bf16")
    measured = {"nbytes": chunk_case.moved(programs), "max_rel": error, "rms_rel": rms}
    if error <= gate.BOUNDS[case.gate, "bf16"]:
        measured |= chunk_case.timed(programs, effort)._asdict()
    return {**measured, "version": f"jax-linear-attention {version}"}


if __name__ == "__main__":
    main()
