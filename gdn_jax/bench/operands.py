"""Random operands made on the device, where they are to be used: a stack of weights is gigabytes.

The generator is XLA's own, which needs no memory beside the result; its numbers differ between backends, and every
reference is computed from the operands themselves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.config import GdnConfig
from gdn_jax.q4 import CODES_PER_WORD, GROUP, Q4Tensor
from gdn_jax.state import GdnState, state_shapes
from gdn_jax.weights import GdnStack, GdnWeights, Q4Projections, abstract

__all__ = [
    "DeltaInputs",
    "activations",
    "delta_inputs",
    "key",
    "layer_stack",
    "layer_state",
    "nbytes",
    "q4_stack",
    "q4_stack_of_key",
    "scale_range",
]

type DeltaInputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]

_CODE_RMS = (sum(code * code for code in range(-8, 8)) / 16) ** 0.5


def key(seed: int | jax.Array) -> jax.Array:
    """A key of the generator described above."""
    return jax.random.key(seed, impl="rbg")


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, or of shapes that stand for them."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


@functools.partial(jax.jit, static_argnames=("seed", "shape"))
def activations(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Heavy-tailed float32, as the activations of language models are: normal times 2^e, P(e >= n) = 4^-n up to 7."""
    bell, outlier = jax.random.split(key(seed))
    chance = jax.random.uniform(outlier, shape, jnp.float32, 4.0**-7, 1.0)
    return jax.random.normal(bell, shape) * jnp.exp2(jnp.floor(-0.5 * jnp.log2(chance)))


@functools.partial(jax.jit, static_argnames=("seed", "layers", "rows", "columns"))
def q4_stack(seed: int, layers: int, rows: int, columns: int) -> Q4Tensor:
    """[L, N, I]: codes uniform on -8 … 7, scales within a third of what keeps the variance of x."""
    return q4_stack_of_key(key(seed), layers, rows, columns)


def q4_stack_of_key(source: jax.Array, layers: int, rows: int, columns: int) -> Q4Tensor:
    """`q4_stack` of a key, which may be traced: matrices of one shape share a program."""
    codes, scales = jax.random.split(source)
    shape, (low, high) = (layers, rows, columns // GROUP), scale_range(columns)
    return Q4Tensor(
        codes=jax.random.bits(codes, (layers, rows, columns // CODES_PER_WORD), jnp.uint32),
        scales=jax.random.uniform(scales, shape, jnp.float32, low, high).astype(jnp.float16),
    )


def scale_range(columns: int) -> tuple[float, float]:
    """Scales of matrices with so many columns: within a third of what keeps the variance of x."""
    usual = 1 / (_CODE_RMS * columns**0.5)
    return usual * 2 / 3, usual * 4 / 3


@functools.partial(jax.jit, static_argnames=("seed", "cfg", "batch"))
def delta_inputs(seed: int, cfg: GdnConfig, batch: int) -> DeltaInputs:
    """q and k [B, G, K] normalised, q also scaled; v [B, H, V]; beta and g [B, H], as a layer would make them."""
    keys = jax.random.split(key(seed), 5)
    q, k = (jax.random.normal(part, (batch, cfg.key_heads, cfg.key_dim)) for part in keys[:2])
    q, k = (heads * jax.lax.rsqrt(jnp.sum(heads * heads, axis=-1, keepdims=True)) for heads in (q, k))
    v = jax.random.normal(keys[2], (batch, cfg.value_heads, cfg.value_dim))
    beta = jax.nn.sigmoid(jax.random.normal(keys[3], (batch, cfg.value_heads)))
    g = -jax.random.exponential(keys[4], (batch, cfg.value_heads))
    return q * jnp.float32(cfg.key_dim**-0.5), k, v, beta, g


@functools.partial(jax.jit, static_argnames=("seed", "cfg", "layers", "batch"))
def layer_state(seed: int, cfg: GdnConfig, layers: int, batch: int) -> GdnState:
    """A state as if tokens had gone before."""
    shapes = state_shapes(cfg, layers=layers, batch=batch)
    s, history = jax.random.split(key(seed))
    return GdnState(
        S=jax.random.normal(s, shapes.S.shape) / 4, conv_hist=jax.random.normal(history, shapes.conv_hist.shape)
    )


@functools.partial(jax.jit, static_argnames=("seed", "cfg", "layers"))
def layer_stack(seed: int, cfg: GdnConfig, layers: int) -> GdnStack:
    """L layers with 4-bit projections, gates from heads that forget at once to heads that hold on."""
    shapes = abstract(cfg, layers=layers, tier="q4")
    large = {
        name: q4_stack(seed + 1 + i, layers, *getattr(shapes.large, name).shape[1:])
        for i, name in enumerate(("qkv", "z", "out"))
    }
    keys = iter(jax.random.split(key(seed), 6))

    def normal(name: str, scale: float) -> jax.Array:
        return jax.random.normal(next(keys), getattr(shapes, name).shape) * jnp.float32(scale)

    def uniform(name: str, low: float, high: float) -> jax.Array:
        return jax.random.uniform(next(keys), getattr(shapes, name).shape, jnp.float32, low, high)

    return GdnStack(
        GdnWeights(
            large=Q4Projections(**large),
            b=normal("b", cfg.hidden**-0.5),
            a=normal("a", cfg.hidden**-0.5),
            conv=normal("conv", cfg.conv_width**-0.5),
            A_log=uniform("A_log", -4.6, 2.8),
            dt_bias=uniform("dt_bias", -7.0, 1.0),
            norm=1 + normal("norm", 0.1),
        )
    )
