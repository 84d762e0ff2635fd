"""y = W x with 4-bit weights: the whole operation, and the kernel alone, without splitting x into limbs."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import ops
from gdn_jax.bench import gate, operands, peers
from gdn_jax.bench.naming import implementation_of
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Effort, Step, Timing, kernels_for, layers_for, measure, touch
from gdn_jax.limbs import LIMBS, split_limbs
from gdn_jax.q4 import Q4Tensor

__all__ = ["limbs_step", "product_of", "product_step", "run", "stack_error"]

type Product = Callable[[Q4Tensor, jax.Array, jax.Array], jax.Array]
"""(a stack [L, N, I], x [B, I], the layer) -> y [B, N]."""


def run(request: Request) -> Iterator[Row]:
    """For every shape and batch two rows per precision, then the peers.

    "product" is `ops.project_many`, from x in float32; "kernel" the same less the time of splitting x alone, which is
    what the product costs where the producer of x hands it over in limbs. XLA's form has no kernel to tell apart.
    """
    for rows, columns in request.shapes:
        for batch in request.batches:
            yield from _measured(rows, columns, batch, request)
            if request.peers:
                yield from peers.rows("gemv", peers.Product(rows, columns, batch), request.effort)


def product_of(precision: str, implementation: str | None) -> Product:
    """`ops.project_many` of one matrix."""

    def product(w, x, layer):
        [y] = ops.project_many((w,), x, precision=precision, implementation=implementation, layer=layer)
        return y

    return product


def product_step(w: Q4Tensor, product: Product) -> Step:
    """A product of w with the carried x [B, I]."""
    return Step(lambda x, layer, w: touch(x, product(w, x, layer)), w)


def limbs_step(precision: str, implementation: str) -> Step:
    """Splitting the carried x [B, I] into limbs as that implementation does it, and nothing else."""

    def advance(x, layer, _):
        if implementation == "xla":
            return touch(x, *split_limbs(x, LIMBS[precision]))
        made = ops.with_limbs(x, precision, interpret=implementation == "interpret")
        return touch(x, made.digits, made.scales)

    return Step(advance)


def stack_error(w: Q4Tensor, x: jax.Array, product: Product, effort: Effort) -> float:
    """The worst max_rel of `product` on the first and the last layer of a stack [L, N, I], on a sample of its rows."""
    layers, size, _ = w.shape
    chosen = gate.sample(size)
    product = jax.jit(product, compiler_options=dict(effort.options))
    worst = 0.0
    for layer in (0, layers - 1):
        y = product(w, x, jnp.int32(layer))
        if not bool(jnp.isfinite(y).all()):  # of all rows, not of the sample alone
            return float("inf")
        taken = Q4Tensor(w.codes[layer, chosen], w.scales[layer, chosen]).to_logical()
        exact = gate.unpacked(taken.codes, taken.scales)
        worst = max(worst, gate.product_error(np.asarray(y[:, chosen]), exact, np.asarray(x)))
    return worst


def _measured(rows: int, columns: int, batch: int, request: Request) -> Iterator[Row]:
    effort = request.effort
    one = operands.nbytes(jax.eval_shape(lambda: operands.q4_stack(0, 1, rows, columns)))
    layers = layers_for(one, effort)
    w = operands.q4_stack(1, layers, rows, columns)
    x = operands.activations(2, (batch, columns))
    nbytes = one + x.nbytes + 4 * batch * rows
    products = {precision: product_of(precision, request.implementation) for precision in request.precisions}
    errors = {precision: stack_error(w, x, product, effort) for precision, product in products.items()}
    green = [precision for precision in request.precisions if errors[precision] <= gate.BOUNDS["gemv", precision]]
    used = {precision: implementation_of(product_step(w, product), x) for precision, product in products.items()}
    steps = {"glue": Step(lambda x, *_: touch(x, x))}
    for precision in green:
        steps[f"limbs {precision}"] = limbs_step(precision, used[precision])
        steps[precision] = product_step(w, products[precision])
    kernels = kernels_for(nbytes, effort)
    samples = measure(steps, jnp.copy(x), layers=layers, kernels=kernels, effort=effort) if green else {}
    for precision in request.precisions:
        for part, without in (("product", "glue"), ("kernel", f"limbs {precision}")):
            is_timed = precision in samples
            if part == "kernel" and (used[precision] == "xla" or not is_timed):
                continue
            yield Row(
                subject="gemv",
                case=f"{rows}x{columns} {part}",
                batch=batch,
                implementation=used[precision],
                precision=precision,
                nbytes=nbytes,
                max_rel=errors[precision],
                bound=gate.BOUNDS["gemv", precision],
                timing=Timing.between(samples[precision], samples[without], kernels) if is_timed else None,
                note="" if is_timed else "not timed: wrong result",
                details={"layers": layers},
            )
