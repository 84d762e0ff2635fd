"""A mixture of experts: every token takes its own few routed experts, and the shared one.

    p = softmax(W_router x); the k largest are the token's experts, scaled to a sum of 1 if `norm_topk`
    y = sum_e p_e · MLP_e(x) + sigmoid(w_shared · x) · MLP_shared(x)

Experts are taken one at a time, so that no more is read of the weights than the tokens use.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gdn_jax import linear
from gdn_jax.axes import Array, Float32, Int32
from gdn_jax.decoder.config import MoeConfig
from gdn_jax.decoder.mlp import mlp_rows, mlp_step
from gdn_jax.decoder.weights import MoeWeights, of_layer
from gdn_jax.fence import fence
from gdn_jax.ops import project_rows

__all__ = ["moe_rows", "moe_step", "route"]

type Mlp = Callable[..., Array]
"""(weights, x [B, D], layer=) -> y [B, D]."""
type Project = Callable[[Array, Array], Array]
"""(matrix [O, I], x [B, I]) -> y [B, O]."""


def moe_step(
    w: MoeWeights,
    x: Float32[Array, "B D"],
    *,
    cfg: MoeConfig,
    layer: Int32[Array, ""],
    precision: str,
    implementation: str | None,
) -> Float32[Array, "B D"]:
    """Mixture `layer` of the stack: x [B, D] -> y [B, D]."""
    mlp = functools.partial(mlp_step, precision=precision, implementation=implementation)
    return _mixed(w, x, cfg, layer, mlp, linear.project)


def moe_rows(
    w: MoeWeights,
    x: Float32[Array, "M D"],
    *,
    cfg: MoeConfig,
    layer: Int32[Array, ""],
    precision: str,
    implementation: str | None,
) -> Float32[Array, "M D"]:
    """`moe_step` of many rows. The router and the shared expert's gate are exact in every precision."""
    mlp = functools.partial(mlp_rows, precision=precision, implementation=implementation)

    def project(matrix: Array, x: Array) -> Array:
        [y] = project_rows((matrix,), x, precision="exact", implementation="xla")
        return y

    return _mixed(w, x, cfg, layer, mlp, project)


def _mixed(w: MoeWeights, x: Array, cfg: MoeConfig, layer: Array, mlp: Mlp, project: Project) -> Array:
    chosen, shares = route(of_layer(w.router, layer), x, cfg, project)

    def expert(token_and_expert):
        token, number = token_and_expert
        [y] = mlp(w.experts, x[token][None], layer=layer * cfg.experts + number)
        return y

    tokens = jnp.repeat(jnp.arange(x.shape[0], dtype=jnp.int32), cfg.experts_per_token)
    ys = jax.lax.map(expert, (tokens, chosen.reshape(-1))).reshape(*chosen.shape, x.shape[1])
    shared = mlp(w.shared, x, layer=layer)
    gate = jax.nn.sigmoid(project(of_layer(w.shared_gate, layer), x))
    return fence(jnp.sum(shares[..., None] * ys, axis=1) + jnp.broadcast_to(gate, x.shape) * shared)


def route(
    router: Float32[Array, "E D"], x: Float32[Array, "B D"], cfg: MoeConfig, project: Project = linear.project
) -> tuple[Int32[Array, "B k"], Float32[Array, "B k"]]:
    """The experts of every token and their shares, largest first."""
    shares, chosen = jax.lax.top_k(jax.nn.softmax(project(router, x), axis=-1), cfg.experts_per_token)
    if cfg.norm_topk:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return fence((chosen, shares))
