"""The weights of the multi-token-prediction (MTP) head that comes with a model; see `mtp` for what it computes."""

import dataclasses
import functools
import typing
from typing import TYPE_CHECKING, Any

import flax.struct

import checkpoints
from gdn_jax.axes import Leaf
from gdn_jax.convert import Watcher
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.weights import (
    AttentionWeights,
    DecoderWeights,
    Field,
    MlpWeights,
    MoeWeights,
    abstract_fields,
    read_fields,
    table,
)
from gdn_jax.errors import CheckpointError
from gdn_jax.q4 import Q4Tensor
from gdn_jax.require import require_kind

__all__ = ["MtpWeights", "abstract_mtp", "load_mtp", "mtp_config", "mtp_table", "read_mtp"]

# As for `Leaf`: transformations rebuild the tree with other nodes, which a run-time check would refuse.
if TYPE_CHECKING:
    Matrix = Leaf | Q4Tensor
    Attention = AttentionWeights
    Mlp = MlpWeights | None
    Moe = MoeWeights | None
else:
    Matrix = Attention = Mlp = Moe = Any


@flax.struct.dataclass
class MtpWeights:
    """An MTP head: a layer of full attention between a projection into it and a norm.

    `fc` [D, 2D], of which the first D columns are for the embedding and the others for the hidden state, each behind
    its norm, `embedding_norm` and `hidden_norm` [D]. The layer is a stack of one as in `DecoderWeights`, so that the
    functions of a decoder's layers take it; `norm` [D] follows it. Norms hold w, and multiply by 1 + w.

    `embed` and `head` [vocab, D] are its own or, once `sharing` has been called, the model's very arrays; `head` is
    then None where the embedding serves as head.
    """

    fc: Matrix
    embedding_norm: Leaf
    hidden_norm: Leaf
    input_norm: Leaf
    post_norm: Leaf
    norm: Leaf
    attention: Attention
    mlp: Mlp = None
    moe: Moe = None
    embed: Matrix | None = None
    head: Matrix | None = None

    def sharing(self, weights: DecoderWeights) -> "MtpWeights":
        """The head with the embedding and the output head of its model wherever it has none of its own."""
        model_head = weights.embed if weights.head is None else weights.head
        embed = weights.embed if self.embed is None else self.embed
        head = model_head if self.head is None else self.head
        return dataclasses.replace(self, embed=embed, head=None if head is embed else head)


def mtp_config(cfg: DecoderConfig) -> DecoderConfig:
    """The head of a model as a decoder of one layer: full attention, and experts if the model has any."""
    moe = cfg.moe is not None
    return dataclasses.replace(
        cfg,
        layer_types=("full_attention",),
        mlp_types=("moe" if moe else "dense",),
        gdn=None,
        ffn=None if moe else cfg.ffn,
    )


_OWN = ("embed", "head")


@functools.cache
def mtp_table(cfg: DecoderConfig, names: frozenset[str] = frozenset()) -> tuple[Field, ...]:
    """Every field of the head of a model of `cfg`: of those that it may share, the ones whose tensor is in `names`."""
    layer = table(mtp_config(dataclasses.replace(cfg, tied=False)))
    fields = (
        Field("fc", "mtp.fc.weight", (cfg.hidden, 2 * cfg.hidden), is_matrix=True),
        Field("embedding_norm", "mtp.pre_fc_norm_embedding.weight", (cfg.hidden,)),
        Field("hidden_norm", "mtp.pre_fc_norm_hidden.weight", (cfg.hidden,)),
        *(field._replace(name=f"mtp.{field.name}") for field in layer),
    )
    return tuple(field for field in fields if field.path not in _OWN or field.name in names)


@typing.no_type_check
def abstract_mtp(cfg: DecoderConfig, *, tier: str = "f32") -> MtpWeights:
    """The weights of the head of a model of `cfg` as `jax.ShapeDtypeStruct` leaves, without what it shares.

    Raises:
        As `abstract_decoder`.
    """
    require_kind("cfg", cfg, DecoderConfig)
    return abstract_fields(MtpWeights, mtp_table(cfg), mtp_config(cfg), tier)


@typing.no_type_check
def load_mtp(
    path,
    *,
    cfg: DecoderConfig,
    weights: DecoderWeights,
    tier: str | None = None,
    quantiser: str = "absmax",
    progress: Watcher | None = None,
) -> MtpWeights:
    """Read the MTP head of the model at `path`, whose configuration and weights are `cfg` and `weights`.

    A Hugging Face directory, a GGUF file or a converted checkpoint, as for `load_decoder`; so are the tiers, of which
    None means that of `weights`, the quantisers and `progress`. The result shares the model's embedding and output head
    unless the file has others.

    Raises:
        CheckpointError: the model has no such head, or one that is incomplete, damaged or of another kind.
        ValueError, UnsupportedError: as `load_decoder`.
    """
    with checkpoints.open_checkpoint(path, mtp=True) as checkpoint:
        return read_mtp(checkpoint, cfg=cfg, weights=weights, tier=tier, quantiser=quantiser, progress=progress)


@typing.no_type_check
def read_mtp(
    checkpoint: checkpoints.Checkpoint,
    *,
    cfg: DecoderConfig,
    weights: DecoderWeights,
    tier: str | None = None,
    quantiser: str = "absmax",
    progress: Watcher | None = None,
) -> MtpWeights:
    """`load_mtp` from a checkpoint that was opened with `mtp`, and stays open."""
    require_kind("cfg", cfg, DecoderConfig)
    require_kind("weights", weights, DecoderWeights)
    names = checkpoint.mtp_names()
    if not names:
        raise CheckpointError(
            f"{checkpoint.source}: has no multi-token-prediction head (tensors named mtp.*, in a GGUF file "
            "blk.*.nextn.*), which some conversions leave out; take the original checkpoint, or go without it"
        )
    head = read_fields(
        MtpWeights,
        mtp_table(cfg, frozenset(names)),
        mtp_config(cfg),
        checkpoint,
        names=names,
        tier=weights.tier if tier is None else tier,
        quantiser=quantiser,
        progress=progress,
    )
    return head.sharing(weights)
