"""The checkpoints in `fixtures` are the recorded ones, whole, and what lies beside them fits them."""

import hashlib
import json
import pathlib

import numpy as np
import pytest

from gdn_jax.config import GdnConfig

FOLDER = pathlib.Path(__file__).parent / "fixtures"
FIXTURES = json.loads((FOLDER / "provenance.json").read_text())["fixtures"]


def test_every_folder_is_recorded():
    assert {folder.name for folder in FOLDER.iterdir() if (folder / "config.json").exists()} == set(FIXTURES)


@pytest.mark.parametrize("name", FIXTURES)
def test_files_are_the_recorded_ones(name):
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (FOLDER / name).iterdir()}
    assert files == FIXTURES[name]["sha256"]


@pytest.mark.parametrize("name", FIXTURES)
def test_layer_goldens_have_the_shape_of_a_stacked_state(name):
    cfg, L = GdnConfig(**FIXTURES[name]["config"]), len(FIXTURES[name]["gdn_layers"])
    with np.load(FOLDER / name / "layer_golden.npz") as golden:
        T, B, _ = golden["xs"].shape
        assert {key: array.shape for key, array in golden.items()} == {
            "xs": (T, B, cfg.hidden),
            "ys": (L, T, B, cfg.hidden),
            "S": (L, B, cfg.value_heads, cfg.key_dim, cfg.value_dim),
            "conv_hist": (L, B, cfg.conv_width - 1, cfg.conv_channels),
        }
        for key, array in golden.items():
            assert array.dtype == np.float32, key
            assert np.isfinite(array).all(), key
            assert (array != 0).all(axis=None), f"{key}: an exact zero means something was not computed"


@pytest.mark.parametrize("name", [name for name in FIXTURES if "logits_golden.npz" in FIXTURES[name]["sha256"]])
def test_logits_goldens_cover_the_vocabulary(name):
    config = json.loads((FOLDER / name / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    with np.load(FOLDER / name / "logits_golden.npz") as golden:
        ids, chosen = golden["ids"], golden["ids"][golden["prompt"] :]
        assert golden["logits"].shape == (len(golden["at"]), vocabulary)
        assert np.isfinite(golden["logits"]).all()
        assert (ids.min(), ids.max(), len(chosen)) == (0, vocabulary - 1, 256)
        assert len(np.unique(chosen)) > 10
        # What is recorded of both kinds agrees: the logits at a token choose the next.
        within = [at for at in golden["at"] if golden["prompt"] - 1 <= at < len(ids) - 1]
        logits = dict(zip(golden["at"].tolist(), golden["logits"], strict=True))
        assert [logits[at].argmax() for at in within] == [ids[at + 1] for at in within]


def test_fixtures_stay_small():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*.*") if file.is_file()) < 3_000_000
