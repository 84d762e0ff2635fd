"""What a drafter must be, and its methods must give: refused before anything is read; and nothing is given away."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.decoder import speculate
from gdn_jax.decoder.decoder import Decoder
from gdn_jax.decoder.drafting import Drafter, Proposal
from gdn_jax.decoder.script import ScriptDrafter
from gdn_jax.decoder.speculate import Drafting
from gdn_jax.errors import UnsupportedError
from tests.support import decoders

NONE = jnp.zeros(2, jnp.int32)
FLOATS = jnp.zeros((2, 2), jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Sloppy(Drafter):
    """Proposes nothing; whatever it is told to do otherwise, it does."""

    count: int = 2
    vocab: int | None = None
    hidden: int | None = None
    proposal: Callable[[int], Any] = lambda batch: Proposal(jnp.zeros((batch, 2), jnp.int32), jnp.zeros_like(NONE))
    memory: Any = None
    after_reading: Any = None
    after_proposing: Any = None

    def begin(self, weights, *, batch, capacity):
        return jnp.zeros(batch) if self.memory is None else self.memory

    def read(self, weights, memory, tokens, lengths, hidden):
        return memory if self.after_reading is None else self.after_reading

    def propose(self, weights, memory, pending, draw):
        return self.proposal(pending.size), memory if self.after_proposing is None else self.after_proposing


class Unhashable(Sloppy):
    __hash__ = None


def proposing(tokens, counts):
    return Sloppy(proposal=lambda batch: Proposal(tokens, counts))


@pytest.mark.parametrize(
    ("drafter", "error", "message"),
    [
        (Unhashable(), TypeError, "a drafter must be hashable.*Unhashable.*make it a frozen dataclass"),
        (Sloppy(count=0), ValueError, "drafter.count must be at least 1, got 0"),
        (Sloppy(count=2.0), TypeError, "drafter.count must be an integer, got 2.0"),
        (Sloppy(count=True), TypeError, "drafter.count must be an integer, got True"),
        (Sloppy(count=16), ValueError, "Proposal.tokens must be .*here .2, 16., got shape .2, 2."),
        (Sloppy(vocab=7), ValueError, "must draw from the model's vocabulary of 96 tokens, got one of 7"),
        (Sloppy(hidden=7), ValueError, "must read the model's hidden states of size 32, got one for 7"),
        (proposing(FLOATS, NONE), TypeError, "Proposal.tokens must be int32 .B, N., got float32"),
        (proposing(jnp.zeros((2, 0), jnp.int32), NONE), ValueError, "Proposal.tokens .* got shape .2, 0."),
        (proposing(jnp.zeros((2, 3), jnp.int32), NONE), ValueError, "Proposal.tokens .* got shape .2, 3."),
        (proposing(jnp.zeros((1, 2), jnp.int32), NONE), ValueError, "Proposal.tokens .* got shape .1, 2."),
        (proposing(None, NONE), TypeError, "Proposal.tokens must be int32 .B, N., got NoneType"),
        (proposing(jnp.zeros((2, 2), jnp.int32), None), TypeError, "Proposal.counts must be int32 .B., got NoneType"),
        (
            proposing(jnp.zeros((2, 2), jnp.int32), FLOATS[0]),
            TypeError,
            "Proposal.counts must be int32 .B., got float32",
        ),
        (proposing(jnp.zeros((2, 2), jnp.int32), NONE[:, None]), ValueError, "Proposal.counts .* got shape .2, 1."),
        (Sloppy(proposal=lambda batch: None), TypeError, r"must return \(Proposal, memory\), got \(NoneType, .*\)"),
        (Sloppy(memory="all"), TypeError, "drafter.begin returns must be a pytree of arrays, got str"),
        (Sloppy(after_reading=FLOATS), ValueError, r"drafter.read must return .*float32\[2\], got float32\[2, 2\]"),
        (Sloppy(after_proposing=NONE), ValueError, r"drafter.propose must return .*float32\[2\], got int32\[2\]"),
        (Sloppy(after_proposing=(FLOATS[0],)), ValueError, "drafter.propose must return a memory of the structure"),
        (Sloppy(after_reading="all"), TypeError, "drafter.read returns must be a pytree of arrays, got str"),
    ],
)
def test_a_drafter_that_no_round_can_use_is_refused_before_anything_is_read(monkeypatch, drafter, error, message):
    model = Decoder(cfg=decoders.SMALL, weights=decoders.small())
    monkeypatch.setattr(speculate, "feed_with_drafter", None)  # reading the prompts would fail
    with pytest.raises(error, match=message):
        model.generate([[1, 2], [3]], max_new_tokens=4, draft=Drafting(drafter))


@pytest.mark.parametrize(
    ("drafting", "error", "message"),
    [
        (Drafting(ScriptDrafter(2), jnp.zeros((3, 5), jnp.int32)), ValueError, r"script must be \[B, S\] with B=2"),
        (Drafting(ScriptDrafter(2), jnp.zeros(5, jnp.int32)), ValueError, r"script must be \[B, S\] with B=2"),
        (Drafting(ScriptDrafter(2), FLOATS), TypeError, "the script, must be int32, got float32"),
        (Drafting(ScriptDrafter(2), "text"), TypeError, "draft.weights must be a pytree of arrays, got str"),
        (ScriptDrafter(2), TypeError, "draft must be a Drafting, got ScriptDrafter"),
    ],
)
def test_what_a_drafter_works_with_is_checked_too(drafting, error, message):
    model = Decoder(cfg=decoders.SMALL, weights=decoders.small())
    with pytest.raises(error, match=message):
        model.generate([[1, 2], [3]], max_new_tokens=4, draft=drafting)


@pytest.mark.parametrize(("drafter", "kind"), [(Sloppy, "ABCMeta"), (None, "NoneType"), (3, "int")])
def test_drafts_come_from_a_drafter(drafter, kind):
    with pytest.raises(TypeError, match=f"drafter must be a Drafter, got {kind}"):
        Drafting(drafter)


@pytest.mark.parametrize("draft_by", [gdn.draft_by_model, gdn.draft_by_mtp])
def test_drafting_is_by_a_model_not_by_its_path(draft_by):
    with pytest.raises(TypeError, match=r"model must be a Decoder, got str; Decoder\.load"):
        draft_by("models/small")


def test_a_window_that_named_kernels_cannot_look_at_is_refused_at_once(monkeypatch):
    model = Decoder(cfg=decoders.SMALL, weights=decoders.small(), implementation="interpret")
    monkeypatch.setattr(speculate, "begun", None)
    with pytest.raises(UnsupportedError, match="a window must have from 1 to 16 tokens, got T = 17"):
        model.generate([[1, 2]], max_new_tokens=4, draft=gdn.draft_by_ngrams(16))


@pytest.mark.slow
def test_what_a_drafter_keeps_is_not_given_away():
    """A memory that is its weights, or twice the same array, or one that it keeps: each can be used again."""
    kept = jnp.zeros(2)
    weights = jnp.ones(2)

    class Keeping(Sloppy):
        def begin(self, weights, *, batch, capacity):
            return {"weights": weights, "kept": kept, "again": kept, "number": 3, "numpy": np.zeros(2, np.float32)}

    model = Decoder(cfg=decoders.SMALL, weights=decoders.small())
    plain = model.generate([[1, 2], [3]], max_new_tokens=4)
    for _ in range(2):
        found = model.generate([[1, 2], [3]], max_new_tokens=4, draft=Drafting(Keeping(), weights))
        assert found.tokens.tolist() == plain.tokens.tolist()
    assert [kept.is_deleted(), weights.is_deleted()] == [False, False]
