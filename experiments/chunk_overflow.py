"""From which size of S on the chunks of the delta rule overflow, behind a full reset too.

    python -m experiments.chunk_overflow RESULTS.jsonl

20 tokens of one head, all entries of S alike, keys without negative entries, and g = -inf at token 10. Appends a line
for every K, precision and implementation: the least power of two in S at which o or the last S is not finite.
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.record import origin
from gdn_jax import ops

TOKENS, RESET, VALUE_DIM = 20, 10, 16
POWERS = range(100, 128)
FORMS = (("exact", "interpret"), ("exact", "xla"), ("bf16", "interpret"), ("bf16", "xla"))


def main(results: pathlib.Path) -> None:
    with results.open("a") as file:
        for key_dim in (8, 128):
            for precision, implementation in FORMS:
                rule = jax.jit(functools.partial(ops.delta_chunks, precision=precision, implementation=implementation))
                overflows = (power for power in POWERS if not finite(rule(*operands(power, key_dim))))
                form = {"key_dim": key_dim, "precision": precision, "implementation": implementation}
                line = {**origin(), **form, "power": next(overflows, None)}
                file.write(json.dumps(line) + "\n")
                print(line, flush=True)


def operands(power: int, key_dim: int) -> tuple[jax.Array, ...]:
    """s, q, k, v, beta, g."""
    rng = np.random.default_rng(0)
    s = np.full((1, 1, key_dim, VALUE_DIM), 2.0**power)
    k = np.abs(rng.normal(size=(TOKENS, 1, 1, key_dim)))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(TOKENS, 1, 1, VALUE_DIM)), rng.uniform(size=(TOKENS, 1, 1))
    g = -rng.uniform(size=(TOKENS, 1, 1))
    g[RESET] = -np.inf
    return tuple(jnp.asarray(x, jnp.float32) for x in (s, k * key_dim**-0.5, k, v, beta, g))


def finite(results: tuple[jax.Array, jax.Array]) -> bool:
    return all(bool(np.isfinite(np.asarray(x, np.float32)).all()) for x in results)


if __name__ == "__main__":
    form = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    form.add_argument("results", type=pathlib.Path)
    main(form.parse_args().results)
