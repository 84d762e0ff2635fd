"""Whether programs were compiled or read back from JAX's persistent cache: a compile time says little without it."""

from types import TracebackType
from typing import Any

import jax
import jax.monitoring

__all__ = ["CacheWatch"]

_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
_FOUND = "/jax/compilation_cache/cache_hits"


class CacheWatch:
    """What the persistent cache had of the programs that this process needed while the watch was open.

    A context manager.
    """

    def __init__(self):
        self._counts = {_ASKED: 0, _FOUND: 0}

    @property
    def answer(self) -> str:
        """What the cache had: "none", there is none; "cold", no program; "warm", every one; "mixed", some."""
        asked, found = self._counts[_ASKED], self._counts[_FOUND]
        if asked == 0 or not jax.config.jax_compilation_cache_dir:  # JAX counts as asking where there is none, too
            return "none"
        return {0: "cold", asked: "warm"}.get(found, "mixed")

    def __enter__(self) -> "CacheWatch":
        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        jax.monitoring.unregister_event_listener(self._count)

    def _count(self, event: str, **_: Any) -> None:
        if event in self._counts:
            self._counts[event] += 1
