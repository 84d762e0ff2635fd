"""A pool of 4-bit matrices under names, and layers bound to it: all three large projections or none."""

import itertools
import typing
from collections.abc import Mapping
from typing import NamedTuple

from gdn_jax.errors import StalePoolError
from gdn_jax.q4 import CODES_PER_WORD, GROUP, Q4Tensor
from gdn_jax.require import require_array, require_kind
from gdn_jax.weights import GdnWeights, Q4Projections

__all__ = ["PoolKey", "Q4Pool", "bind_q4"]

# One count for all pools: a key of one pool is refused by every other, whatever the names.
_generations = itertools.count(1)


class PoolKey(NamedTuple):
    """The name of a matrix and the generation of the pool that the name was looked up in."""

    name: str
    generation: int


class Q4Pool:
    """Named 4-bit matrices, replaced as a whole: `rebuild` and `clear` start a generation and end every earlier key.

    A pool holds references, never copies. Weights that are bound already are values of their own and stay valid.
    """

    def __init__(self, tensors: Mapping[str, Q4Tensor]):
        self._install(tensors)

    @classmethod
    @typing.no_type_check
    def build(cls, tensors: Mapping[str, Q4Tensor]) -> "Q4Pool":
        """A pool of matrices [N, I] by name.

        Raises:
            TypeError: a name is not a string or a tensor no Q4Tensor. ValueError: a tensor that is not one matrix in
            the device layout.
        """
        return cls(tensors)

    @property
    def generation(self) -> int:
        """The number of the current contents, never used before by any pool."""
        return self._generation

    @property
    def nbytes(self) -> int:
        """Bytes of all codes and scales."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def __len__(self) -> int:
        return len(self._tensors)

    def keys(self) -> tuple[PoolKey, ...]:
        """A key for every matrix, in the order given."""
        return tuple(PoolKey(name, self._generation) for name in self._tensors)

    def key(self, name: str) -> PoolKey:
        """The key of one matrix.

        Raises:
            KeyError: the pool holds no matrix of this name.
        """
        if name not in self._tensors:
            raise KeyError(f"the pool holds no {name!r}; it holds {', '.join(self._tensors) or 'nothing'}")
        return PoolKey(name, self._generation)

    @typing.no_type_check
    def resolve(self, key: PoolKey) -> Q4Tensor:
        """The matrix behind a key.

        Raises:
            StalePoolError: the key is of another generation, or of another pool. TypeError: it is no PoolKey.
        """
        require_kind("key", key, PoolKey)
        if key.generation != self._generation or key.name not in self._tensors:
            raise StalePoolError(
                f"{key.name!r} was looked up in generation {key.generation}, the pool is at {self._generation}: it was "
                "rebuilt, cleared, or is another pool; look the key up again with pool.key(name)"
            )
        return self._tensors[key.name]

    @typing.no_type_check
    def rebuild(self, tensors: Mapping[str, Q4Tensor]) -> None:
        """Replace the contents: every earlier key is stale, also where name and shape agree. On error nothing changes.

        Raises:
            As `build`.
        """
        self._install(tensors)

    def clear(self) -> None:
        """Drop the contents; every earlier key is stale."""
        self._install({})

    def _install(self, tensors: Mapping[str, Q4Tensor]) -> None:
        require_kind("tensors", tensors, Mapping)
        for name, tensor in tensors.items():
            require_kind("a name in the pool", name, str)
            _check_matrix(repr(name), tensor)
        self._tensors = dict(tensors)
        self._generation = next(_generations)


@typing.no_type_check
def bind_q4(small: GdnWeights, pool: Q4Pool, *, keys: tuple[PoolKey, PoolKey, PoolKey]) -> GdnWeights:
    """A layer of tier q4: the small tensors of `small`, and qkv, z and out from the pool, in the order of `keys`.

    `small` may be of either tier; its own large projections do not go into the result. All three keys are resolved and
    all shapes checked before anything is built.

    Raises:
        StalePoolError: a key is stale. ValueError: not three keys, or a matrix whose shape is not exactly what the
        small tensors imply: qkv [C, D], z [H·V, D], out [D, H·V]. TypeError: an argument of another type.
    """
    require_kind("small", small, GdnWeights)
    require_kind("pool", pool, Q4Pool)
    keys = tuple(keys)
    if len(keys) != 3:
        raise ValueError(f"keys must be the three keys of qkv, z and out, got {len(keys)}")
    matrices = Q4Projections(*(pool.resolve(key) for key in keys))
    (heads, hidden), channels, value_dim = small.b.shape, small.conv.shape[0], small.norm.shape[0]
    values = heads * value_dim
    wanted = {"qkv": (channels, hidden), "z": (values, hidden), "out": (hidden, values)}
    for (field, shape), key in zip(wanted.items(), keys, strict=True):
        got = getattr(matrices, field).shape
        if got != shape:
            raise ValueError(f"{field} must have shape {shape} for these small tensors, got {got} ({key.name!r})")
    return small.replace(large=matrices)


def _check_matrix(name: str, tensor: Q4Tensor) -> None:
    require_kind(name, tensor, Q4Tensor)
    require_array(f"{name}.codes", tensor.codes, "uint32")
    require_array(f"{name}.scales", tensor.scales, "float16")
    if tensor.codes.ndim != 2 or tensor.scales.shape != (tensor.shape[0], tensor.shape[1] // GROUP):
        raise ValueError(
            f"{name} must be one matrix, codes [N, I/{CODES_PER_WORD}] and scales [N, I/{GROUP}], got "
            f"{tensor.codes.shape} and {tensor.scales.shape}"
        )
