"""Where drafts come from, ready for `Decoder.generate`."""

import typing
from typing import TYPE_CHECKING

from gdn_jax.decoder.model_drafter import ModelDrafter
from gdn_jax.decoder.mtp import MtpDrafter
from gdn_jax.decoder.network import TextNetwork
from gdn_jax.decoder.ngram import NgramDrafter
from gdn_jax.decoder.speculate import Drafting
from gdn_jax.errors import UnsupportedError

if TYPE_CHECKING:
    from gdn_jax.decoder.decoder import Decoder

__all__ = ["draft_by_model", "draft_by_mtp", "draft_by_ngrams"]


@typing.no_type_check
def draft_by_ngrams(draft_tokens: int = 3, *, longest: int = 4, least: int = 2) -> Drafting:
    """Prompt lookup: up to `draft_tokens` that followed when 4 … 2 tokens stood there before; see `NgramDrafter`.

    Costs next to nothing, and helps where text repeats itself: summaries, code, quotations.

    Raises:
        ValueError, TypeError: a number that is not an integer of at least 1; `least` above `longest`.
    """
    return Drafting(NgramDrafter(draft_tokens, longest, least))


@typing.no_type_check
def draft_by_model(model: "Decoder", draft_tokens: int = 3) -> Drafting:
    """Steps of another model, which must have the same vocabulary: as a rule a smaller one of the same family.

    It keeps a state of its own for every sequence, with as much room as the model's.

    Raises:
        ValueError, TypeError: `draft_tokens` is not an integer of at least 1, or `model` no Decoder.
    """
    _require_decoder(model)
    network = TextNetwork(model.cfg, model.precision, model.implementation, model.prompt_precision)
    return Drafting(ModelDrafter(network, draft_tokens, model.kv_dtype), model.weights)


@typing.no_type_check
def draft_by_mtp(model: "Decoder", draft_tokens: int = 3) -> Drafting:
    """The model's own multi-token-prediction head, chained `draft_tokens` times; see `MtpDrafter`.

    The head predicts one token more from the model's hidden state; a chain of it feeds itself.

    Raises:
        UnsupportedError: the model was loaded without its head. ValueError, TypeError: `draft_tokens` is not an integer
        of at least 1, or `model` no Decoder.
    """
    _require_decoder(model)
    if model.mtp is None:
        raise UnsupportedError(
            "drafting by MTP needs the model's multi-token-prediction head: load it with Decoder.load(…, mtp=True)"
        )
    drafter = MtpDrafter(
        cfg=model.cfg,
        draft_tokens=draft_tokens,
        precision=model.precision,
        implementation=model.implementation,
        kv_dtype=model.kv_dtype,
    )
    return Drafting(drafter, model.mtp)


def _require_decoder(model: object) -> None:
    from gdn_jax.decoder.decoder import Decoder

    if not isinstance(model, Decoder):
        raise TypeError(f"model must be a Decoder, got {type(model).__name__}; Decoder.load(path) reads one")
