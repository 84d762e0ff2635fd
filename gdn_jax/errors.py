"""The errors that the library raises on purpose, all under `GdnError`.

Plain misuse of a function (a wrong shape, dtype or range) stays a `ValueError` or `TypeError`.
"""

from checkpoints.errors import CheckpointError, GdnError

__all__ = ["CheckpointError", "GdnError", "StalePoolError", "StateMismatchError", "UnsupportedError"]


class StateMismatchError(GdnError, ValueError):
    """A state does not belong to the configuration, the weights or the batch that it is used with."""


class StalePoolError(GdnError, LookupError):
    """A pool key belongs to an earlier generation of the pool: the weights behind it may have changed."""


class UnsupportedError(GdnError, NotImplementedError):
    """The request is well formed, but nothing here can carry it out; the message names the limit."""
