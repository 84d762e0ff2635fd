"""What identifies weights: a short text that is the same wherever they are the same, to the bit.

Converted checkpoints have hashes of their tensors, but Hugging Face directories and GGUF files have none, and what the
tier and the quantiser make of a file is not in the file. So the weights themselves are asked, as they are used.
"""

import hashlib
import json
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.axes import Array

__all__ = ["fingerprint"]

# Part of what is hashed: another way to hash is another name.
_SCHEME = "gdn-jax weights 1"

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@typing.no_type_check
def fingerprint(weights: Any) -> str:
    """64 hexadecimal digits that depend on every leaf of a pytree: its path, shape, dtype, and every bit in its place.

    The same on every device, in every process, and for every way the weights came to be: a checkpoint and its
    conversion in the same tier agree. Each leaf is summed up on its device in integers, to 64 bits, and SHA-256 joins
    these sums. A changed bit, two exchanged numbers or layers always show, or as good as; it is no protection against
    somebody who looks for weights with a given fingerprint.

    Costs one read of the weights (a CPU core takes about 0.1 s per GB), 8 MB of memory, and for weights of new shapes a
    compilation of up to some seconds.

    Raises:
        TypeError: a leaf is no array, or of a dtype that the device does not hold as it is (float64, complex).
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    arrays = [leaf for _, leaf in leaves]
    for name, leaf in zip(names, arrays, strict=True):
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise TypeError(f"weights{name} must be an array, got {type(leaf).__name__}")
        if leaf.dtype.itemsize not in _WORDS:
            raise TypeError(f"weights{name} must be of at most 32 bits per number, got {leaf.dtype}")
    sums = jax.device_get(_sums(arrays))
    lines = [
        [name, str(leaf.dtype), list(leaf.shape), total.tolist()]
        for name, leaf, total in zip(names, arrays, sums, strict=True)
    ]
    return hashlib.sha256(json.dumps([_SCHEME, lines], separators=(",", ":")).encode()).hexdigest()


@jax.jit
def _sums(leaves: list[Any]) -> list[Array]:
    return [_sum(leaf) for leaf in leaves]


def _sum(leaf: Any) -> Array:
    """uint32 [2]: sums of the leaf's words, each mixed with its place, modulo 2^32 and so in any order.

    For a given place mixing is one to one, so that one changed word always changes the first sum.
    """
    words = _words(leaf)
    place = jnp.uint32(0)  # modulo 2^32 too
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    first = _mixed(words ^ _mixed(place))
    second = _mixed(first ^ jnp.uint32(0x85EBCA6B))

    def add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] + b[0], a[1] + b[1]

    zero = jnp.uint32(0)
    return jnp.stack(jax.lax.reduce((first, second), (zero, zero), add, tuple(range(words.ndim))))


def _words(leaf: Any) -> Array:
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, _WORDS[leaf.dtype.itemsize]).astype(jnp.uint32)


def _mixed(x: Any) -> Any:
    """A one-to-one function of uint32 in which every bit depends on every other: the finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
