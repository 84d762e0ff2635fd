"""Whether drafts change anything: tokens and state of a whole model with drafts against those without.

The model's own tokens, with some places made wrong, serve as a script to propose from. So every number of accepted
proposals occurs, rejections follow each other, and rows of a batch differ, whatever the model is.
"""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.decoder.decoder import Decoder, GenerateResult
from gdn_jax.decoder.drafters import draft_by_ngrams
from gdn_jax.decoder.sample import GREEDY, SamplingParams
from gdn_jax.decoder.script import ScriptDrafter
from gdn_jax.decoder.speculate import Drafting
from gdn_jax.evidence import bounds, recipe
from gdn_jax.evidence.metrics import max_rel
from gdn_jax.evidence.report import Section

__all__ = ["Options", "run"]

_PROMPTS = (7, 4)
"""Tokens of the prompts: rows that stand at different places."""
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How many tokens each row is continued by, and how many are proposed at a time."""

    tokens: int = 512
    draft_tokens: int = 3


def run(name: str, model: Decoder, options: Options) -> Iterator[Section]:
    """A table of drafts and what they changed, and one of the states layer by layer.

    Passes when every token is the same, and S and the convolution's history of every layer within a bound: what drafts
    may change is how products round, which have more rows then. How far that carries depends on the model, and grows
    with its depth; so where it is more than the plain bound, the bound is a multiple of what as many rows change
    without drafts.

    Raises:
        ValueError: so few tokens that some number of accepted proposals would not occur.
    """
    _check_patterns(options)
    prompts = [_prompt(row, size, model) for row, size in enumerate(_PROMPTS)]
    rows, states = [], []
    for how, sampling in (("greedy", GREEDY), ("sampled", _SAMPLED)):
        plain = _continued(model, prompts, sampling, options, None)
        limits = _limits(model, prompts, sampling, options, plain)
        for label, drafting in _drafts(prompts, plain, model.cfg.vocab, options, everything=sampling is GREEDY):
            found = _continued(model, prompts, sampling, options, drafting)
            errors = _state_errors(found, plain)
            states.append((_worst(errors, limits), errors, limits))
            rows.append(_row(how, label, found, plain, states[-1][0], options))
    columns = ("drawing", "drafts", "tokens", "differing", "rounds", "proposed", "accepted", "rounds_by_accepted")
    columns = (*columns, "S_max_rel", "bound", "passed")
    title = f"{name}: {len(prompts)} rows of {options.tokens} tokens, with drafts against without"
    yield Section("speculation", title, columns, rows, all(row[-1] for row in rows))
    _, errors, limits = max(states, key=operator.itemgetter(0))
    layers = [(layer, error, limits[layer], error <= limits[layer]) for layer, error in errors.items()]
    title = f"S and history after {options.tokens} tokens, max_rel of the worst run above by GDN layer"
    yield Section(
        "speculation_state", title, ("layer", "max_rel", "bound", "passed"), layers, all(row[-1] for row in layers)
    )


def _prompt(row: int, size: int, model: Decoder) -> list[int]:
    """Token ids, but none that stands for an image."""
    text = np.setdiff1d(np.arange(model.cfg.vocab), sorted(model.vision))
    return text[np.floor(recipe.uniform(f"speculation/{row}", (size,), 0.0, float(text.size))).astype(int)].tolist()


def _continued(
    model: Decoder, prompts: list[list[int]], sampling: SamplingParams, options: Options, draft: Drafting | None
) -> GenerateResult:
    return model.generate(
        prompts, max_new_tokens=options.tokens, sampling=sampling, ignore_eos=True, keep_state=True, draft=draft
    )


def _limits(
    model: Decoder, prompts: list[list[int]], sampling: SamplingParams, options: Options, plain: GenerateResult
) -> dict[int, float]:
    """The bound of every layer: of the prompts beside copies of themselves, products have a window's number of rows."""
    beside = _continued(model, prompts * (options.draft_tokens + 1), sampling, options, None)
    changed = _state_errors(beside, plain)
    if not np.array_equal(beside.tokens[: len(prompts)], plain.tokens):
        changed = dict.fromkeys(changed, 0.0)  # of other tokens, states tell nothing
    return {layer: max(bounds.SPECULATION_STATE, bounds.SPECULATION_ROWS * error) for layer, error in changed.items()}


def _drafts(
    prompts: list[list[int]], plain: GenerateResult, vocab: int, options: Options, *, everything: bool
) -> Iterator[tuple[str, Drafting]]:
    """Ways of drafting: scripts with all, none or some places right, and prompt lookup."""
    size = options.draft_tokens
    script = np.full((len(prompts), max(map(len, prompts)) + options.tokens), -1, np.int32)
    for row, prompt in enumerate(prompts):
        script[row, : len(prompt) + options.tokens] = [*prompt, *plain.tokens[row].tolist()]
    right = _right_places(script.shape, size)
    wrong = np.where(script >= 0, (script + 1) % vocab, script)
    yield "some right", Drafting(ScriptDrafter(size), jnp.asarray(np.where(right, script, wrong)))
    if everything:
        yield "all right", Drafting(ScriptDrafter(size), jnp.asarray(script))
        yield "all wrong", Drafting(ScriptDrafter(size), jnp.asarray(wrong))
        yield "prompt lookup", draft_by_ngrams(size)


def _right_places(shape: tuple[int, int], size: int) -> np.ndarray:
    """Runs of right places of every length up to `size`, apart by one wrong place or by two."""
    runs = [place for length in range(size + 1) for place in (*(True,) * length, False)]
    return np.resize([*runs, False, *reversed(runs)], shape)


def _check_patterns(options: Options) -> None:
    """Play the rounds of the script, whose outcome depends on its places alone."""
    size = options.draft_tokens
    places = _right_places((len(_PROMPTS), max(_PROMPTS) + options.tokens), size)
    met = set()
    for row, first in zip(places, _PROMPTS, strict=True):
        at, last = first, first + options.tokens - 1
        while at < last:
            proposed = row[at + 1 : at + 1 + min(size, last - at - 1)]
            accepted = int(np.cumprod(proposed).sum())
            met.add(accepted)
            at += accepted + 1
    if len(met) <= size:
        raise ValueError(
            f"{options.tokens} tokens are too few for every number of accepted proposals from 0 to {size} to occur: "
            "take more tokens, or fewer proposals at a time"
        )


def _row(
    how: str,
    label: str,
    found: GenerateResult,
    plain: GenerateResult,
    worst: tuple[bool, float, float],
    options: Options,
) -> tuple[Any, ...]:
    differing = int(np.sum(found.tokens != plain.tokens))
    drafts = found.drafts
    assert drafts is not None
    beyond, error, limit = worst
    good = differing == 0 and not beyond and _as_meant(label, drafts, options)
    histogram = "/".join(map(str, drafts.by_accepted))
    counted = (drafts.rounds, drafts.proposed, drafts.accepted, histogram)
    return (how, label, found.tokens.size, differing, *counted, error, limit, good)


def _worst(errors: dict[int, float], limits: dict[int, float]) -> tuple[bool, float, float]:
    """Of the worst layer: whether it is beyond its bound, its error, and its bound."""
    return max((error > limits[layer], error, limits[layer]) for layer, error in errors.items())


def _as_meant(label: str, drafts: Any, options: Options) -> bool:
    """Whether rejections and acceptances occurred as the script has them: a check that meets none shows nothing."""
    if label == "some right":
        return min(drafts.by_accepted) > 0
    if label == "all right":
        return drafts.accepted == drafts.proposed > 0
    return label != "all wrong" or (drafts.accepted == 0 and drafts.proposed >= options.tokens - 1)


def _state_errors(found: GenerateResult, plain: GenerateResult) -> dict[int, float]:
    """Of each GDN layer, the larger error of S and history; those of the model's other layers have no S.

    `found` may have further rows.
    """
    got, want = (result.state.state.gdn for result in (found, plain))
    if want is None:
        return {0: 0.0}
    pairs = [jax.device_get((got.S, want.S)), jax.device_get((got.conv_hist, want.conv_hist))]
    return {
        layer: max(max_rel(a[layer, : b.shape[1]], b[layer]) for a, b in pairs if b.size)
        for layer in range(want.layers)
    }
