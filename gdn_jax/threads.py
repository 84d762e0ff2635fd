"""Work on parts of an array in as many threads as this process has cores: numpy lets go of the interpreter's lock."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["map_in_threads"]

_MOST_THREADS = 16
"""Each thread needs memory of its own, and beyond this the memory bus is the limit."""


def map_in_threads[P, R](work: Callable[[P], R], parts: Iterable[P]) -> list[R]:
    """`work` of every part, in the order of the parts; the first exception ends it, and parts not begun are left out.

    The result does not depend on the number of threads, as long as `work` of one part does not depend on the others.
    """
    parts = list(parts)
    count = min(_cores(), len(parts), _MOST_THREADS)
    if count <= 1:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, parts))


def _cores() -> int:
    """The cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
