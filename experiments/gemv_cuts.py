"""Time the tensor core form of the 4-bit product in several cuts, as `gdn bench gemv` times what is chosen.

    python -m experiments.gemv_cuts RESULTS.jsonl [--shapes 16384x5120,5120x6144] [--batches 4,8] [--cuts 32:2,32:3]

A cut is rows of W per block : steps in flight. Appends a line for every case: microseconds of the kernel, the split of
x and the loop taken off, the distance from the 10th to the 90th percentile, and the error against float64. Three limbs.
"""

import argparse
import functools
import json
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from experiments.record import origin
from gdn_jax import ops
from gdn_jax.bench import operands
from gdn_jax.bench.gemv import limbs_step, product_step, stack_error
from gdn_jax.bench.timing import Effort, Timing, kernels_for, layers_for, measure
from gdn_jax.q4 import Q4Tensor
from pallas_kernels.q4_gemv import MosaicTile, q4_gemv

SHAPES = "16384x5120,5120x6144,34816x5120,5120x17408,248320x5120"
CUTS = "16:4,16:6,32:2,32:3,32:4,64:2,64:3"

type Cut = tuple[int, int]
type Product = Callable[[Q4Tensor, jax.Array, jax.Array], jax.Array]


def main(results: pathlib.Path, shapes: list[tuple[int, int]], batches: list[int], cuts: list[Cut], effort: Effort):
    with results.open("a") as file:
        for batch in batches:
            for shape in shapes:
                products = {cut: functools.partial(product, cut=cut) for cut in cuts}
                for cut, row in measured(shape, batch, products, effort):
                    line = {**origin(), "form": "mosaic", "cut": cut, **row}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    print(
                        shape, batch, cut, {name: row.get(name) for name in ("us", "spread_us", "max_rel")}, flush=True
                    )


def product(w: Q4Tensor, x: jax.Array, layer: jax.Array, *, cut: Cut) -> jax.Array:
    """The whole operation, from x in float32, in one cut."""
    made = ops.with_limbs(x, "exact", interpret=False)
    pairs = ((w.codes, w.scales),)
    [y] = q4_gemv(pairs, made.digits, made.scales, jnp.reshape(layer, 1), backend="mosaic", tile=MosaicTile(*cut))
    return y


def measured[Name](shape: tuple[int, int], batch: int, products: Mapping[Name, Product], effort: Effort):
    """(name, figures) of every product of one shape [N, I]: those with an error above 1e-6 are not timed."""
    rows, columns = shape
    nbytes = rows * columns * 9 // 16
    layers = layers_for(nbytes, effort)
    w, x = operands.q4_stack(1, layers, rows, columns), operands.activations(2, (batch, columns))
    errors = {name: stack_error(w, x, product, effort) for name, product in products.items()}
    right = [name for name, error in errors.items() if error <= 1e-6]
    steps = {"limbs": limbs_step("exact", "triton"), **{name: product_step(w, products[name]) for name in right}}
    kernels = kernels_for(nbytes, effort)
    samples = measure(steps, jnp.copy(x), layers=layers, kernels=kernels, effort=effort)
    for name, error in errors.items():
        row = {"N": rows, "K": columns, "batch": batch, "limbs": 3, "layers": layers, "max_rel": error}
        if name in samples:
            timing = Timing.between(samples[name], samples["limbs"], kernels)
            row |= {"us": timing.us, "spread_us": timing.us_p90 - timing.us_p10}
        yield name, row


def pairs(text: str, between: str) -> list[tuple[int, int]]:
    """Two integers of each part of a list."""
    return [(int(first), int(second)) for first, second in (part.split(between) for part in text.split(","))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--batches", default="2,4,8")
    parser.add_argument("--cuts", default=CUTS)
    parser.add_argument("--seconds", type=float, default=0.3)
    given = parser.parse_args()
    main(
        given.results,
        pairs(given.shapes, "x"),
        [int(batch) for batch in given.batches.split(",")],
        pairs(given.cuts, ":"),
        Effort.here(given.seconds),
    )
