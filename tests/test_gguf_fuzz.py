"""Damaged files: whatever the bytes, opening and reading everything ends soon, in little memory, well or in an error.

The mutations are seeded, so that the case which a failure names can be repeated.
"""

import collections
import contextlib
import itertools
import json
import logging
import os
import pathlib
import re
import resource
import time

import gguf
import numpy as np
import pytest
import safetensors.numpy

from checkpoints.errors import CheckpointError
from checkpoints.gguf_qwen import open_gguf
from checkpoints.hf import open_hf
from tests.support import gguf_files as files

Q = gguf.GGMLQuantizationType

GGUF_CASES = 10_000
SAFETENSORS_CASES = 3_000
SECONDS = 1.0
MEMORY = 256 << 20

BOUNDARIES = sorted(
    {(1 << power) + step for power in (0, 5, 7, 8, 15, 16, 31, 32, 48, 62, 63, 64) for step in (-1, 0, 1)}
)
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "vocab_size": 8,
    "head_dim": 8,
    "intermediate_size": 32,
}


class Seed:
    """A valid file: its bytes, the end of its header, the spans of its values, and where small integers may stand."""

    def __init__(self, raw, header, values):
        self.raw, self.header, self.values = raw, header, values
        self.integers = {
            width: [at for at in range(header) if 0 < int.from_bytes(raw[at : at + width], "little") < 1 << 12]
            for width in (4, 8)
        }


@pytest.fixture(scope="module")
def gguf_seeds(tmp_path_factory):
    path = tmp_path_factory.mktemp("seeds") / "seed.gguf"
    dense, moe = files.config(**TINY), files.moe_config(**TINY)
    tensors, experts = files.model(dense), files.model(moe)
    kinds = {"attn_qkv": Q.Q4_0, "attn_gate": Q.Q8_0, "ssm_out": Q.Q4_0, "ssm_beta": Q.BF16, "ssm_alpha": Q.F16}
    types = {f"blk.0.{name}.weight": kind for name, kind in kinds.items()}
    rich = {
        "attention.head_count_kv": [0, 1],
        "rope.dimension_sections": [1, 1, 0, 0],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 2.0,
        "rope.scaling.original_context_length": 64,
    }
    general = {
        "general.alignment": 32,
        "general.nested": [[1, 2], [3]],
        "split.count": 1,
        "tokenizer.ggml.tokens": ["a", "", "bc"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    stored = files.stored_qwen35(dense, tensors)
    draft = {"block_count": 3, "nextn_predict_layers": 1, "attention.recurrent_layers": [True, False, False]}
    with_draft = stored | {"blk.2.nextn.enorm.weight": np.ones(32, np.float32)}
    makers = [
        lambda: files.write_qwen35(path, dense, tensors, types),
        lambda: files.write(path, "qwen35", general | files.metadata(dense, "qwen35", **rich), stored, types),
        lambda: files.write(path, "qwen35", files.metadata(dense, "qwen35", **draft), with_draft, types),
        lambda: files.write_qwen3next(path, moe, experts, types, joined=False, fused=True),
        lambda: files.write_qwen3next(path, moe, experts, {"blk.0.ssm_in.weight": Q.Q4_0}, joined=True),
    ]
    return [gguf_seed(make().read_bytes()) for make in makers]


def gguf_seed(raw):
    """Values lie between the end of one key and the length field of the next."""
    keys = list(re.finditer(rb"(?:general|split|tokenizer|qwen35|qwen3next)\.[a-z_.]+", raw))
    keys = [match for match in keys if raw[match.start() - 8 : match.start()] == len(match[0]).to_bytes(8, "little")]
    values = [(key.end(), following.start() - 8) for key, following in itertools.pairwise(keys)]
    return Seed(raw, raw.rindex(b".weight") + 48, values)


@pytest.fixture(scope="module")
def safetensors_seeds():
    text = files.config(**TINY)
    tensors = files.model(text)
    seeds = []
    for dtype in (np.float32, np.float16):
        raw = safetensors.numpy.save({name: array.astype(dtype) for name, array in tensors.items()})
        header = 8 + int.from_bytes(raw[:8], "little")
        seeds.append(Seed(raw, header, [match.span() for match in re.finditer(rb'\{"dtype.*?\}', raw[:header])]))
    return text, seeds


def place(rng, seed, size):
    """A position in a file of `size` bytes, two times out of three in the header."""
    return int(rng.integers(0, min(size, seed.header) if rng.random() < 2 / 3 else size))


def flip(rng, seed, raw):
    for _ in range(rng.integers(1, 9)):
        raw[place(rng, seed, len(raw))] = rng.integers(0, 256)


def truncate(rng, seed, raw):
    del raw[place(rng, seed, len(raw)) :]


def splice(rng, seed, raw):
    """Insert a copy of some bytes, overwrite others with it, or drop them."""
    start, target = place(rng, seed, len(raw)), place(rng, seed, len(raw))
    length = int(rng.integers(1, 64))
    piece = raw[start : start + length] if rng.random() < 0.7 else b""
    raw[target : target + (length if rng.random() < 0.7 else 0)] = piece


def set_integer(rng, seed, raw):
    """Write a boundary value over four or eight bytes that looked like a small integer."""
    width = int(rng.choice([4, 8]))
    at = int(rng.choice(seed.integers[width]))
    value = BOUNDARIES[rng.integers(len(BOUNDARIES))] % (1 << 8 * width)
    raw[at : at + width] = value.to_bytes(width, "little")


def swap_values(rng, seed, raw):
    """Let two values change places, keeping the file's length."""
    if bytes(raw[: seed.header]) == seed.raw[: seed.header]:
        one, two = sorted(rng.choice(len(seed.values), 2, replace=False))
        (a, b), (c, d) = seed.values[one], seed.values[two]
        raw[a:d] = raw[c:d] + raw[b:c] + raw[a:b]


def set_json_number(rng, seed, raw):
    """Replace a number of a JSON header, and correct the length of the header in front of it."""
    numbers = list(re.finditer(rb"(?<=[\[,])\d+", raw[: seed.header]))
    if numbers:
        number = numbers[rng.integers(len(numbers))]
        spelled = str(rng.choice(np.array([*BOUNDARIES, -1, 1.5, "1e999", "null", '"a"', "[]"], object))).encode()
        raw[number.start() : number.end()] = spelled
        length = int.from_bytes(raw[:8], "little") + len(spelled) - len(number[0])
        raw[:8] = (length % (1 << 64)).to_bytes(8, "little")


def mutated(seeds, mutations, case):
    rng = np.random.default_rng(case)
    seed = seeds[rng.integers(len(seeds))]
    raw = bytearray(seed.raw)
    for mutation in rng.choice(len(mutations), rng.integers(1, 3)):
        if raw:
            mutations[mutation](rng, seed, raw)
    return bytes(raw)


@contextlib.contextmanager
def bounded_memory():
    """An allocation that takes the process beyond what it has now plus `MEMORY` raises MemoryError."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def scratch(caplog):
    """A file in memory, by its path; what is skipped in it is logged so often that it is not recorded."""
    caplog.set_level(logging.ERROR)
    descriptor = os.memfd_create("scratch")
    yield pathlib.Path(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)


def survive(make, path, read_everything, cases, seconds=SECONDS):
    """Run the cases; returns how often each outcome came, errors with what varies in them taken out."""
    outcomes = collections.Counter()
    with bounded_memory():
        for case in range(cases):
            path.write_bytes(make(case))
            start = time.thread_time()  # not what other processes of a busy machine take
            try:
                read_everything()
                outcome = "whole"
            except CheckpointError as error:
                outcome = re.sub(r"'[^']*'|\[.*?\]|\(.*?\)|\d+|[^ -~]", "", str(error).replace(str(path), ""))
            except BaseException as error:
                raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error
            assert time.thread_time() - start < seconds, f"case {case} took too long"
            outcomes[outcome] += 1
    return outcomes


def test_damaged_gguf_files(scratch, gguf_seeds):
    def read_everything():
        with open_gguf(scratch) as checkpoint:
            for name in checkpoint.names():
                checkpoint.read(name)
                if checkpoint.info(name).dtype == "Q4_0":
                    checkpoint.read_q4(name)

    mutations = (flip, truncate, splice, set_integer, swap_values)
    outcomes = survive(lambda case: mutated(gguf_seeds, mutations, case), scratch, read_everything, GGUF_CASES)
    # The harness means something only if the damage gets past the first checks, in many ways.
    assert outcomes["whole"] > GGUF_CASES // 50
    assert len(outcomes) > 60


def test_damaged_safetensors_files(tmp_path, scratch, safetensors_seeds):
    text, seeds = safetensors_seeds
    (tmp_path / "config.json").write_text(json.dumps(text))
    (tmp_path / "model.safetensors").symlink_to(scratch)

    def read_everything():
        with open_hf(tmp_path) as checkpoint:
            for name in checkpoint.names():
                checkpoint.read(name)

    mutations = (flip, truncate, splice, set_integer, swap_values, set_json_number, set_json_number)
    outcomes = survive(lambda case: mutated(seeds, mutations, case), scratch, read_everything, SAFETENSORS_CASES)
    assert outcomes["whole"] > SAFETENSORS_CASES // 50
    assert len(outcomes) > 20


def test_the_undamaged_seeds_are_whole(scratch, gguf_seeds):
    for seed in gguf_seeds:
        assert len(seed.values) > 15
        scratch.write_bytes(seed.raw)
        open_gguf(scratch).close()


def test_the_harness_notices_slowness_memory_and_other_errors(scratch):
    def run(action, **limits):
        survive(lambda case: b"", scratch, action, 1, **limits)

    with pytest.raises(AssertionError, match="case 0: MemoryError"):
        run(lambda: np.ones(2 * MEMORY, np.uint8))
    with pytest.raises(AssertionError, match="case 0: KeyError"):
        run(lambda: {}["key"])
    with pytest.raises(AssertionError, match="case 0 took too long"):
        run(lambda: sum(range(1_000_000)), seconds=1e-3)
