"""A state as a value: copied, forked, selected, merged, reset and given more room; never hidden.

Every function takes a state of any kind (`GdnState`, `DecoderState`, or the rows that `Decoder.generate` returns) and
returns one of the same kind whose buffers are its own, so that either may be donated. What belongs to one sequence
moves together: S, the convolution's history, keys and values, and the position are always those of the same token.

Nothing passes through the host, and everything may be jitted. Costs are in bytes read and written on the device. One
sequence of the 27B model has 157 MB of GDN state, and 131 kB of keys and values in float32 for each token of its
capacity, used or not; `resize` first where most of it is unused.
"""

import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax.errors import StateMismatchError
from gdn_jax.integers import positive_int
from gdn_jax.require import require_kind
from gdn_jax.state import BoundedState, SequenceState

__all__ = ["Snapshot", "branch", "merge", "reset", "resize", "restore", "select", "snapshot"]

# As for `Leaf`: transformations rebuild the tree with other nodes, which a run-time check would refuse.
if TYPE_CHECKING:
    Saved = SequenceState
else:
    Saved = Any


@flax.struct.dataclass
class Snapshot:
    """A copy of a state with buffers of its own: it survives steps that donate the original.

    A type of its own, so that a snapshot is not passed to a donating step by mistake.
    """

    state: Saved


@typing.no_type_check
def snapshot[State: SequenceState](state: State) -> Snapshot:
    """Copy a state on the device. Reads and writes the state once."""
    _check_state("state", state)
    return Snapshot(_copy(state))


@typing.no_type_check
def restore(snap: Snapshot) -> Any:
    """The state that was saved, in new buffers: a snapshot can be restored any number of times.

    Reads and writes the state once.
    """
    require_kind("snap", snap, Snapshot)
    return _copy(snap.state)


@typing.no_type_check
def reset[State: SequenceState](state: State, rows=None) -> State:
    """Set all rows, or the batch rows `rows` (int32 [n]), to zero, whatever they held: NaN and inf too.

    Such rows begin a new sequence at position 0. Writes the state once, and reads it where other rows stay; jitted with
    the state donated, it writes the rows alone. Rows given as a traced array that lie out of range are ignored; their
    values cannot be seen while tracing.

    Raises:
        TypeError: `state` is no state. ValueError: concrete rows that repeat or lie outside 0 … B-1.
    """
    _check_state("state", state)
    if rows is None:
        return jax.tree.map(jnp.zeros_like, state)
    rows = _row_indices(rows, state.batch, repeats=False)

    def cleared(leaf, row):
        return leaf.at[(slice(None),) * row.axis + (rows,)].set(jnp.zeros((), leaf.dtype), mode="drop")

    return jax.tree.map(cleared, state, state.row_axes())


@typing.no_type_check
def branch[State: SequenceState](state: State, n: int) -> State:
    """Fork every sequence n times: B rows become B·n, b-major (row b·n + i is the i-th fork of row b).

    Reads the state once and writes it n times.

    Raises:
        TypeError: `state` is no state. ValueError: n is not an integer of at least 1.
    """
    _check_state("state", state)
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"n must be an integer of at least 1, got {n!r}")
    return jax.tree.map(lambda leaf, row: jnp.repeat(leaf, n, axis=row.axis), state, state.row_axes())


@typing.no_type_check
def select[State: SequenceState](state: State, rows) -> State:
    """The chosen batch rows, in the order given: rows int32 [B'] -> a state of B' rows. A row may be chosen twice.

    Reads and writes B' rows. Rows given as a traced array that lie out of range become NaN, never another sequence; in
    a decoder's state such a row is full besides, so that it takes no token.

    Raises:
        TypeError: `state` is no state. ValueError: concrete rows outside 0 … B-1, or none.
    """
    _check_state("state", state)
    rows = _row_indices(rows, state.batch, repeats=True)
    if rows.size == 0:
        raise ValueError("rows must name at least one row: a state without sequences is no state")

    def taken(leaf, row):
        return jnp.take(leaf, rows, axis=row.axis, mode="fill", fill_value=row.missing)

    return jax.tree.map(taken, state, state.row_axes())


@typing.no_type_check
def merge[State: SequenceState](states: Sequence[State]) -> State:
    """Concatenate states along the batch axis, in the order given. Reads and writes every state once.

    Raises:
        TypeError: what is no state, or states of several kinds. ValueError: no states.
        StateMismatchError: the states differ in layers, geometry, capacity or dtype.
    """
    states = list(states)
    if not states:
        raise ValueError("merge needs at least one state, got none")
    for i, state in enumerate(states):
        _check_state(f"states[{i}]", state)
        require_kind(f"states[{i}]", state, type(states[0]))
        _check_alike(states[0], state, i)
    if len(states) == 1:  # concatenating one array returns it, and the result must have buffers of its own
        return _copy(states[0])
    first, *others = states

    def joined(leaf, row, *more):
        return jnp.concatenate([leaf, *more], axis=row.axis)

    return jax.tree.map(joined, first, first.row_axes(), *others)


@typing.no_type_check
def resize[State: BoundedState](state: State, *, capacity: int) -> State:
    """The same sequences with room for `capacity` tokens each, more or fewer than before; new slots are zero.

    Reads the slots that stay and writes all that there are then, the rest of the state once. Less room can only be
    given where the positions are known, that is outside jit, where they are waited for and read: 4 B bytes.

    Raises:
        TypeError: a state without a capacity, or a capacity that is no integer. ValueError: a capacity below 1, or
        below the present one inside jit. StateMismatchError: a row has more tokens than that already.
    """
    if not isinstance(state, BoundedState):
        raise TypeError(f"state must have a capacity, as that of a decoder has, got {type(state).__name__}")
    state.check()
    capacity = positive_int("capacity", capacity)
    if capacity < state.capacity:
        _check_room(state.used, capacity)
    return jax.tree.map(lambda new, old: jnp.copy(new) if new is old else new, state.resized(capacity), state)


def _check_room(used: Any, capacity: int) -> None:
    if isinstance(used, Tracer):
        raise ValueError("the capacity cannot become smaller inside jit, where positions are not known; resize outside")
    used = np.asarray(used)
    if used.max() > capacity:
        row = int(used.argmax())
        raise StateMismatchError(f"capacity must be at least {used[row]}, the tokens of row {row}, got {capacity}")


def _check_state(name: str, state: Any) -> None:
    if not isinstance(state, SequenceState):
        raise TypeError(f"{name} must be a GdnState or a DecoderState, got {type(state).__name__}")
    state.check()


def _check_alike(first: SequenceState, state: SequenceState, number: int) -> None:
    """Refuse a state that differs from the first in more than its rows."""
    (want, kind), (got, other_kind) = (jax.tree_util.tree_flatten_with_path(s) for s in (first, state))
    if kind != other_kind:
        raise StateMismatchError(f"states to merge differ: state 0 and state {number} have different parts")
    axes = jax.tree.leaves(jax.tree.map(lambda _, row: row.axis, first, first.row_axes()))
    for (path, a), (_, b), axis in zip(want, got, axes, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if _without(a.shape, axis) != _without(b.shape, axis):
            raise StateMismatchError(
                f"states to merge differ: {name} is {a.shape} in state 0 and {b.shape} in state {number}"
                f"{_capacities(first, state)}"
            )
        if a.dtype != b.dtype:
            raise StateMismatchError(
                f"states to merge differ: {name} is {a.dtype} in state 0 and {b.dtype} in state {number}"
            )


def _capacities(first: SequenceState, state: SequenceState) -> str:
    """What to do, where it is the room that differs."""
    if not (isinstance(first, BoundedState) and isinstance(state, BoundedState)) or first.capacity == state.capacity:
        return ""
    return f"; their capacities are {first.capacity} and {state.capacity}, which resize makes the same"


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _copy[State: SequenceState](state: State) -> State:
    return jax.tree.map(jnp.copy, state)


def _row_indices(rows, batch: int, *, repeats: bool):
    """Batch rows as int32 [n], checked where their values are known; traced ones out of range become B."""
    if isinstance(rows, Tracer):
        if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
            raise ValueError(f"rows must be integers [n], got {rows.dtype} {rows.shape}")
        rows = rows.astype(jnp.int32)
        return jnp.where((rows >= 0) & (rows < batch), rows, batch)
    values = np.asarray(rows)
    if values.size == 0 and values.ndim == 1:
        values = values.astype(np.int32)  # numpy makes an empty list a float array
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"rows must be integers [n], got {rows!r}")
    outside = values[(values < 0) | (values >= batch)]
    if outside.size:
        raise ValueError(f"rows must lie in 0 … {batch - 1} (batch {batch}), got {outside.tolist()}")
    if not repeats and len(np.unique(values)) != len(values):
        raise ValueError(f"rows must not repeat, got {values.tolist()}")
    return jnp.asarray(values, jnp.int32)
