"""What sets the error of 4-bit weights: the spread of the weights in a group, and which columns carry the output.

    python -m experiments.weight_error

Prints, for one 2048×5120 matrix per row, the RMS-relative error of W x (4-bit against float32, exact activations).
"""

import numpy as np

import gdn_jax as gdn
from gdn_jax.evidence import recipe
from gdn_jax.evidence.metrics import rms_rel

ROWS, COLUMNS, OUTLIERS = 2048, 5120, 16


def product(q, x):
    return np.asarray(gdn.dequantize(q), np.float64) @ x.astype(np.float64)


def main():
    gaussian = recipe.gaussian("experiments/w", (ROWS, COLUMNS), COLUMNS**-0.5)
    flat = recipe.uniform("experiments/flat", (ROWS, COLUMNS), -1.0, 1.0)
    x = recipe.gaussian("experiments/x", (COLUMNS,))
    places = np.arange(OUTLIERS) * (COLUMNS // OUTLIERS)
    spiked = x.copy()
    spiked[places] *= 100  # a few channels carry nearly all of the output, as in trained models
    cases = {
        "Gaussian weights, Gaussian x": (gaussian, x),
        "uniform weights, Gaussian x": (flat, x),
        "Gaussian weights, 16 channels of x at 100": (gaussian, spiked),
    }
    for factor in (1.5, 2, 3, 6):  # and the weights that read them stand out of their groups
        aligned = gaussian.copy()
        aligned[:, places] *= factor
        cases[f"the same, weights of those channels times {factor}"] = (aligned, spiked)
    print(f"{'case':45} {'absmax':>9} {'q4_0':>9} {'mse':>9}")
    for name, (w, x_) in cases.items():
        exact = w.astype(np.float64) @ x_.astype(np.float64)
        errors = [rms_rel(product(gdn.quantize(w, method), x_), exact) for method in ("absmax", "q4_0", "mse")]
        print(f"{name:45} " + " ".join(f"{error:9.2e}" for error in errors))


if __name__ == "__main__":
    main()
