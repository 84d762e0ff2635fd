"""A window of tokens that a GDN layer looks at without taking them, and taking the first of them afterwards.

Speculative decoding asks what T drafted tokens lead to, and then keeps n of them, in every row another number. S after
each of them would be T copies of S. A window keeps what S is made from instead, 4 · (C + 2H) bytes a token and layer:
the convolution's inputs, the write strengths and the decays. `look` reads S, carries it over the T tokens and drops
it; `take` does the same for the first n and keeps it. Both have the arithmetic of a step, so that what is taken is what
n steps would have left.

Rows of a window lie time first: row t·B + b is token t of sequence b.
"""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax import ops
from gdn_jax.axes import Array, Float32, Int32, Leaf
from gdn_jax.config import GdnConfig
from gdn_jax.conv import conv_step
from gdn_jax.fence import fence
from gdn_jax.limbs import LIMBS
from gdn_jax.q4 import GROUP
from gdn_jax.stages import keep_inactive, project_in, recur
from gdn_jax.state import GdnState
from gdn_jax.weights import GdnStack, GdnWeights

__all__ = ["GdnWindow", "look", "new_window", "take", "window_nbytes"]


@flax.struct.dataclass
class GdnWindow:
    """What L layers keep of T tokens of B sequences: enough to take any first part of them."""

    xc: Leaf
    """Inputs of the convolution, float32 [L, T, B, C]."""
    beta: Leaf
    """Write strengths, float32 [L, T, B, H]."""
    g: Leaf
    """Log decays, float32 [L, T, B, H]."""

    @property
    def tokens(self) -> int:
        """T."""
        return self.xc.shape[1]


def new_window(cfg: GdnConfig, *, layers: int, tokens: int, batch: int) -> GdnWindow:
    """A window of zeros, which the layers fill in turn."""
    lead = (layers, tokens, batch)
    return GdnWindow(
        xc=jnp.zeros((*lead, cfg.conv_channels), jnp.float32),
        beta=jnp.zeros((*lead, cfg.value_heads), jnp.float32),
        g=jnp.zeros((*lead, cfg.value_heads), jnp.float32),
    )


def window_nbytes(cfg: GdnConfig, *, layers: int, tokens: int, batch: int) -> int:
    """Bytes of a window: 4 · (C + 2H) for every token and layer, 1.98 MB a token for the 48 layers of the 27B model."""
    shapes = jax.eval_shape(functools.partial(new_window, cfg, layers=layers, tokens=tokens, batch=batch))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def look(
    stack: GdnStack,
    state: GdnState,
    window: GdnWindow,
    x: Float32[Array, "M D"] | ops.Activations,
    cfg: GdnConfig,
    layer: Int32[Array, ""],
    lengths: Int32[Array, "B"],
    precision: str,
    implementation: str | None,
) -> tuple[Float32[Array, "M D"], GdnWindow]:
    """The outputs of layer `layer` for the first `lengths` tokens of each row, from a state that stays as it is.

    The window comes back with the layer's part filled in. What rows of x beyond their lengths lead to means nothing.
    """
    choice = ops.choose_delta_window(state.S, window.tokens, implementation)
    by_xla = choice.implementation == "xla"
    weights = stack.layer(layer)
    made = project_in(
        weights,
        fence(ops.dense(x)) if by_xla else fence(x),
        cfg,
        precision,
        "xla" if by_xla else implementation,
        stack=stack.layers,
        layer=layer,
    )
    by_token = functools.partial(_by_token, batch=state.batch)
    made = _Tokens(by_token(made.xc), by_token(made.z), by_token(made.beta), by_token(made.g))
    if by_xla:
        x = _look_by_xla(weights, state, layer, made, lengths, cfg)
        window = _filled(window, layer, made)
    else:
        how = precision, choice.implementation
        x, window = _look_by_kernel(stack, state, window, layer, made, lengths, cfg, *how)
    with jax.named_scope("project_out"):
        y = ops.project(
            stack.layers.large.out,
            x,
            precision=precision,
            implementation="xla" if by_xla else implementation,
            layer=layer,
        )
    return fence(y), window


def take(
    stack: GdnStack,
    state: GdnState,
    window: GdnWindow,
    counts: Int32[Array, "B"],
    cfg: GdnConfig,
    implementation: str | None,
) -> GdnState:
    """The state of all layers with the first `counts` (0 … T) tokens of every row taken; 0 keeps a row bit for bit."""
    choice = ops.choose_delta_window(state.S, window.tokens, implementation)
    if choice.implementation == "xla":
        return _take_by_xla(stack, state, window, counts, cfg)
    return GdnState(
        *ops.take_window(
            *(state.S, state.conv_hist, window.xc, stack.layers.conv, window.beta, window.g, counts),
            key_heads=cfg.key_heads,
            interpret=choice.implementation == "interpret",
        )
    )


def _by_token(rows: Float32[Array, "M ..."], batch: int) -> Float32[Array, "T B ..."]:
    return rows.reshape(-1, batch, *rows.shape[1:])


def _filled(window: GdnWindow, layer: Array, made: "_Tokens") -> GdnWindow:
    def put(whole: Array, part: Array) -> Array:
        return lax.dynamic_update_index_in_dim(whole, part, layer, 0)

    return GdnWindow(xc=put(window.xc, made.xc), beta=put(window.beta, made.beta), g=put(window.g, made.g))


def _look_by_kernel(
    stack, state, window, layer, made, lengths, cfg, precision, implementation
) -> tuple[Array | ops.Activations, GdnWindow]:
    """The input of the output projection, in limbs where that takes them; and the window, filled in in place."""
    limbs = LIMBS[precision] if stack.layers.tier == "q4" and cfg.value_dim % GROUP == 0 else 0
    with jax.named_scope("delta_window"):
        found, kept = ops.look_at_window(
            *(state.S, state.conv_hist, layer, made.xc, stack.layers.conv),
            *(made.z, made.beta, made.g, stack.layers.norm, lengths),
            (window.xc, window.beta, window.g),
            key_heads=cfg.key_heads,
            norm_eps=cfg.norm_eps,
            limbs=limbs,
            interpret=implementation == "interpret",
        )
    rows = found if isinstance(found, ops.Activations) else found.reshape(-1, cfg.value_channels)
    return rows, GdnWindow(*kept)


class _Tokens(NamedTuple):
    """What the recurrence takes of T tokens of one layer."""

    xc: Float32[Array, "T B C"]
    z: Float32[Array, "T B H V"]
    beta: Float32[Array, "T B H"]
    g: Float32[Array, "T B H"]


def _look_by_xla(weights, state, layer, made, lengths, cfg) -> Float32[Array, "M I"]:
    carry = fence((_taken(state.S, layer), _taken(state.conv_hist, layer)))
    _, onn = _over_tokens(weights, carry, made, lengths, cfg)
    return fence(onn.reshape(-1, cfg.value_channels))


def _take_by_xla(stack, state, window, counts, cfg) -> GdnState:
    def one(layer, leaves):
        made = _Tokens(
            xc=_taken(window.xc, layer),
            # Of the outputs, whose gate this is, nothing is kept.
            z=jnp.zeros((window.tokens, state.batch, cfg.value_heads, cfg.value_dim), jnp.float32),
            beta=_taken(window.beta, layer),
            g=_taken(window.g, layer),
        )
        s, history = leaves
        carry, _ = _over_tokens(stack.layer(layer), (_taken(s, layer), _taken(history, layer)), made, counts, cfg)
        return tuple(lax.dynamic_update_index_in_dim(*pair, layer, 0) for pair in zip(leaves, carry, strict=True))

    return GdnState(*lax.fori_loop(0, state.layers, one, (state.S, state.conv_hist)))


def _over_tokens(
    weights: GdnWeights, carry: tuple[Array, Array], tokens: _Tokens, lengths: Int32[Array, "B"], cfg: GdnConfig
) -> tuple[tuple[Array, Array], Float32[Array, "T B H V"]]:
    """S and the history after the first `lengths` tokens of each row, and `onn` of every token."""

    def body(carry, token):
        index, now = token
        s, history = carry
        xcv, next_history = fence(conv_step(history, now.xc, weights.conv))
        *_, onn, next_s = recur(weights, s, xcv, now, cfg)
        valid = index < lengths
        return (keep_inactive(valid, next_s, s), keep_inactive(valid, next_history, history)), onn

    return lax.scan(body, carry, (jnp.arange(tokens.xc.shape[0], dtype=jnp.int32), tokens))


def _taken(leaf: Array, layer: Array) -> Array:
    return lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False)
