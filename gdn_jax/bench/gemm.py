"""Y = W X with 4-bit weights for the many rows of a prompt: bounded by the matrix units, not by the memory."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from gdn_jax import ops
from gdn_jax.bench import gate, gemv, operands, peers
from gdn_jax.bench.naming import implementation_of
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Effort, Step, Timing, kernels_for, layers_for, measure, touch

__all__ = ["DENSE_BF16", "flop", "product_of", "run", "with_rates"]

DENSE_BF16 = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA GH200 480GB": 989e12}
"""Device -> FLOP per second of its matrix units on dense bfloat16, as its maker states them."""

# Only to choose how many kernels a program runs: so many FLOP take as long as moving a byte.
_FLOP_PER_BYTE = 100
_FEWEST_KERNELS = 16


def run(request: Request) -> Iterator[Row]:
    """For every shape and number of rows (`batches`) a row per precision, then the peers.

    A row is `ops.project_rows` from x in float32, whatever it does to x included.
    """
    for rows, columns in request.shapes:
        for batch in request.batches:
            case = peers.Product(rows, columns, batch)
            yield from (with_rates(row, case) for row in _measured(case, request))
            if request.peers:
                yield from (with_rates(row, case) for row in peers.rows("gemm", case, request.effort))


def flop(case: peers.Product) -> int:
    """Multiplications and additions of the product itself, in however many numbers an x is multiplied."""
    return 2 * case.rows * case.columns * case.batch


def with_rates(row: Row, case: peers.Product) -> Row:
    """The row with its FLOP per second, their share of the card's, and the rate at which 4-bit weights are used up."""
    rate = share = weights = None
    if row.timing and row.timing.us > 0:
        rate = flop(case) / row.timing.us * 1e6
        share = rate / DENSE_BF16[kind] if (kind := jax.devices()[0].device_kind) in DENSE_BF16 else None
        weights = _weight_bytes(case) / row.timing.us / 1e3
    note = row.note
    if rate:
        note = f"{rate / 1e12:.3g} TFLOP/s" + (f", {share:.0%} of dense bfloat16" if share else "")
    details = {"tflop_per_s": rate and rate / 1e12, "fraction_of_bf16": share, "weights_gb_per_s": weights}
    return dataclasses.replace(row, note=note, details={**row.details, **details})


def product_of(precision: str, implementation: str | None) -> gemv.Product:
    """`ops.project_rows` of one matrix."""

    def product(w, x, layer):
        [y] = ops.project_rows((w,), x, precision=precision, implementation=implementation, layer=layer)
        return y

    return product


def _weight_bytes(case: peers.Product) -> int:
    """Of one matrix in 4 bits."""
    return operands.nbytes(jax.eval_shape(lambda: operands.q4_stack(0, 1, case.rows, case.columns)))


def _kernels(case: peers.Product, nbytes: int, effort: Effort) -> int:
    few = dataclasses.replace(effort, kernels=min(effort.kernels, _FEWEST_KERNELS))
    return kernels_for(nbytes + flop(case) // _FLOP_PER_BYTE, few)


def _measured(case: peers.Product, request: Request) -> Iterator[Row]:
    effort = request.effort
    layers = layers_for(_weight_bytes(case), effort)
    w = operands.q4_stack(1, layers, case.rows, case.columns)
    x = operands.activations(2, (case.batch, case.columns))
    nbytes = _weight_bytes(case) + x.nbytes + 4 * case.batch * case.rows
    products = {precision: product_of(precision, request.implementation) for precision in request.precisions}
    errors = {precision: gemv.stack_error(w, x, product, effort) for precision, product in products.items()}
    steps = {precision: gemv.product_step(w, product) for precision, product in products.items()}
    green = {name: step for name, step in steps.items() if errors[name] <= gate.BOUNDS["gemm", name]}
    kernels = _kernels(case, nbytes, effort)
    samples = {}
    if green:
        green["glue"] = Step(lambda x, *_: touch(x, x))
        samples = measure(green, jnp.copy(x), layers=layers, kernels=kernels, effort=effort)
    for precision, step in steps.items():
        timed = precision in samples
        yield Row(
            subject="gemm",
            case=str(case),
            batch=case.batch,
            implementation=implementation_of(step, x),
            precision=precision,
            nbytes=nbytes,
            max_rel=errors[precision],
            bound=gate.BOUNDS["gemm", precision],
            timing=Timing.between(samples[precision], samples["glue"], kernels) if timed else None,
            note="" if timed else "not timed: wrong result",
            details={"layers": layers},
        )
