"""Run a gdn command with --json and keep what it measured: one line of JSON per run, with commit, date and device.

    python -m experiments.record RESULTS.jsonl check --long

Outside a git checkout, name the commit: GDN_COMMIT=… python -m experiments.record …
"""

import datetime
import json
import pathlib
import subprocess
import sys

import jax

from gdn_jax.bench.provenance import commit


def origin() -> dict[str, str | None]:
    """Where the figures of a script in this process come from: the fields that begin each of its lines."""
    return {
        "date": _today(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit(),
    }


def main(results: str, *arguments: str) -> int:
    if (revision := commit()) is None:
        raise SystemExit("no git checkout here: name the commit, GDN_COMMIT=…")
    ran = subprocess.run(
        [sys.executable, "-m", "gdn_jax.cli", *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    line = {
        "date": _today(),
        "commit": revision,
        "command": " ".join(("gdn", *arguments)),
        "status": ran.returncode,
        "report": json.loads(ran.stdout) if ran.stdout else None,
    }
    with pathlib.Path(results).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return ran.returncode


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
