"""Speed and memory of `gdn convert --tier q4` on the worst case: nothing but GDN layers of the 27B width, in bfloat16.

    python -m experiments.convert_speed RESULTS.jsonl

Run it with OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 and taskset -c 0 for the figure of one core.
"""

import datetime
import json
import pathlib
import resource
import sys
import tempfile
import time

import ml_dtypes
from safetensors.numpy import save_file

from experiments.record import commit
from gdn_jax import GEOMETRIES
from gdn_jax.convert import convert
from gdn_jax.evidence import recipe

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
                "format": "orbax",
                "source_mb": round(nbytes / 1e6),
                "mb_per_s": round(nbytes / 1e6 / (time.perf_counter() - wall), 1),
                "mb_per_cpu_s": round(nbytes / 1e6 / (time.process_time() - cpu), 1),
                "process_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
            }
            print(row)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
