"""What a large value leaves behind that is overwritten under the same key: a chunk against the serial rule.

    python -m experiments.chunk_overwritten RESULTS.jsonl

64 tokens of one key, q along it, beta 0.98, no decay, v[3] times a factor. Appends a line for every factor: the worst
error of a token after the 12th, relative to its own o, against the serial rule in float64.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.record import origin
from gdn_jax import delta, ops
from gdn_jax.bench import chunk_case

TOKENS, KEY_DIM, VALUE_DIM = 64, 128, 32
FACTORS = (1, 10**2, 10**3, 10**4)
FORGOTTEN = 12
"""Tokens after which 1 - beta has long made nothing of v[3]."""


def main(results: pathlib.Path) -> None:
    with results.open("a") as file:
        for factor in FACTORS:
            given = operands(factor)
            wanted = np.asarray(chunk_case.exact(given).o)
            errors = {name: worst(np.asarray(form(*given)), wanted) for name, form in FORMS.items()}
            line = {
                **origin(),
                "factor": factor,
                **errors,
            }
            file.write(json.dumps(line) + "\n")
            print(f"{factor:6}", *(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)


def operands(factor: int) -> tuple[jax.Array, ...]:
    """s, q, k, v, beta, g of one head."""
    rng = np.random.default_rng(0)
    key = rng.normal(size=KEY_DIM)
    k = np.broadcast_to(key / np.linalg.norm(key), (TOKENS, 1, 1, KEY_DIM))
    v = rng.normal(size=(TOKENS, 1, 1, VALUE_DIM))
    v[3] *= factor
    gate = np.ones((TOKENS, 1, 1))
    arrays = np.zeros((1, 1, KEY_DIM, VALUE_DIM)), k * KEY_DIM**-0.5, k, v, 0.98 * gate, 0 * gate
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


@jax.jit
def by_kernel(*given):
    return ops.delta_chunks(*given, precision="exact", implementation="interpret")[0]


FORMS = {
    "serial, float32": lambda *given: chunk_case.serially(*given)[0],
    "XLA": jax.jit(lambda *given: delta.delta_chunk(*given)[0]),
    "exact, Triton form interpreted": by_kernel,
}


def worst(found, wanted) -> float:
    error = np.abs(found - wanted).max(axis=(1, 2, 3)) / np.abs(wanted).max(axis=(1, 2, 3))
    return float(error[FORGOTTEN:].max())


if __name__ == "__main__":
    form = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    form.add_argument("results", type=pathlib.Path)
    main(form.parse_args().results)
