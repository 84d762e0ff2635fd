"""Whole programs, compiled for an H200 without one: what they launch, copy, alias and keep beside the state."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import gdn_jax as gdn
from gdn_jax.norms import QK_EPS
from gdn_jax.state import state_shapes
from pallas_kernels.delta_window import Kept, delta_window_fold, delta_window_look
from tests.support.deviceless import compile_for_h200, float_sums

pytestmark = pytest.mark.deviceless

GEOMETRY = gdn.GEOMETRIES["qwen3.5-27b"]
STATIC = ("cfg", "precision", "implementation")


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("name", ["step", "scan"])
@pytest.mark.parametrize("stacked", [False, True], ids=["one_layer", "stack"])
def test_donated_program_keeps_the_state_in_place(name, stacked, implementation):
    layers = 4  # the copies would scale with it; four keep a stack of float32 weights within a card
    cfg = GEOMETRY.cfg
    state = state_shapes(cfg, layers=layers, batch=1)
    weights = gdn.abstract(cfg, layers=layers) if stacked else gdn.abstract(cfg)
    weights = gdn.GdnStack(weights) if stacked else weights
    x = jax.ShapeDtypeStruct((1, cfg.hidden) if name == "step" else (5, 1, cfg.hidden), jnp.float32)
    program = jax.jit(getattr(gdn, name), static_argnames=STATIC, donate_argnames=("state",))

    compiled = compile_for_h200(
        program,
        weights,
        state,
        x,
        cfg=cfg,
        layer=jax.ShapeDtypeStruct((), jnp.int32),
        implementation=implementation,
    )

    nbytes = sum(gdn.state_nbytes(cfg, layers=layers, batch=1).values())
    one_layer = sum(gdn.state_nbytes(cfg, layers=1, batch=1).values())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes
    # Beside the state: a few copies of one layer's state, and the partial sums of the largest projection. A scan over
    # a stack also takes its layer's weights out of the stack, once per call.
    partial_sums = 4 * cfg.conv_channels * cfg.hidden // 32
    taken_out = sum(4 * leaf.size for leaf in jax.tree.leaves(gdn.abstract(cfg))) if stacked and name == "scan" else 0
    assert memory.temp_size_in_bytes < taken_out + 4 * one_layer + 2 * partial_sums
    of_the_stack = re.compile(
        rf"f32\[{layers},1,({cfg.value_heads},{cfg.key_dim},{cfg.value_dim}|3,{cfg.conv_channels})\]"
    )
    copies = [
        line for line in compiled.as_text().splitlines() if " copy(" in line and of_the_stack.search(line.split("(")[0])
    ]
    assert copies == []


ODD = gdn.GdnConfig(hidden=64, key_heads=3, value_heads=12, key_dim=43, value_dim=64, conv_width=2)


@pytest.mark.parametrize("tier", ["f32", "q4"])
@pytest.mark.parametrize("batch", [1, 3])
def test_step_scan_and_trace_sum_in_the_same_order(batch, tier):
    """On XLA the programs that promise the same bits sum the same arrays in the same layouts."""
    found = {}
    for name in ("step", "scan", "trace"):
        program = jax.jit(getattr(gdn, name), static_argnames=STATIC)
        x = jax.ShapeDtypeStruct((*((7,) if name == "scan" else ()), batch, ODD.hidden), jnp.float32)
        state = state_shapes(ODD, layers=2, batch=batch)
        layer = jax.ShapeDtypeStruct((), jnp.int32)
        weights = gdn.abstract(ODD, tier=tier)
        found[name] = float_sums(
            compile_for_h200(program, weights, state, x, cfg=ODD, layer=layer, implementation="xla")
        )
    assert len(found["step"]) > 4
    assert found["step"] == found["scan"] == found["trace"]


NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
LAUNCHES = ("split_rows", "project_in", "delta_layer_step", "q4_gemv")


def token_through_layers(stack, state, x, *, cfg, unroll):
    """One token through every layer of a stack, each layer's input depending on the one before."""

    def layer(carry, index):
        state, x = carry
        y, state = gdn.step(stack, state, x, cfg=cfg, layer=index)
        return (state, x + y), None

    layers = jnp.arange(len(stack), dtype=jnp.int32)
    (state, x), _ = jax.lax.scan(layer, (state, x), layers, unroll=unroll)
    return x, state


def compile_token(layers, unroll, options):
    cfg = GEOMETRY.cfg
    program = jax.jit(
        token_through_layers, static_argnames=("cfg", "unroll"), donate_argnames="state", compiler_options=options
    )
    return compile_for_h200(
        program,
        gdn.GdnStack(gdn.abstract(cfg, layers=layers, tier="q4")),
        state_shapes(cfg, layers=layers, batch=1),
        jax.ShapeDtypeStruct((1, cfg.hidden), jnp.float32),
        cfg=cfg,
        unroll=unroll,
    )


def test_a_4_bit_layer_is_four_launches_that_copy_nothing():
    """A loop over 48 layers: 4 launches in its body, the state in place, the weights read where they lie."""
    layers = 48
    compiled = compile_token(layers, 1, NO_SPILLS)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(gdn.state_nbytes(GEOMETRY.cfg, layers=layers, batch=1).values())
    assert memory.temp_size_in_bytes < 2**17
    text = compiled.as_text()
    assert text.count(" while(") == 1
    assert text.count(" custom-call(") == len(LAUNCHES)
    assert re.findall(r"= \S*\[48,\S* (?:copy|copy-start|fusion|dynamic-slice)\(.*", text) == []


def test_layers_unrolled_are_one_command_buffer(tmp_path):
    layers = 4
    compile_token(layers, layers, NO_SPILLS | {"xla_dump_to": str(tmp_path)})
    [thunks] = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    before, captured = thunks.read_text().split("kCommandBuffer")
    for kernel in LAUNCHES:
        assert kernel not in before
        assert captured.count(kernel) == layers


def window_through_layers(state, window, conv, x, norm, counts, *, key_heads):
    """A window looked at in every layer, each look depending on the one before, and its first tokens folded."""
    common = {"key_heads": key_heads, "qk_eps": QK_EPS}

    def layer(index, carry):
        x, window = carry
        made = delta_window_look(
            *(state.S, state.conv_hist, index.reshape(1), x.xc, conv, x.z, x.beta, x.g, norm),
            weight_layer=index.reshape(1),
            eps=1e-6,
            kept=window,
            **common,
        )
        return x._replace(z=x.z + made.onn), made.kept

    x, window = jax.lax.fori_loop(0, state.S.shape[0], layer, (x, window))
    folded = delta_window_fold(state.S, state.conv_hist, window.xc, conv, window.beta, window.g, counts, **common)
    return x.z, gdn.GdnState(*folded), window


class Token(NamedTuple):
    """What a layer's window is made of."""

    xc: Any
    z: Any
    beta: Any
    g: Any


@pytest.mark.parametrize("batch", [1, 8])
def test_a_window_through_48_layers_copies_no_state(batch):
    """Looks in a loop, two launches each, then a fold of two launches, state and window in place."""
    cfg, layers, tokens = GEOMETRY.cfg, 48, 4
    heads, channels = cfg.value_heads, cfg.conv_channels

    def struct(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    program = jax.jit(
        window_through_layers,
        static_argnames="key_heads",
        donate_argnames=("state", "window"),
        compiler_options=NO_SPILLS,
    )
    gate = struct(tokens, batch, heads)
    token = Token(struct(tokens, batch, channels), struct(tokens, batch, heads, cfg.value_dim), gate, gate)
    window = Kept(*(struct(layers, *array.shape) for array in (token.xc, gate, gate)))
    compiled = compile_for_h200(
        program,
        state_shapes(cfg, layers=layers, batch=batch),
        window,
        struct(layers, channels, cfg.conv_width),
        token,
        struct(layers, cfg.value_dim),
        struct(batch, dtype=jnp.int32),
        key_heads=cfg.key_heads,
    )
    memory = compiled.memory_analysis()
    in_place = sum(gdn.state_nbytes(cfg, layers=layers, batch=batch).values()) + 4 * sum(x.size for x in window)
    assert memory.alias_size_in_bytes == in_place
    assert memory.temp_size_in_bytes < 4 * 4 * tokens * batch * cfg.value_channels + 2**17
    text = compiled.as_text()
    assert text.count(" custom-call(") == 4
    assert re.findall(r"= f32\[48,\d+,\d+,\d+\S* (?:copy|copy-start|fusion|dynamic-update-slice)\(.*", text) == []
