"""Every tolerance in one place, each with what was measured when it was set.

Errors are `max_rel` (largest difference over largest reference value) unless a name says otherwise. "Measured" is the
plain XLA path on x86-64 in float32 against the float64 oracle.
"""

# The required bound of the 27B geometry at T = 5. Measured: 4.4e-7 (Gaussian inputs), 3.8e-7 (heavy-tailed).
LAYER_27B = 6e-7

# Outputs of the small goldens, per token. Measured: 1.41e-6, worst of ten.
GOLDEN = 2.1e-6

# One layer's output at one well-conditioned token, any geometry and any length. Measured: 5.3e-6, the worst of some
# hundred thousand tokens in twenty runs of small geometries, after the scaling below (all but one in a hundred: 8e-7).
LAYER = 8e-6

# The outputs of a whole run, RMS of the error over RMS of the outputs. Measured: 3.5e-7, for T from 5 to 4096.
RUN = 7e-7

# One operator's output at one well-conditioned token.
OPERATOR = 1.5e-6

# S and the convolution history after a run. Measured: 7.7e-7 after 4096 tokens of small geometries.
STATE = 1.5e-6

# The same after 512 tokens of the 27B geometry. Measured: 9.0e-7 on the CPU, 2.9e-6 on an H200, transformers 1.5e-6. A
# slow head multiplies S by almost the same exp(g) at every token, so a biased last bit of exp(g) adds up.
STATE_27B_LONG = 4.4e-6

# S and history of a whole model after 512 tokens with drafts, against those without: products of other numbers of rows
# round otherwise. Measured: 2e-6 to 7.1e-6 on small models.
SPECULATION_STATE = 1e-5

# The same where a model carries rounding further, over what as many rows change without drafts. Measured: 0.5 to 1.0 on
# float32 models of 4 to 64 layers, where that is 5e-6 to 1.5e-4 (experiments/results/speculation_depth-cpu.jsonl).
SPECULATION_ROWS = 3.0

# How far the float64 output moves, at a typical token, when every input is rounded to float32 once more.
TYPICAL_NOISE = 1.5e-7

# Against transformers in float32, which is itself up to 2.5e-6 from float64.
TRANSFORMERS = 5e-6


def at_token(bound: float, noise: float) -> float:
    """A bound for one token, given how far rounding the inputs moves that token's exact output.

    The gated norm divides by the size of the delta rule's output. Where that output is small by cancellation, every
    rounding error before it grows, and so does the effect of rounding the inputs, which no implementation can avoid:
    the bound grows with it, and not otherwise.
    """
    return bound * max(1.0, noise / TYPICAL_NOISE)
