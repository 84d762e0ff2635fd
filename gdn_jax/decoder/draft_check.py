"""What a drafter says of itself and what its methods give, checked before anything is read or drawn."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.axes import Array
from gdn_jax.decoder.drafting import Drafter, Proposal
from gdn_jax.integers import positive_int

__all__ = ["begun", "check_drafter", "check_methods", "check_vocabulary"]

_LEAVES = (jax.Array, np.ndarray, np.generic, int, float)


def check_drafter(drafter: Drafter, *, vocab: int, hidden: int) -> None:
    """Refuse a drafter that cannot propose to a model of this vocabulary and hidden size, whatever its methods do.

    Raises:
        TypeError: it is not hashable, or its count no integer. ValueError: a count below 1, another vocabulary or
        hidden size.
    """
    try:
        hash(drafter)
    except TypeError as error:
        raise TypeError(
            f"a drafter must be hashable, since compiled programs are kept by it, got {type(drafter).__name__}: "
            f"{error}; make it a frozen dataclass, and its arrays its weights"
        ) from None
    positive_int("drafter.count", drafter.count)
    if drafter.vocab is not None:
        check_vocabulary(drafter.vocab, vocab)
    if drafter.hidden not in (None, hidden):
        raise ValueError(
            f"a drafter must read the model's hidden states of size {hidden}, got one for {drafter.hidden}; draft by "
            "the multi-token-prediction head of the same model"
        )


def check_vocabulary(drawn_from: int, vocab: int) -> None:
    """Refuse to draw drafts from a vocabulary of another size than the model's.

    Raises:
        ValueError: saying both.
    """
    if drawn_from != vocab:
        raise ValueError(
            f"a drafter must draw from the model's vocabulary of {vocab} tokens, got one of {drawn_from}; draft by a "
            "model of the same family"
        )


def begun(drafter: Drafter, weights: Any, *, batch: int, capacity: int) -> Any:
    """The memory that a drafter begins with, in arrays of its own: programs may take them over, and nobody misses them.

    Raises:
        TypeError: weights or a memory with something in it that is no array.
    """
    _check_arrays("draft.weights", weights)
    memory = drafter.begin(weights, batch=batch, capacity=capacity)
    _check_arrays("the memory that drafter.begin returns", memory)
    leaves, tree = jax.tree.flatten(memory)
    del memory  # so that no more than one leaf is there twice
    for index, leaf in enumerate(leaves):
        leaves[index] = jnp.array(leaf)
    return jax.tree.unflatten(tree, leaves)


def check_methods(drafter: Drafter, weights: Any, memory: Any, *, batch: int, vocab: int, hidden: int) -> None:
    """Trace `propose` and `read` once, and refuse what a round cannot use.

    Raises:
        TypeError: another kind or dtype than `Drafter` asks for. ValueError: another shape. What the methods raise.
    """

    def shaped(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), dtype)

    count = drafter.count + 1
    rows = (shaped(), shaped(count), shaped(), shaped(count, hidden, dtype=jnp.float32))
    jax.eval_shape(functools.partial(_round, drafter=drafter, vocab=vocab), weights, memory, *rows)


@functools.partial(jax.jit, static_argnames=("drafter", "vocab"))
def _round(
    weights: Any,
    memory: Any,
    pending: Array,
    tokens: Array,
    lengths: Array,
    hidden: Array,
    *,
    drafter: Drafter,
    vocab: int,
) -> None:
    """What a round asks of a drafter. Never run: jitted so that it is traced once for the same shapes."""
    batch = pending.shape[0]

    def draw(logits: Any, ahead: Any) -> Array:
        _check_array("logits given to draw", logits, (batch, vocab), jnp.floating, "float32 [B, vocab]")
        return jnp.zeros_like(pending)

    found = drafter.propose(weights, memory, pending, draw)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Proposal)):
        raise TypeError(f"drafter.propose must return (Proposal, memory), got {_kind(found)}")
    proposal, after = found
    _check_array("Proposal.tokens", proposal.tokens, (batch, drafter.count), jnp.integer, "int32 [B, N]")
    _check_array("Proposal.counts", proposal.counts, (batch,), jnp.integer, "int32 [B]")
    _check_same("propose", after, memory)
    _check_same("read", drafter.read(weights, memory, tokens, lengths, hidden), memory)


def _check_arrays(name: str, tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, _LEAVES):
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise TypeError(f"{name} must be a pytree of arrays, got {type(leaf).__name__}{where}")


def _check_array(name: str, array: Any, shape: tuple[int, ...], kind: Any, wanted: str) -> None:
    if not isinstance(array, _LEAVES):
        raise TypeError(f"{name} must be {wanted}, got {_kind(array)}")
    if not jnp.issubdtype(jnp.result_type(array), kind):
        raise TypeError(f"{name} must be {wanted}, got {jnp.result_type(array)}")
    if jnp.shape(array) != shape:
        raise ValueError(f"{name} must be {wanted}, here {list(shape)}, got shape {list(jnp.shape(array))}")


def _check_same(method: str, after: Any, memory: Any) -> None:
    """A memory goes through a loop, so that nothing about it may change but its values."""
    _check_arrays(f"the memory that drafter.{method} returns", after)
    was, now = (jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree) for tree in (memory, after))
    if was != now or jax.tree.structure(memory) != jax.tree.structure(after):
        raise ValueError(
            f"drafter.{method} must return a memory of the structure, shapes and dtypes that drafter.begin gave it, "
            f"{_described(memory)}, got {_described(after)}"
        )


def _described(tree: Any) -> str:
    described = jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", tree)
    return str(described).replace("'", "")


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    return type(value).__name__
