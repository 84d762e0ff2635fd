"""What proposes tokens for the model to look at in one go: the protocol of drafters.

A drafter is never trusted: what it proposes decides how fast tokens come, never which. The loop that owns it gives the
drafter what became part of the sequences, and takes proposals for what follows the pending token.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from gdn_jax.axes import Array, Float32, Int32

__all__ = ["Drafter", "Draw", "Proposal"]

type Draw = Callable[[Float32[Array, "B vocab"], Any], Int32[Array, "B"]]
"""draw(logits, ahead): the tokens that logits lead to `ahead` (an int or an int32 scalar) places after the pending one.

With the settings and the randomness that the model's own tokens are drawn with there: a drafter whose logits are close
to the model's then draws the same token, at any temperature.
"""


class Proposal(NamedTuple):
    """What may follow the pending token of each row."""

    tokens: Int32[Array, "B N"]
    """N columns whatever counts."""
    counts: Int32[Array, "B"]
    """How many of them count, 0 … N. The others must be token ids, and mean nothing."""


class Drafter(abc.ABC):
    """A hashable value, so that equal ones share compiled programs; its methods are traced.

    `weights` is whatever pytree it needs. Its memory, a pytree too, knows the tokens of the sequences that it was
    given, which leaves out the pending one. Rows are independent: what one holds must not change what another is
    proposed.
    """

    reads_hidden: ClassVar[bool] = False
    """Whether `read` needs `hidden`."""

    @property
    def vocab(self) -> int | None:
        """The size of the vocabulary that it draws from; None where it draws from none."""
        return None

    @property
    def hidden(self) -> int | None:
        """The size of the hidden states that it reads; None where any will do."""
        return None

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """N, the most tokens that it proposes at a time, at least 1."""

    @abc.abstractmethod
    def begin(self, weights: Any, *, batch: int, capacity: int) -> Any:
        """The memory of sequences without tokens, with room for `capacity` tokens each: a pytree of arrays.

        The one method that is not traced. What it returns is copied, and may be kept or returned again.
        """

    @abc.abstractmethod
    def read(
        self,
        weights: Any,
        memory: Any,
        tokens: Int32[Array, "B T"],
        lengths: Int32[Array, "B"],
        hidden: Float32[Array, "B T D"] | None,
    ) -> Any:
        """The memory once the first `lengths` (0 … T) of the tokens are part of the sequences.

        It must have the structure, shapes and dtypes of the memory given, here as in `propose`.

        `hidden`: what the model made of each of them, after its final norm.
        """

    @abc.abstractmethod
    def propose(self, weights: Any, memory: Any, pending: Int32[Array, "B"], draw: Draw) -> tuple[Proposal, Any]:
        """Proposals for what follows `pending`, and the memory, which must still mean what it meant.

        (It is returned for its buffers: room beyond its sequences may have been written to.)
        """
