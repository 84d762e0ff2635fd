import dataclasses
import importlib.resources
import io
import json

import numpy as np
import pytest

from gdn_jax.errors import CheckpointError
from gdn_jax.evidence import goldens

SMALL = [name for name in goldens.names() if not name.startswith("27b")]
TAPS = {"XC", "XCV", "Z", "Q", "K", "A", "B", "BETA", "G", "ON", "ONN", "OUT", "S", "HIST"}


@pytest.fixture
def package_data(tmp_path, monkeypatch):
    """A writable copy of the package data of one golden, which the loader reads instead."""
    source = importlib.resources.files("gdn_jax.evidence") / "goldens"
    folder = tmp_path / "goldens"
    folder.mkdir()
    for file in ("provenance.json", "ratio1.npz"):
        (folder / file).write_bytes((source / file).read_bytes())
    monkeypatch.setattr(goldens.importlib.resources, "files", lambda _package: tmp_path)
    goldens.provenance.cache_clear()
    yield folder
    goldens.provenance.cache_clear()


@pytest.mark.parametrize("name", goldens.names())
def test_arrays_are_what_the_provenance_promises(name):
    golden, case = goldens.load(name), goldens.provenance()["cases"][name]
    assert set(golden.arrays) == TAPS | {"ys"}
    assert {key: list(array.shape) for key, array in golden.arrays.items()} == case["shapes"]
    assert golden.tapped_tokens[-1] == golden.tokens - 1
    for key, array in golden.arrays.items():
        assert array.dtype == np.float32, key
        assert np.isfinite(array).all(), key


@pytest.mark.parametrize("name", SMALL)
def test_small_goldens_are_whole_and_every_axis_is_the_documented_one(name):
    golden = goldens.load(name)
    cfg, n, B = golden.cfg, len(golden.tapped_tokens), golden.batch
    C, W, D = cfg.conv_channels, cfg.conv_width, cfg.hidden
    per_key_head, per_value_head = (n, B, cfg.key_heads, cfg.key_dim), (n, B, cfg.value_heads, cfg.value_dim)
    assert {key: array.shape for key, array in golden.arrays.items()} == {
        "ys": (golden.tokens, B, D),
        **dict.fromkeys(["XC", "XCV"], (n, B, C)),
        **dict.fromkeys(["Q", "K"], per_key_head),
        **dict.fromkeys(["Z", "ON", "ONN"], per_value_head),
        **dict.fromkeys(["A", "B", "BETA", "G"], (n, B, cfg.value_heads)),
        "OUT": (n, B, D),
        "S": (n, B, cfg.value_heads, cfg.key_dim, cfg.value_dim),
        "HIST": (n, B, W - 1, C),
    }
    assert golden.xs().shape == (golden.tokens, B, D)
    S, conv_hist = golden.initial_state()
    assert S.shape == golden.arrays["S"].shape[1:]
    assert conv_hist.shape == golden.arrays["HIST"].shape[1:]


@pytest.mark.parametrize("name", SMALL)
def test_taps_are_consistent_with_each_other(name):
    """Each tap follows from its neighbours by one formula, in float64, so none is mislabelled."""
    golden = goldens.load(name)
    weights = {key: array.astype(np.float64) for key, array in golden.weights().items()}
    taps = {key: array.astype(np.float64) for key, array in golden.arrays.items()}
    x = golden.xs()[list(golden.tapped_tokens)].astype(np.float64)
    n, B, H, V = taps["Z"].shape

    def close(actual, expected):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-6 * np.abs(expected).max())

    close(taps["XC"], x @ weights["in_proj_qkv.weight"].T)
    close(taps["Z"].reshape(n, B, H * V), x @ weights["in_proj_z.weight"].T)
    close(taps["B"], x @ weights["in_proj_b.weight"].T)
    close(taps["A"], x @ weights["in_proj_a.weight"].T)
    close(taps["BETA"], 1 / (1 + np.exp(-taps["B"])))
    close(taps["G"], -np.exp(weights["A_log"]) * np.log1p(np.exp(taps["A"] + weights["dt_bias"])))
    q, k, _ = np.split(taps["XCV"], [golden.cfg.key_channels, 2 * golden.cfg.key_channels], axis=-1)
    for tap, raw, scale in (("Q", q, golden.cfg.key_dim**-0.5), ("K", k, 1.0)):
        raw = raw.reshape(taps[tap].shape)
        close(taps[tap], raw / np.sqrt((raw**2).sum(-1, keepdims=True) + 1e-6) * scale)
    close(taps["ON"], np.einsum("nbhkv,nbhk->nbhv", taps["S"], np.repeat(taps["Q"], golden.cfg.ratio, axis=2)))
    close(taps["OUT"], taps["ONN"].reshape(n, B, H * V) @ weights["out_proj.weight"].T)
    np.testing.assert_array_equal(taps["OUT"], taps["ys"][list(golden.tapped_tokens)])
    if golden.cfg.conv_width > 1:
        np.testing.assert_array_equal(taps["HIST"][:, :, -1], taps["XC"])


@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
def test_short_and_long_runs_of_the_27b_layer_share_their_first_tokens(kind):
    short, long = goldens.load(f"27b-t5-{kind}"), goldens.load(f"27b-t512-{kind}")
    np.testing.assert_array_equal(short.xs(), long.xs()[:5])
    np.testing.assert_array_equal(long.sample("ys", short.arrays["ys"]), long.arrays["ys"][:5])


def test_samples_meet_every_row_and_column_of_a_head():
    golden = goldens.load("27b-t5-gaussian")
    K, V = golden.cfg.key_dim, golden.cfg.value_dim
    index = np.arange(golden.cfg.value_heads * K * V).reshape(1, 1, golden.cfg.value_heads, K, V)
    kept = golden.sample("S", index)
    assert kept.shape == golden.arrays["S"][:1].shape
    assert len(np.unique(kept // (K * V))) == golden.cfg.value_heads
    assert len(np.unique(kept // V % K)) == K
    assert len(np.unique(kept % V)) == V


def test_cases_cover_the_kinds_that_faults_hide_in():
    loaded = [goldens.load(name) for name in SMALL]
    assert {golden.cfg.ratio for golden in loaded} >= {1, 2, 3, 4, 5}
    assert {golden.cfg.conv_width for golden in loaded} >= {1, 2, 3, 4}
    assert {golden.input_kind for golden in loaded} == {"gaussian", "heavy", "uniform"}
    assert all(golden.cfg.key_dim != golden.cfg.value_dim and golden.cfg.key_heads > 1 for golden in loaded)
    assert len({golden.source for golden in loaded}) == 2
    assert {golden.state_label is None for golden in loaded} == {True, False}


def test_a_golden_is_read_only_in_its_fields():
    with pytest.raises(dataclasses.FrozenInstanceError):
        goldens.load("ratio1").tokens = 3


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown golden 'ratio9'; there are ratio1, "):
        goldens.load("ratio9")


def test_one_changed_bit_is_noticed(package_data):
    arrays = dict(goldens.load("ratio1").arrays)
    arrays["S"] = arrays["S"].copy()
    arrays["S"].flat[7] = np.nextafter(arrays["S"].flat[7], np.float32(9))
    np.savez(package_data / "ratio1.npz", **arrays)
    with pytest.raises(CheckpointError, match="'ratio1' does not hold what was recorded"):
        goldens.load("ratio1")


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04", b"not an archive"],
)
def test_damaged_file_is_refused(package_data, content):
    (package_data / "ratio1.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"ratio1\.npz cannot be read"):
        goldens.load("ratio1")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_truncated_file_is_refused(package_data, keep):
    whole = (package_data / "ratio1.npz").read_bytes()
    (package_data / "ratio1.npz").write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(CheckpointError, match=r"ratio1\.npz cannot be read"):
        goldens.load("ratio1")


def test_a_flipped_bit_never_yields_other_arrays(package_data):
    """Refused, but for the few bits of an archive's headers that nobody reads."""
    expected = goldens.provenance()["cases"]["ratio1"]["sha256"]
    whole = (package_data / "ratio1.npz").read_bytes()
    positions = [*range(0, 200, 3), *range(200, len(whole), 331)]
    refused = 0
    for position in positions:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        (package_data / "ratio1.npz").write_bytes(flipped)
        try:
            assert goldens.content_sha256(goldens.load("ratio1").arrays) == expected
        except CheckpointError:
            refused += 1
    assert refused > 0.7 * len(positions)


def test_an_array_alone_is_refused(package_data):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3, np.float32))
    (package_data / "ratio1.npz").write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match=r"ratio1\.npz cannot be read"):
        goldens.load("ratio1")


def test_missing_file_is_named(package_data):
    (package_data / "ratio1.npz").unlink()
    with pytest.raises(CheckpointError, match=r"ratio1\.npz is missing"):
        goldens.load("ratio1")


def test_package_data_stays_small():
    folder = importlib.resources.files("gdn_jax.evidence") / "goldens"
    files = {file.name: len(file.read_bytes()) for file in folder.iterdir()}
    assert set(files) == {"provenance.json", *(f"{name}.npz" for name in goldens.names())}
    assert sum(files.values()) <= 1_600_000


def test_provenance_names_program_and_versions():
    record = goldens.provenance()
    assert {"script", "method", "date", "transformers", "torch", "numpy", "python"} <= set(record)
    assert json.dumps(record)
