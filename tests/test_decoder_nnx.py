"""The NNX modules are the pure functions, with weights and state in variables."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gdn_jax as gdn
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.nnx import Frozen, GatedDeltaNet, HybridDecoder
from gdn_jax.decoder.state import init_decoder_state
from gdn_jax.decoder.weights import read_decoder
from tests.support import cases, decoders

CFG = DecoderConfig(
    vocab=20,
    hidden=32,
    layer_types=("full_attention",),
    mlp_types=("dense",),
    heads=2,
    kv_heads=1,
    head_dim=16,
    rotary_dim=4,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=True,
    ffn=32,
)


def test_a_layer_remembers_what_it_was_given():
    cfg, weights = cases.SMALL, cases.weights(cases.SMALL)
    xs = cases.inputs(cfg, 4, 2)
    want, state = jax.jit(gdn.scan, static_argnames="cfg")(weights, gdn.init_state(cfg, layers=1, batch=2), xs, cfg=cfg)
    layer = GatedDeltaNet(cfg, weights, batch=2)
    call = nnx.jit(lambda layer, x: layer(x))
    np.testing.assert_array_equal(np.stack([call(layer, x) for x in xs]), want)
    chex.assert_trees_all_equal(layer.state.get_value(), state)
    layer.reset()
    np.testing.assert_array_equal(nnx.jit(lambda layer, xs: layer.scan(xs))(layer, xs), want)


def test_gradients_reach_the_weights_of_a_layer():
    cfg, weights = cases.SMALL, cases.weights(cases.SMALL)
    x = cases.inputs(cfg, 2)
    layer = GatedDeltaNet(cfg, weights, batch=2)
    found = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(x))))(layer)

    @jax.jit
    @jax.grad
    def want(weights):
        return jnp.sum(gdn.step(weights, gdn.init_state(cfg, layers=1, batch=2), x, cfg=cfg)[0])

    chex.assert_trees_all_equal(found["weights"].get_value(), want(weights))


def test_a_decoder_carries_its_state():
    _, weights = read_decoder(decoders.Held(decoders.hf_config(CFG), decoders.draw(CFG, "nnx")))
    tokens = jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.int32)
    lengths = jnp.asarray([3, 1], jnp.int32)
    start = init_decoder_state(CFG, batch=2, capacity=4)
    filled, state = decoders.prefill(weights, start, tokens, cfg=CFG, lengths=lengths)
    active = jnp.asarray([False, True])
    stepped, state = decoders.step(weights, state, tokens[:, 1], cfg=CFG, active=active)

    model = HybridDecoder(CFG, weights, batch=2, capacity=4)
    assert isinstance(model.weights, nnx.Param)
    prefill = nnx.jit(lambda model, tokens, lengths: model.prefill(tokens, lengths=lengths))
    np.testing.assert_array_equal(prefill(model, tokens, lengths), filled)
    np.testing.assert_array_equal(nnx.jit(lambda m, t, a: m(t, active=a))(model, tokens[:, 1], active), stepped)
    chex.assert_trees_all_equal(model.state.get_value(), state)
    model.reset()
    chex.assert_trees_all_equal(model.state.get_value(), start)


def test_4_bit_weights_are_no_parameters():
    _, weights = read_decoder(decoders.Held(decoders.hf_config(CFG), decoders.draw(CFG, "nnx")), tier="q4")
    model = HybridDecoder(CFG, weights, capacity=4)
    assert isinstance(model.weights, Frozen)
    assert not jax.tree.leaves(nnx.state(model, nnx.Param))


def test_a_donated_model_is_updated_in_place():
    _, weights = read_decoder(decoders.Held(decoders.hf_config(CFG), decoders.draw(CFG, "nnx")))
    model = HybridDecoder(CFG, weights, batch=2, capacity=4)
    given = model.state.get_value()
    nnx.jit(lambda model, tokens: model(tokens), donate_argnums=0)(model, jnp.asarray([1, 2], jnp.int32))
    assert given.keys.is_deleted()
    assert given.values.is_deleted()
    np.testing.assert_array_equal(model.state.get_value().position, [1, 1])
