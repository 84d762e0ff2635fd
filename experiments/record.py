"""Run a gdn command with --json and keep what it measured: one line of JSON per run, with commit, date and device.

    python -m experiments.record RESULTS.jsonl check --long

Outside a git checkout, name the commit: GDN_COMMIT=… python -m experiments.record …
"""

import datetime
import json
import pathlib
import subprocess
import sys

from gdn_jax.bench.provenance import commit


def main(results: str, *arguments: str) -> int:
    if (revision := commit()) is None:
        raise SystemExit("no git checkout here: name the commit, GDN_COMMIT=…")
    ran = subprocess.run(
        [sys.executable, "-m", "gdn_jax.cli", *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    line = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": revision,
        "command": " ".join(("gdn", *arguments)),
        "status": ran.returncode,
        "report": json.loads(ran.stdout) if ran.stdout else None,
    }
    with pathlib.Path(results).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return ran.returncode


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
