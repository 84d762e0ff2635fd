"""Work in threads: the same results in the same order, whatever the number of threads."""

import numpy as np
import pytest

from gdn_jax import threads
from gdn_jax.q4 import Q4Tensor, quantization_report
from gdn_jax.q4_quantizers import METHODS, quantize_rows, quantize_words
from gdn_jax.threads import map_in_threads


@pytest.mark.parametrize("cores", [1, 2, 7])
def test_results_come_in_order_and_the_first_error_ends_the_work(monkeypatch, cores):
    monkeypatch.setattr(threads, "_cores", lambda: cores)
    assert map_in_threads(lambda part: part * part, range(40)) == [part * part for part in range(40)]
    assert map_in_threads(lambda part: part, []) == []
    seen = []

    def failing(part):
        seen.append(part)
        if part >= 3:
            raise ValueError(part)

    with pytest.raises(ValueError, match=r"^3$"):
        map_in_threads(failing, range(10_000))
    assert len(seen) < 10_000


@pytest.mark.parametrize("method", METHODS)
def test_quantising_and_its_report_do_not_depend_on_the_cores(monkeypatch, method):
    """Several chunks of rows, and a last one that is not full."""
    w = np.random.default_rng(1).standard_normal((2, 77, 4096)).astype(np.float32)
    found = []
    for cores in (1, 3):
        monkeypatch.setattr(threads, "_cores", lambda cores=cores: cores)
        words = quantize_words(w, method)
        tensor = Q4Tensor.from_logical(*quantize_rows(w, method))
        np.testing.assert_array_equal(words.words, tensor.codes)
        np.testing.assert_array_equal(words.scales, tensor.scales)
        assert words.shape == w.shape
        found.append((words.words.tobytes(), words.scales.tobytes(), quantization_report(w, tensor)))
    assert found[0] == found[1]
    w[1, 50, 7] = np.nan
    with pytest.raises(ValueError, match=r"1 of \d+ weights are infinite or NaN, the first at \(1, 50, 7\)"):
        quantize_words(w, method)
