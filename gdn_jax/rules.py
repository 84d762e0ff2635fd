"""What stands in for a program under transformations that it has no rules for, as kernels have none."""

from collections.abc import Callable
from typing import Any

import jax

from gdn_jax.errors import UnsupportedError

__all__ = ["with_rules"]


def with_rules(by_kernels: Callable[..., Any], by_xla: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """`by_kernels`, giving way to `by_xla` under `grad` and `vmap`; or refusing them if asked for by name."""

    def refuse(transformation):
        if name is not None:
            raise UnsupportedError(
                f"implementation={name!r} has no rule for {transformation}; use 'xla', or None to have it chosen"
            )

    @jax.custom_batching.custom_vmap
    def batchable(*operands):
        return by_kernels(*operands)

    @batchable.def_vmap
    def _batched(size, batched, *operands):
        refuse("vmap")
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
        out = jax.vmap(by_xla, in_axes=tuple(axes), axis_size=size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_vjp
    def differentiable(*operands):
        return batchable(*operands)

    def forward(*operands):
        refuse("derivatives")
        return jax.vjp(by_xla, *operands)

    differentiable.defvjp(forward, lambda vjp, cotangent: vjp(cotangent))
    return differentiable
