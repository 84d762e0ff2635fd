"""All tokens of sequences by the chunked delta rule: a chain of dependent products, chunk after chunk.

With gradients it is two such chains, one back; what is timed is then both, as a step of training has them.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gdn_jax import ops
from gdn_jax.bench import chunk_case, gate, peers
from gdn_jax.bench.chunk_case import Form, Programs, Sequences
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row
from gdn_jax.delta_pieces import number_of_pieces

__all__ = ["run", "with_rates"]


class Asked(NamedTuple):
    """One row to be."""

    case: Sequences
    precision: str
    implementation: str
    pieces: int
    """So many as are computed, which a short sequence has fewer of than were asked for."""


def run(request: Request) -> Iterator[Row]:
    """For every batch, length and precision the implementation asked for, or the chosen one and XLA; then the peers.

    All of it once more with gradients where they are asked for.
    """
    if request.peers:
        peers.begin("chunk")
    for batch in request.batches:
        cfg = request.cfg
        cases = [
            Sequences(batch, tokens, cfg.key_heads, cfg.value_heads, cfg.key_dim, cfg.value_dim, backward)
            for backward in sorted({False, request.backward})
            for tokens in request.lengths
        ]
        yield from _measured(cases, request)
        if request.peers:
            # The longest first: what a peer's autotuner finds in its first case it may keep for all.
            for case in sorted(cases, key=lambda case: -case.tokens):
                yield from (with_rates(row, case) for row in peers.rows("chunk", case, request.effort))


def with_rates(row: Row, case: Sequences) -> Row:
    """The row with its time per chunk and its FLOP per second; in words too, with a peer's version."""
    per_chunk = rate = None
    note = [row.note] if row.note else []
    if row.timing and row.timing.us > 0:
        per_chunk = row.timing.us / case.chunks
        rate = chunk_case.flop(case) / row.timing.us / 1e6
        note.append(f"{per_chunk:.3g} µs a chunk, {rate:.3g} TFLOP/s, rms {row.details['rms_rel']:.1e}")
    if version := row.details.get("version"):
        note.append(version)
    details = {"tokens": case.tokens, "backward": case.backward, "us_per_chunk": per_chunk, "tflop_per_s": rate}
    return dataclasses.replace(row, note=", ".join(note), details={**row.details, **details})


def _measured(cases: list[Sequences], request: Request) -> Iterator[Row]:
    """All programs are compiled first, at once: that takes longer than running them."""
    given = {
        (case, precision): chunk_case.operands_of(case, precision) for case in cases for precision in request.precisions
    }
    asked = [
        Asked(case, precision, name, number_of_pieces(case.tokens, request.pieces))
        for (case, precision), inputs in given.items()
        for name in _implementations(case, precision, inputs[3], request)
    ]

    def compiled(one: Asked) -> Programs:
        rule = chunk_case.passes(_rule(*one[1:]), one.case)
        form = Form(rule=rule, inputs=given[one.case, one.precision])
        return chunk_case.compiled(form, one.case, request.effort)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = dict(zip(asked, pool.map(compiled, asked), strict=True))
    for (case, precision), inputs in given.items():
        reference = chunk_case.exact(inputs)
        for one, ready in programs.items():
            if one[:2] == (case, precision):
                yield with_rates(_row(one, ready, reference, request), case)


def _implementations(case: Sequences, precision: str, v: object, request: Request) -> tuple[str, ...]:
    """Those asked for, or the chosen one and, if that is another one, XLA."""
    choice = ops.choose_delta_chunks(v, case.key_heads, case.key_dim, precision, request.implementation, request.pieces)
    return tuple(dict.fromkeys((choice.implementation, request.implementation or "xla")))


def _rule(precision: str, implementation: str, pieces: int = 1) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`ops.delta_chunks` of q, k and v that are bfloat16 at "bf16", as their producers in a layer may write them.

    It takes float32, which a compiler sees through where a kernel rounds at once; o is float32.
    """

    def rule(s, q, k, v, beta, g):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        how = {"precision": precision, "implementation": implementation, "pieces": pieces}
        return ops.delta_chunks(s, q, k, v, beta, g, **how)

    return rule


def _row(one: Asked, programs: Programs, reference: chunk_case.Exact, request: Request) -> Row:
    case, precision, _, pieces = one
    error, rms = chunk_case.errors(programs, reference, precision)
    bound = gate.BOUNDS[case.gate, precision]
    right = error <= bound
    return Row(
        subject="chunk",
        case=str(case) if pieces == 1 else f"{case}, in {pieces} pieces",
        batch=case.batch,
        implementation=programs.used,
        precision=precision,
        nbytes=chunk_case.moved(programs),
        max_rel=error,
        bound=bound,
        timing=chunk_case.timed(programs, request.effort) if right else None,
        note="" if right else "not timed: wrong result",
        details={"rms_rel": rms, "rms_bound": gate.BOUNDS[f"{case.gate} rms", precision], "pieces": pieces},
    )
