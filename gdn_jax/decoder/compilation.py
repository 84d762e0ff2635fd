"""Compiled programs: kept on disk between runs, and the time that making them takes."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.monitoring

__all__ = ["CACHE_VARIABLE", "CompileClock", "keep_compiled_programs"]

CACHE_VARIABLE = "GDN_JAX_CACHE"
"""Environment variable: a directory for compiled programs, or "off"."""

_COMPILING = "/jax/core/compile/backend_compile_duration"


def keep_compiled_programs() -> Path | None:
    """Let JAX keep compiled programs on disk, so that the next run need not compile them; returns where.

    In the directory that `GDN_JAX_CACHE` names, else in the user's cache folder; `GDN_JAX_CACHE=off` keeps none. A
    directory set in JAX itself (`JAX_COMPILATION_CACHE_DIR`) is left alone. Acts on the whole process, so it is for
    programs, not for libraries, to call; only the first call before anything is compiled is sure to have its effect.
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    wanted = os.environ.get(CACHE_VARIABLE, "")
    if wanted.lower() in ("off", "0", "no", "false"):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(wanted) if wanted else Path(base) / "gdn-jax" / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


class CompileClock:
    """`seconds` that XLA spent compiling in this process while the clock was open, reading back kept programs included.

    A context manager.
    """

    def __init__(self):
        self.seconds = 0.0

    def __enter__(self) -> "CompileClock":
        jax.monitoring.register_event_duration_secs_listener(self._add)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        jax.monitoring.unregister_event_duration_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILING:
            self.seconds += duration_secs
