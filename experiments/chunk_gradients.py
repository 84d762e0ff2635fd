"""Both passes of the chunked delta rule: the backward pass of the library against autodiff of its forward pass.

    python -m experiments.chunk_gradients RESULTS.jsonl [--tokens 512,4096] [--heads 16,48,128,128]

Appends a line for every case: seconds, the least of three calls, and bytes of temporary memory. Exact, one sequence;
heads are G, H, K and V.
"""

import argparse
import functools
import json
import pathlib
import time

import jax

from experiments.record import origin
from gdn_jax import delta
from gdn_jax.bench import chunk_case
from gdn_jax.chunks import CHUNK, by_chunks

FORMS = {"backward pass of its own": delta.clean_chunks, "autodiff": by_chunks}


def main(results: pathlib.Path, lengths: list[int], heads: list[int]) -> None:
    with results.open("a") as file:
        for tokens in lengths:
            case = chunk_case.Sequences(1, tokens, *heads, backward=True)
            given = chunk_case.operands_of(case, "exact")
            for name, form in FORMS.items():
                rule = chunk_case.passes(functools.partial(form, precision="exact", chunk=CHUNK), case)
                program = jax.jit(rule).lower(*given).compile()
                line = {
                    **origin(),
                    "form": name,
                    "tokens": tokens,
                    "heads": heads,
                    "seconds": seconds(program, given),
                    "temp_bytes": program.memory_analysis().temp_size_in_bytes,
                }
                file.write(json.dumps(line) + "\n")
                print(
                    f"{name:25} {tokens:6} tokens {line['seconds']:7.2f} s {line['temp_bytes'] / 1e6:8.0f} MB",
                    flush=True,
                )


def seconds(program, given) -> float:
    """The least of three calls."""
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(program(*given))
        taken.append(time.perf_counter() - begin)
    return min(taken)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--tokens", type=numbers, default=[512, 4096])
    parser.add_argument("--heads", type=numbers, default=[16, 48, 128, 128])
    given = parser.parse_args()
    main(given.results, given.tokens, given.heads)
