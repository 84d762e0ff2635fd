"""Weights from files saved by transformers: the layer's outputs and states must be those of transformers."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import gdn_jax as gdn
from gdn_jax.errors import CheckpointError
from gdn_jax.evidence import bounds, oracle, recipe
from gdn_jax.evidence.metrics import max_rel
from gdn_jax.weights import TABLE, read_layer
from tests.support.paths import FIXTURES, MODELS

LAYERS = 4  # GDN layers of every fixture


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    path = FIXTURES / request.param
    return path, dict(np.load(path / "layer_golden.npz"))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_layer_equals_transformers(model, layer):
    path, golden = model
    cfg = gdn.load_config(path)
    xs = golden["xs"]
    state = gdn.init_state(cfg, layers=1, batch=xs.shape[1])
    ys, state = jax.jit(gdn.scan, static_argnames="cfg")(gdn.load_layer(path, layer=layer), state, xs, cfg=cfg)
    assert max(max_rel(a, b) for a, b in zip(ys, golden["ys"][layer], strict=True)) <= bounds.TRANSFORMERS
    assert max_rel(state.S[0], golden["S"][layer]) <= bounds.TRANSFORMERS
    assert max_rel(state.conv_hist[0], golden["conv_hist"][layer]) <= bounds.TRANSFORMERS


@pytest.mark.parametrize("layer", range(LAYERS))
def test_layer_equals_the_oracle_on_the_stored_weights(model, layer):
    path, golden = model
    cfg, stored = read_layer(path, layer=layer)
    run = oracle.run_layer(
        {name: tensor.astype(np.float32) for name, tensor in stored.items()},
        golden["xs"],
        key_heads=cfg.key_heads,
        value_heads=cfg.value_heads,
        key_dim=cfg.key_dim,
        value_dim=cfg.value_dim,
        norm_eps=cfg.norm_eps,
    )
    state = gdn.init_state(cfg, layers=1, batch=golden["xs"].shape[1])
    weights = gdn.load_layer(path, layer=layer)
    ys, state = jax.jit(gdn.scan, static_argnames="cfg")(weights, state, golden["xs"], cfg=cfg)
    assert max(max_rel(a, b) for a, b in zip(ys, run.ys, strict=True)) <= bounds.LAYER
    assert max_rel(state.S[0], run.S) <= bounds.STATE


def test_stack_holds_the_layers_in_the_order_asked_for(model):
    path, _ = model
    stack = gdn.load_stack(path, layers=[2, 0])
    assert len(stack) == 2
    chex.assert_trees_all_equal(stack.layer(0), gdn.load_layer(path, layer=2))
    chex.assert_trees_all_equal(stack.layer(1), gdn.load_layer(path, layer=0))
    assert len(gdn.load_stack(path)) == LAYERS


def test_abstract_has_the_shapes_of_what_is_loaded(model):
    path, _ = model
    cfg = gdn.load_config(path)
    for loaded, abstract in (
        (gdn.load_layer(path, layer=0), gdn.abstract(cfg)),
        (gdn.load_stack(path).layers, gdn.abstract(cfg, layers=LAYERS)),
    ):
        chex.assert_trees_all_equal_shapes_and_dtypes(loaded, abstract)


@pytest.mark.parametrize("layer", [-1, LAYERS, True, 1.0, "0"])
def test_layer_out_of_range_is_refused(layer):
    with pytest.raises(ValueError, match="GDN ordinal in 0 … 3"):
        gdn.load_layer(FIXTURES / MODELS[0], layer=layer)


def test_empty_stack_and_unknown_tier_are_refused():
    with pytest.raises(ValueError, match="at least one GDN layer"):
        gdn.load_stack(FIXTURES / MODELS[0], layers=[])
    with pytest.raises(ValueError, match="tier must be"):
        gdn.load_layer(FIXTURES / MODELS[0], layer=0, tier="f64")
    with pytest.raises(ValueError, match="tier must be"):
        gdn.load_stack(FIXTURES / MODELS[0], tier="f64")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [row.name for row in TABLE])
def test_non_finite_weights_are_refused_by_name(tmp_path, name, value):
    """A weight that no layer can work with is an error at the border, naming tensor and file."""
    path = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen3_5-f32", path)
    tensors = load_file(path / "model.safetensors")
    stored = f"model.layers.0.linear_attn.{name}"
    tensors[stored] = tensors[stored].copy()
    tensors[stored].flat[-1] = value
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model.*'{name}' holds 1 NaN or inf among"):
        gdn.load_layer(path, layer=0)
    with pytest.raises(CheckpointError, match=rf"model.*'{name}' holds 1 NaN or inf among"):
        gdn.load_stack(path)
    gdn.load_layer(path, layer=1)  # the other layers are untouched


def canonical(cfg):
    return recipe.layer_weights(cfg, "weights-test")


CFG = gdn.GdnConfig(hidden=40, key_heads=2, value_heads=6, key_dim=12, value_dim=20, conv_width=4)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_missing_misshapen_and_unknown_tensors_are_refused_by_name(row):
    tensors = canonical(CFG)
    without = {name: tensor for name, tensor in tensors.items() if name != row.name}
    with pytest.raises(CheckpointError, match=rf"'{row.name}' .* is missing"):
        gdn.from_canonical(CFG, without)
    with pytest.raises(CheckpointError, match=rf"'{row.name}' must have shape"):
        gdn.from_canonical(CFG, {**tensors, row.name: tensors[row.name][..., :-1]})
    with pytest.raises(CheckpointError, match=r"unknown tensor 'in_proj_qkvz.weight'"):
        gdn.from_canonical(CFG, {**tensors, "in_proj_qkvz.weight": tensors[row.name]})
    with pytest.raises(CheckpointError, match=rf"'{row.name}' must be float32, float16 or bfloat16, got float64"):
        gdn.from_canonical(CFG, {**tensors, row.name: tensors[row.name].astype(np.float64)})


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_floats_widen_exactly(dtype):
    narrow = {name: tensor.astype(dtype) for name, tensor in canonical(CFG).items()}
    widened = {name: tensor.astype(np.float32) for name, tensor in narrow.items()}
    chex.assert_trees_all_equal(gdn.from_canonical(CFG, narrow), gdn.from_canonical(CFG, widened))


def test_a_checkpoint_whose_config_disagrees_is_refused(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen3_5-f32", path)
    config = json.loads((path / "config.json").read_text())
    config["linear_num_value_heads"] *= 2
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"in_proj_qkv.*shape"):
        gdn.load_layer(path, layer=0)
