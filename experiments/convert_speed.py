"""Speed and memory of `gdn convert --tier q4` on the worst case: nothing but GDN layers of the 27B width, in bfloat16.

    python -m experiments.convert_speed RESULTS.jsonl

Run it with OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1, and with taskset -c 0 for the figure of one core. Quantising alone
is timed as well, on one projection of the model. `load_average` above the number of cores means that others were at
work: then only the figure per CPU second says something.
"""

import datetime
import json
import os
import pathlib
import resource
import sys
import tempfile
import time

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from experiments.record import commit
from gdn_jax import GEOMETRIES
from gdn_jax.convert import convert
from gdn_jax.evidence import recipe
from gdn_jax.q4_quantizers import quantize_words

LAYERS = 3


def make_model(path: pathlib.Path) -> int:
    """A Hugging Face directory of `LAYERS` GDN layers; returns its bytes."""
    cfg = GEOMETRIES["qwen3.5-27b"].cfg
    path.mkdir()
    (path / "config.json").write_text(json.dumps(cfg.to_hf(layers=LAYERS)))
    tensors = {
        f"model.layers.{layer}.linear_attn.{name}": tensor.astype(ml_dtypes.bfloat16)
        for layer in range(LAYERS)
        for name, tensor in recipe.layer_weights(cfg, f"speed/{layer}").items()
    }
    save_file(tensors, path / "model.safetensors")
    return (path / "model.safetensors").stat().st_size


def quantising_speed(quantiser: str) -> float:
    """MB of bfloat16 weights per second, the best of three."""
    w = np.resize(np.linspace(-1, 1, 1 << 16, dtype=np.float32), (10240, 5120)).astype(ml_dtypes.bfloat16)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        quantize_words(w, quantiser)
        seconds.append(time.perf_counter() - start)
    return round(w.nbytes / 1e6 / min(seconds), 1)


def main(results: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pathlib.Path(results).open("a") as file:
        root = pathlib.Path(folder)
        nbytes = make_model(root / "model")
        for quantiser in ("absmax", "q4_0"):
            wall, cpu = time.perf_counter(), time.process_time()
            convert(root / "model", root / quantiser, tier="q4", quantiser=quantiser)
            row = {
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "commit": commit(),
                "quantiser": quantiser,
                "cores": len(os.sched_getaffinity(0)),
                "load_average": round(os.getloadavg()[0], 1),
                "format": "orbax",
                "source_mb": round(nbytes / 1e6),
                "mb_per_s": round(nbytes / 1e6 / (time.perf_counter() - wall), 1),
                "mb_per_cpu_s": round(nbytes / 1e6 / (time.process_time() - cpu), 1),
                "quantise_mb_per_s": quantising_speed(quantiser),
                "process_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
            }
            print(row)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
