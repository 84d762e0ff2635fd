"""Time prompts with a few layers of a large geometry, whole and by part: `gdn bench prefill` in a tenth of its time.

    python -m experiments.prompt_layers RESULTS.jsonl [--layers 8] [--tokens 512,2048,4096] [--geometry qwen3.5-27b]
        [--precision bf16,exact] [--whole]

Appends a line for every case: milliseconds, median of five calls from the host, which adds about 0.4 ms to each.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.record import origin
from gdn_jax.bench import models
from gdn_jax.decoder.attention import Cache
from gdn_jax.decoder.config import DECODERS
from gdn_jax.decoder.mlp import mlp_rows
from gdn_jax.decoder.model import prefill_tokens
from gdn_jax.decoder.piece_attention import attention_piece
from gdn_jax.decoder.state import init_decoder_state
from gdn_jax.sequence import unchecked_prefill


def main(
    results: pathlib.Path, geometry: str, layers: int, sizes: list[int], precisions: list[str], *, parts: bool
) -> None:
    full = DECODERS[geometry]
    cfg = dataclasses.replace(full, layer_types=full.layer_types[:layers], mlp_types=full.mlp_types[:layers])
    weights = models.decoder_weights(1, cfg, "q4")
    with results.open("a") as file:
        for precision in precisions:
            for what, tokens, program, carry in cases(cfg, precision, sizes, parts=parts):
                line = {
                    **origin(),
                    "geometry": geometry,
                    "layers": layers if what == "whole" else 1,
                    "what": what,
                    "precision": precision,
                    "tokens": tokens,
                    "ms": milliseconds(jax.jit(program, donate_argnums=0), carry, weights),
                }
                file.write(json.dumps(line) + "\n")
                print(f"{what:10} {precision:6} {tokens:6} tokens {line['ms']:9.3f} ms", flush=True)


def cases(cfg, precision, sizes, *, parts):
    """(what, tokens, program(carry, weights) -> carry, carry) of whole prompts, then of each kind of layer if asked."""
    capacity, how = max(sizes), {"precision": precision, "implementation": None}
    for tokens in sizes:
        prompt = jnp.asarray(np.random.default_rng(0).integers(0, cfg.vocab, (1, tokens)), jnp.int32)

        def whole(carry, weights, prompt=prompt):
            state, _ = carry
            state = state.replace(position=jnp.zeros_like(state.position))
            logits, state = prefill_tokens(weights, state, prompt, cfg=cfg, precision=precision)
            return state, logits

        state = init_decoder_state(cfg, batch=1, capacity=capacity)
        yield "whole", tokens, whole, (state, jnp.zeros((1, cfg.vocab), jnp.float32))

    if not parts:
        return
    tokens = sorted(sizes)[len(sizes) // 2]
    x = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, 1, cfg.hidden)), jnp.float32)
    layer, length = jnp.int32(0), jnp.full((1,), tokens, jnp.int32)
    state = init_decoder_state(cfg, batch=1, capacity=capacity)

    def gdn(carry, weights):
        x, memory = carry
        y, memory = unchecked_prefill(weights.gdn, memory, x, cfg.gdn, layer, length, None, *how.values())
        return x + 1e-6 * y, memory

    def attention(carry, weights):
        x, cache = carry
        y, cache = attention_piece(weights.attention, cache, x, capacity - length, length, cfg=cfg, layer=layer, **how)
        return x + 1e-6 * y, cache

    def mlp(carry, weights):
        return carry + 1e-6 * mlp_rows(weights.mlp, carry, layer=layer, **how)

    yield "gdn", tokens, gdn, (jnp.copy(x), state.gdn)
    yield "attention", tokens, attention, (jnp.copy(x), Cache(state.keys, state.values))
    yield "mlp", tokens, mlp, jnp.copy(x[:, 0])


def milliseconds(program, carry, weights) -> float:
    """Median of five calls, each on what the last returned."""
    carry = jax.block_until_ready(program(carry, weights))
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        carry = jax.block_until_ready(program(carry, weights))
        taken.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(taken)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--geometry", default="qwen3.5-27b", choices=sorted(DECODERS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[512, 2048, 4096])
    parser.add_argument("--precision", type=lambda text: text.split(","), default=["bf16", "exact"])
    parser.add_argument("--whole", action="store_true", help="whole prompts only")
    given = parser.parse_args()
    main(given.results, given.geometry, given.layers, given.tokens, given.precision, parts=not given.whole)
