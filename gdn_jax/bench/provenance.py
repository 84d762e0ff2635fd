"""Where a figure comes from: commit, date, versions and device, as every recorded line carries them."""

import datetime
import os
import pathlib
import subprocess
from typing import Any

import jax

from gdn_jax import environment

__all__ = ["commit", "describe"]

_ROOT = pathlib.Path(__file__).parents[2]
_PACKAGES = ("gdn-jax", "jax", "jaxlib")


def describe(command: str) -> dict[str, Any]:
    """Date, commit, command, backend, device and versions."""
    packages = environment.describe()["packages"]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "command": command,
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "versions": {name: packages[name] for name in _PACKAGES},
    }


def commit() -> str | None:
    """The short hash of HEAD, marked where the tree differs from it; GDN_COMMIT outside of a checkout, or None."""
    if named := os.environ.get("GDN_COMMIT"):
        return named
    if not (_ROOT / ".git").exists():
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(_ROOT), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
