"""Settings of every test: signatures checked at run time, strict promotion, and marks that need special machines."""

import importlib.util
import os
import pathlib
import pkgutil

import jax
import numpy as np
import pytest
from jaxtyping import install_import_hook

# Scripts that rebuild goldens and checkpoints; they need torch and transformers.
collect_ignore = ["goldens", "fixtures"]


def _modules_to_check():
    """All of the library but `config`, which checks its own fields, and `evidence`, whose annotations are numpy's."""
    library = importlib.util.find_spec("gdn_jax")
    assert library is not None
    modules = pkgutil.iter_modules(library.submodule_search_locations, "gdn_jax.")
    return [module.name for module in modules if module.name not in ("gdn_jax.config", "gdn_jax.evidence")]


# The hook acts on modules as they are imported, so it goes in before anything imports the library. Without a checker
# installed the same tests run with signatures unchecked.
if importlib.util.find_spec("beartype"):
    install_import_hook(_modules_to_check(), "beartype.beartype")

from gdn_jax import environment  # noqa: E402  (the hook must be in place first)

# Bitwise comparisons are of programs, not of what the autotuner of the day prefers. Read when a backend starts.
environment.make_reproducible()
# Threads of XLA on a CPU, read when it starts: one that waits at a barrier of an interpreted Mosaic kernel keeps its
# own, and with as few as two nothing may be left to run what it waits for.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_MAPPINGS = pathlib.Path("/proc/self/maps")
_MOST_MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def _programs_are_let_go():
    """Linux grants a process 65,530 mappings of memory, and a compiled program takes about six of them for good.

    Some thousand tests of one process would use them up, and the compiler then dies.
    """
    yield
    if _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def known_ceiling(monkeypatch):
    """A ceiling of memory that a benchmark need not measure."""
    from gdn_jax.bench import ceiling

    monkeypatch.setattr(ceiling, "read_ceiling", lambda effort: (1e9, []))


@pytest.fixture
def quiet_machine(monkeypatch):
    """No kernel seems faster than the loop around it, as on a busy machine a small one may."""
    from gdn_jax.bench.timing import Timing

    between = Timing.between

    def above(seconds, glue, kernels):
        return between(np.maximum(seconds, glue + 1e-6), glue, kernels)

    monkeypatch.setattr(Timing, "between", above)


def pytest_collection_modifyitems(items):
    _skip(items, "gpu", lambda: jax.default_backend() == "gpu", "jax's default backend is not a GPU")
    _skip(
        items,
        "deviceless",
        lambda: importlib.util.find_spec("jax_cuda12_plugin") is not None,
        "the CUDA plugin is not installed",
    )


def _skip(items, mark, possible, reason):
    """Skip the tests with `mark` unless `possible`; asked only if there are any, since asking starts a backend."""
    marked = [item for item in items if item.get_closest_marker(mark)]
    if marked and not possible():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
