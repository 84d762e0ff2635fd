"""Every tolerance of the tests in one place, each with what was measured when it was set.

Errors are `max_rel`, largest difference over largest reference value, unless a name says otherwise. "Measured" is the
plain XLA path on x86-64 in float32 against the float64 oracle; a bound is 1.5 times what was measured. Figures for one
token are taken per batch row, so that a row of large outputs cannot hide a row of small ones.
"""

from gdn_jax.evidence.bounds import LAYER_27B, STATE, TRANSFORMERS

__all__ = [
    "ATTENTION_BF16",
    "CASE_OUTPUT",
    "CASE_STATE",
    "CASE_TAP",
    "CHUNK",
    "CHUNK_ALIKE",
    "CHUNK_BF16",
    "CHUNK_BF16_ALIKE",
    "CHUNK_GRADIENT",
    "DECODER_ALONE",
    "DECODER_BF16",
    "DECODER_ORACLE",
    "DECODER_PROMPT",
    "DECODER_PROMPT_BF16_CACHE",
    "DECODER_PROMPT_STATE",
    "DECODER_PROMPT_WORST",
    "DECODER_Q4",
    "DECODER_TRANSFORMERS",
    "DELTA_STEP",
    "ELEMENT",
    "GRADIENT",
    "LAYER_27B",
    "LONG_MEDIAN",
    "LONG_PERCENTILE",
    "LONG_STATE",
    "LONG_WORST",
    "MODES",
    "MTP_BF16",
    "MTP_Q4",
    "PREFILL",
    "PREFILL_BF16",
    "PREFILL_GRADIENT",
    "PROJECTION",
    "PROMPT_BF16",
    "PROMPT_GRADIENT",
    "STATE",
    "TINY_LAYER",
    "TRANSFORMERS",
]

# The standard cases, 5 to 7 tokens from a random state: output, any tap, and the final S and history.
CASE_OUTPUT = 7.2e-7  # measured 4.8e-7
CASE_TAP = 2.1e-6  # measured 1.4e-6 on JAX 0.12.0.1 and 8.0e-7 on 0.11.2, the gated norm where its input is small
CASE_STATE = 4e-7  # measured 2.7e-7

# One small layer over long sequences: the worst token by T, the median and the 99th percentile of the tokens, the final
# S. The worst token is one whose delta output cancels, so it varies from run to run; over twelve runs the median stayed
# within 2 % and the percentile within 10 %, and these are what a loss of precision moves.
LONG_WORST = {512: 3.2e-6, 4096: 9.1e-6}  # measured 2.1e-6 and 6.1e-6
LONG_MEDIAN = 4e-7  # measured 2.6e-7, the same at 512 and at 4096
LONG_PERCENTILE = 1.2e-6  # measured 8.1e-7
LONG_STATE = 1.1e-6  # measured 6.8e-7

# Gates and norms, element by element relative to the element.
ELEMENT = 4e-7  # measured 1.6e-7 for gates and q/k norm, 2.7e-7 for the gated norm

# One projection over up to 5120 columns, and one to five steps of the delta rule.
PROJECTION = 2.2e-7  # measured 1.5e-7
DELTA_STEP = 1e-6  # measured 6.7e-7

# The chunked delta rule, RMS-relative, from 1 to 16,384 tokens: o, and the final S; then where all keys are alike, beta
# is near 1 and nothing decays. Its gradients against those of the serial form in float32.
CHUNK = 6e-7  # measured 4.0e-7, S where beta is near 1
CHUNK_ALIKE = 2e-6  # measured 1.8e-6; the serial form in float32 1.5e-6
CHUNK_GRADIENT = 7.2e-7  # measured 4.8e-7, beta where keys are alike

# Prefill of a small layer, RMS-relative to the oracle: outputs, S and history. Its gradients against those of scan.
PREFILL = 4.8e-7  # measured 3.2e-7
PREFILL_GRADIENT = 1.3e-6  # measured 8.4e-7, A_log, a sum of terms that cancel

# A gradient along a random direction, against the float64 oracle's central difference, relative to the gradient's norm.
GRADIENT = 3.5e-7  # measured 2.3e-7 on JAX 0.12.0.1, A_log, and 1.1e-7 on 0.11.2, dt_bias

# Forward against reverse mode in float32, and a layer of 3 key and 4 value dimensions, plain or jitted.
MODES = 2e-6  # measured 1.3e-6
TINY_LAYER = 4e-6  # measured 2.6e-6

# A whole small model, the logits after one token: against transformers in float32, over 600 tokens; against the float64
# oracle, over 9; a row alone against the same row in a batch; weights of a tier against the float32 they stand for.
DECODER_TRANSFORMERS = 8e-6  # measured 5.3e-6
DECODER_ORACLE = 1.6e-6  # measured 1.04e-6
DECODER_ALONE = 1.5e-6  # measured 9.7e-7
DECODER_BF16 = 1e-6  # measured 0; a GPU may sum the two programs in different orders
MTP_BF16 = 4e-3  # RMS, measured 2.7e-3: weights and cache in bfloat16 against the oracle with those of float32
MTP_Q4 = 0.28  # RMS, measured 0.18: the same for weights in 4 bits, Gaussian ones
DECODER_Q4 = 4.8e-6  # measured 3.2e-6 on JAX 0.12.0.1 and 1.8e-6 on 0.11.2, the worst of four draws

# Prompts at once against the same tokens one by one, in small whole models of every ratio: logits; S, history, keys and
# values, RMS-relative; and any of these, which is a key of one token whose delta output cancels. With keys and values
# in bfloat16 the worst is one unit of their last place, wherever a rounding falls. Gradients, RMS-relative.
DECODER_PROMPT = 3.7e-6  # measured 2.4e-6 on JAX 0.11.2 and 1.9e-6 on 0.12.0.1
DECODER_PROMPT_STATE = 1.4e-6  # measured 9.5e-7 on JAX 0.12.0.1 and 8.3e-7 on 0.11.2
DECODER_PROMPT_WORST = 1.5e-5  # measured 9.8e-6 on JAX 0.12.0.1 and 7.2e-6 on 0.11.2, all others below 3.2e-6
DECODER_PROMPT_BF16_CACHE = 4e-3  # measured 5.1e-4
PROMPT_GRADIENT = 6e-7  # measured 4.0e-7

# Products of operands rounded to bfloat16, RMS-relative: the chunked delta rule against float64, o and S, and where
# keys are alike; against exact, prefill of a small layer (ys, S, history), prompts of a small whole model (logits and
# state, every tier) and attention alone.
CHUNK_BF16 = 8.1e-3  # measured 5.4e-3, where nothing decays; with decays 3.8e-3
CHUNK_BF16_ALIKE = 3.2e-2  # measured 2.1e-2, S: what keys have in common is rounded away
PREFILL_BF16 = 2e-2  # measured 1.3e-2, ys with 4-bit weights of 96 columns; 4.9e-3 with 256
PROMPT_BF16 = 8.5e-3  # measured 5.7e-3
ATTENTION_BF16 = 5.9e-3  # measured 3.9e-3
