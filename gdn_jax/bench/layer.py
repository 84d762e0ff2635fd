"""A whole GDN layer with 4-bit projections, its weights and state rotating through a stack; and its parts alone."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import ops
from gdn_jax.bench import delta, gate, gemv, operands
from gdn_jax.bench.naming import implementation_of
from gdn_jax.bench.request import Request
from gdn_jax.bench.rows import Row
from gdn_jax.bench.timing import Step, Timing, kernels_for, measure, touch
from gdn_jax.layer import step
from gdn_jax.limbs import LIMBS
from gdn_jax.q4 import GROUP, Q4Tensor, dequantize
from gdn_jax.weights import TABLE, GdnStack

__all__ = ["run"]


@flax.struct.dataclass
class Carry:
    """What the loop hands on: x [B, D]; the output projection's input [B, H·V], its scales; the state of all layers."""

    x: Any
    inner: Any
    scales: Any
    state: Any


class Part(NamedTuple):
    """A piece of the layer that can be launched alone, and the bytes that it must move."""

    step: Step
    nbytes: int


def run(request: Request) -> Iterator[Row]:
    """For every batch and precision: the layer, then its parts, which the gate of the layer stands for too."""
    stack = operands.layer_stack(1, request.cfg, request.layers)
    for batch in request.batches:
        for precision in request.precisions:
            yield from _measured(stack, batch, precision, request)


def _measured(stack: GdnStack, batch: int, precision: str, request: Request) -> Iterator[Row]:
    cfg = request.cfg
    carry = Carry(
        x=operands.activations(3, (batch, cfg.hidden)),
        inner=operands.activations(4, (batch, cfg.value_channels)),
        scales=jnp.full((batch, cfg.value_channels // GROUP), 1e-2, jnp.float32),
        state=operands.layer_state(2, cfg, request.layers, batch),
    )
    whole = _whole(stack, carry, precision, request)
    used = implementation_of(whole.step, carry)
    error, state_error = _errors(stack, carry, precision, request)
    bound, state_bound = gate.BOUNDS["layer", precision], gate.BOUNDS["layer state", precision]
    parts, samples, kernels = {"layer": whole}, {}, kernels_for(whole.nbytes, request.effort)
    if error <= bound and state_error <= state_bound:
        in_launches = used != "xla" and _takes_four_launches(stack, batch, precision, request)
        parts |= (_launches if in_launches else _operations)(stack, carry, precision, request, used)
        steps = {"glue": Step(lambda carry, *_: carry.replace(x=touch(carry.x, carry.x)))}
        steps |= {name: part.step for name, part in parts.items()}
        samples = measure(steps, carry, layers=request.layers, kernels=kernels, effort=request.effort)
    for name, part in parts.items():
        of_layer = name == "layer"
        yield Row(
            subject="layer",
            case=f"{request.geometry} {name}",
            batch=batch,
            implementation=used,
            precision=precision,
            nbytes=part.nbytes,
            # A wrong state is as red as a wrong output.
            max_rel=(error if state_error <= state_bound else float("inf")) if of_layer else None,
            bound=bound if of_layer else None,
            timing=Timing.between(samples[name], samples["glue"], kernels) if samples else None,
            note="" if samples else "not timed: wrong result",
            details={"layers": request.layers, **({"state_max_rel": state_error} if of_layer else {})},
        )


def _takes_four_launches(stack: GdnStack, batch: int, precision: str, request: Request) -> bool:
    """Whether the kernels take the layer as they do in `gdn_jax.launches` at its best, which is what the parts show."""
    large: Any = stack.layers.large
    half = ops.choose_layer_input(large.qkv, large.z, batch, precision, request.implementation)
    return half.implementation != "xla" and request.cfg.value_dim % GROUP == 0


def _whole(stack: GdnStack, carry: Carry, precision: str, request: Request) -> Part:
    options = _options(precision, request)

    def advance(carry, layer, stack):
        y, state = step(stack, carry.state, carry.x, layer=layer, **options)
        return carry.replace(x=touch(carry.x, y), state=state)

    # Of one layer: its weights read, its state read and written, x read and y written.
    stacked = operands.nbytes(stack) + 2 * operands.nbytes(carry.state)
    return Part(Step(advance, stack), stacked // request.layers + 2 * operands.nbytes(carry.x))


def _options(precision: str, request: Request) -> dict[str, Any]:
    return {"cfg": request.cfg, "precision": precision, "implementation": request.implementation}


def _errors(stack: GdnStack, carry: Carry, precision: str, request: Request) -> tuple[float, float]:
    """max_rel of y, and the worse of S and conv_hist, after one step on the last layer of the stack."""
    cfg, last, options = request.cfg, request.layers - 1, _options(precision, request)

    def once(stack, state, x, layer):
        return step(stack, state, x, layer=layer, **options)

    once = jax.jit(once, compiler_options=dict(request.effort.options))
    y, after = once(stack, carry.state, carry.x, jnp.int32(last))
    weights = {}
    for row in TABLE:
        leaf = jax.tree.map(lambda array: array[last], row.of(stack.layers))
        weights[row.name] = np.asarray(dequantize(leaf) if isinstance(leaf, Q4Tensor) else leaf)
    return gate.layer_errors(
        (np.asarray(y), np.asarray(after.S[last]), np.asarray(after.conv_hist[last])),
        weights,
        np.asarray(carry.x),
        (np.asarray(carry.state.S[last]), np.asarray(carry.state.conv_hist[last])),
        key_heads=cfg.key_heads,
        value_heads=cfg.value_heads,
        key_dim=cfg.key_dim,
        value_dim=cfg.value_dim,
        norm_eps=cfg.norm_eps,
    )


def _operations(stack: GdnStack, carry: Carry, precision: str, request: Request, used: str) -> dict[str, Part]:
    """The operations that the layer is made of: splitting x, four input projections, delta rule, output projection."""
    batch, w = carry.x.shape[0], stack.layers
    large: Any = w.large  # all three in 4 bits: `operands.layer_stack` makes no others
    inputs = operands.delta_inputs(5, request.cfg, batch)
    named = request.implementation
    split = gemv.limbs_step(precision, used)

    def limbs(carry, layer, _):
        return carry.replace(x=split.advance(carry.x, layer, ()))

    def project_in(carry, layer, matrices):
        ys = ops.project_many(matrices, carry.x, precision=precision, implementation=named, layer=layer)
        return carry.replace(x=touch(carry.x, *ys))

    def delta_rule(carry, layer, inputs):
        q, k, v, beta, g = inputs
        v = carry.inner.reshape(v.shape)
        o, s = ops.delta_step(carry.state.S, layer, q, k, v, beta, g, implementation=named)
        return carry.replace(inner=touch(carry.inner, o), state=carry.state.replace(S=s))

    def project_out(carry, layer, w):
        [y] = ops.project_many((w,), carry.inner, precision=precision, implementation=named, layer=layer)
        return carry.replace(inner=touch(carry.inner, y))

    into = (large.qkv, large.z, w.b, w.a)
    products = 4 * batch * sum(matrix.shape[1] for matrix in into)
    return {
        "limbs": Part(Step(limbs), carry.x.nbytes + _limb_bytes(carry.x, precision)),
        "in-projection": Part(Step(project_in, into), _of_one(into, request) + carry.x.nbytes + products),
        "delta": Part(Step(delta_rule, inputs), delta.moved(request.cfg, batch)),
        "out": Part(
            Step(project_out, large.out),
            _of_one(large.out, request) + carry.inner.nbytes + carry.x.nbytes,
        ),
    }


def _launches(stack: GdnStack, carry: Carry, precision: str, request: Request, used: str) -> dict[str, Part]:
    """The launches of the layer: splitting x alone, the input half, the delta rule with both norms, the output.

    The input half contains the splitting of x, and gates, convolution and history beside the projections.
    """
    cfg, batch, w = request.cfg, carry.x.shape[0], stack.layers
    large: Any = w.large
    interpret = used == "interpret"
    split = gemv.limbs_step(precision, used)
    _, _, v, beta, g = operands.delta_inputs(5, cfg, batch)
    xcv = operands.activations(6, (batch, cfg.conv_channels))
    digits = ops.with_limbs(carry.inner, precision, interpret=interpret).digits

    def limbs(carry, layer, _):
        return carry.replace(x=split.advance(carry.x, layer, ()))

    def input_half(carry, layer, w):
        options = {"active": None, "precision": precision, "keep": False, "interpret": interpret}
        made = ops.layer_input(w, layer, carry.state.conv_hist, layer, carry.x, **options)
        x = touch(carry.x, *jax.tree.leaves(made._replace(history=None)))
        return carry.replace(x=x, state=carry.state.replace(conv_hist=made.history))

    def delta_layer(carry, layer, operands):
        xcv, beta, g, norm = operands
        done = ops.delta_layer(
            carry.state.S,
            layer,
            xcv,
            carry.inner.reshape(v.shape),
            beta,
            g,
            norm,
            layer,
            key_heads=cfg.key_heads,
            norm_eps=cfg.norm_eps,
            limbs=LIMBS[precision],
            active=None,
            keep=False,
            interpret=interpret,
        )
        inner = touch(carry.inner, done.x_scales, done.digits)
        return carry.replace(inner=inner, state=carry.state.replace(S=done.state))

    def project_out(carry, layer, operands):
        w, digits = operands
        named = {"precision": precision, "implementation": request.implementation}
        y = ops.project(w, ops.Activations(None, digits, carry.scales), layer=layer, **named)
        return carry.replace(scales=touch(carry.scales, y))

    into = (large.qkv, large.z, w.b, w.a, w.conv, w.A_log, w.dt_bias)
    between = operands.nbytes((xcv, v, beta, g))  # what the input half leaves for the delta rule
    onn = _limb_bytes(carry.inner, precision)
    history, s = (2 * operands.nbytes(leaf) // request.layers for leaf in (carry.state.conv_hist, carry.state.S))
    return {
        "limbs": Part(Step(limbs), carry.x.nbytes + _limb_bytes(carry.x, precision)),
        "in-projection": Part(Step(input_half, w), _of_one(into, request) + history + carry.x.nbytes + between),
        "delta": Part(Step(delta_layer, (xcv, beta, g, w.norm)), s + between + onn),
        "out": Part(Step(project_out, (large.out, digits)), _of_one(large.out, request) + onn + carry.x.nbytes),
    }


def _of_one(stacked: Any, request: Request) -> int:
    """Bytes of one layer of stacked weights."""
    return operands.nbytes(stacked) // request.layers


def _limb_bytes(x: jax.Array, precision: str) -> int:
    """Bytes of x [B, I] as limbs with their scales."""
    return LIMBS[precision] * x.size + 4 * (x.size // GROUP)
