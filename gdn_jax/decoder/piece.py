"""The layers of a decoder over a piece of a prompt: all its tokens at once, as `block` has them one token at a time.

A piece is T tokens of B rows, of which the first `lengths` [B] count. Between the mixers its tokens are rows of a
matrix, [T·B, D], time first.
"""

from typing import Any, NamedTuple

import jax

from gdn_jax.axes import Array, Int32
from gdn_jax.decoder.block import Flow, Place, Settings
from gdn_jax.decoder.config import LayerPlan
from gdn_jax.decoder.mlp import mlp_rows
from gdn_jax.decoder.moe import moe_rows
from gdn_jax.decoder.piece_attention import attention_piece
from gdn_jax.ops import add_and_norm, dense
from gdn_jax.sequence import unchecked_prefill

__all__ = ["Piece", "piece_block"]


class Piece(NamedTuple):
    """Where a piece stands: tokens of each row before it, and its own that count. The others leave no trace."""

    position: Int32[Array, "B"]
    lengths: Int32[Array, "B"]


def piece_block(weights: Any, flow: Flow, piece: Piece, plan: LayerPlan, place: Place, settings: Settings) -> Flow:
    """Carry a piece through the layer at `place`; what `flow` says of tokens that do not count means nothing."""
    cfg = settings.cfg
    x, y, memory, cache = flow
    how = {"precision": settings.precision, "implementation": settings.implementation}

    def norm(x, y, weight):
        # Without consumers: no kernel takes the limbs of so many rows.
        x, h = add_and_norm(x, y, weight, place.layer, cfg.norm_eps, consumers=(), **how)
        return x, dense(h)

    with jax.named_scope(plan.mixer):
        x, h = norm(x, y, weights.input_norm)
        h = h.reshape(-1, piece.position.shape[0], cfg.hidden)
        if plan.mixer == "linear_attention" and cfg.gdn is not None:
            y, memory = unchecked_prefill(
                weights.gdn, memory, h, cfg.gdn, place.mixer, piece.lengths, None, *how.values()
            )
        else:
            y, cache = attention_piece(weights.attention, cache, h, *piece, cfg=cfg, layer=place.mixer, **how)
    with jax.named_scope(plan.mlp):
        x, h = norm(x, y.reshape(x.shape), weights.post_norm)
        if plan.mlp == "moe" and cfg.moe is not None:
            y = moe_rows(weights.moe, h, cfg=cfg.moe, layer=place.mlp, **how)
        else:
            y = mlp_rows(weights.mlp, h, layer=place.mlp, **how)
    return Flow(x, y, memory, cache)
