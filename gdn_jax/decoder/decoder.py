"""`Decoder`: a model that generates, from its files to text."""

import dataclasses
import functools
import os
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import checkpoints
from gdn_jax import ops
from gdn_jax.decoder.answer import Answer
from gdn_jax.decoder.compilation import CompileClock
from gdn_jax.decoder.config import DecoderConfig
from gdn_jax.decoder.draft_check import check_drafter
from gdn_jax.decoder.generate import NOTHING, Generation, Policy, Rows, bucket, check_rows, new_rows
from gdn_jax.decoder.generation_config import (
    END_KEYS,
    VISION_KEYS,
    end_ids,
    named_ids,
    recommended_sampling,
    vision_ids,
)
from gdn_jax.decoder.interrupts import Interrupts
from gdn_jax.decoder.mtp_weights import MtpWeights, read_mtp
from gdn_jax.decoder.network import TextNetwork
from gdn_jax.decoder.prefix_cache import CachedPrompts, PrefixCache
from gdn_jax.decoder.prompts import NO_TOKENIZER, read_count, read_prompts, read_stops
from gdn_jax.decoder.sample import GREEDY, SamplingParams
from gdn_jax.decoder.speculate import DraftCounts, Drafting, SpeculativeGeneration
from gdn_jax.decoder.state import DecoderState, decoder_state_shapes, init_decoder_state
from gdn_jax.decoder.text_stream import TextStream
from gdn_jax.decoder.weights import DecoderWeights, read_decoder
from gdn_jax.errors import StateMismatchError, UnsupportedError
from gdn_jax.fingerprints import fingerprint
from gdn_jax.require import require_kind
from gdn_jax.state_store import load_state, save_state
from gdn_jax.state_value import resize

if TYPE_CHECKING:
    from gdn_jax.decoder.tokenizer import Tokenizer

OnText = Callable[[int, str], None]

__all__ = ["Decoder", "GenerateResult", "Timings"]

# Room is allotted in powers of two from here on, so that requests of similar length share programs.
_LEAST_CAPACITY = 256
# The ids that end a row are padded to a multiple of this with an id that no token has, for the same reason.
_ENDS = 8
_NO_TOKEN = -3


class Timings(NamedTuple):
    """Where the time of a request went, by the wall clock.

    `prompt_tokens` and `new_tokens` are sums over the rows. `first_token_seconds`: until the first token of every row
    was on the host. `decode_seconds`: from there to the last token. Both include `compile_seconds`, which is 0 once
    programs for these shapes exist. `reused_tokens`: how many of the prompts' came out of a prefix cache.
    """

    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    decode_seconds: float
    compile_seconds: float
    tokens_per_second: float | None
    """New tokens after the first of every row, per second of `decode_seconds`; None where there were none."""
    reused_tokens: int = 0
    steady_tokens_per_second: float | None = None
    """New tokens after the first dispatch of several, per second from there on: nothing is compiled any more.
    None where there were too few."""


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What a request led to, row by row.

    `tokens` int32 [B, n]: the new tokens, -1 after the end of a row; `lengths` int32 [B] counts them. The token that
    ended a row is among them. `text`: without special tokens, cut before a stop string; None without a tokenizer.
    `finish_reason`: "eos" (a token of `ends`), "stop" (a stop string), "length" (`max_new_tokens`) or "interrupted".
    `state`: the sequences, to go on from; None unless asked for. `drafts`: how drafting went; None without.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    text: list[str] | None
    finish_reason: tuple[str, ...]
    timings: Timings
    state: Any = None
    drafts: DraftCounts | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decoder:
    """A model ready to generate: weights on the device, and what its files say about text.

    `ends`: ids after which a row is over. `vision`: ids that stand for images, which this text model refuses.
    `capacity`: the most tokens of a sequence, prompt included, for which room is kept; None: as much as each request
    needs, in powers of two. `precision` is that of the steps, `prompt_precision` that of reading prompts, which may be
    "bf16" too; see `prefill_tokens`. `sampling`: the settings that the model's files recommend. `mtp`: the model's
    multi-token-prediction head, if it was asked for.
    """

    cfg: DecoderConfig
    weights: DecoderWeights
    tokenizer: "Tokenizer | None" = None
    ends: tuple[int, ...] = ()
    vision: frozenset[int] = frozenset()
    capacity: int | None = None
    kv_dtype: str = "float32"
    precision: str = "exact"
    prompt_precision: str = "exact"
    implementation: str | None = None
    sampling: SamplingParams = GREEDY
    mtp: MtpWeights | None = None

    @classmethod
    @typing.no_type_check
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        tier: str = "f32",
        quantiser: str = "absmax",
        tokenizer: "Tokenizer | str | os.PathLike[str] | None" = None,
        capacity: int | None = None,
        kv_dtype: str = "float32",
        precision: str = "exact",
        prompt_precision: str = "exact",
        implementation: str | None = None,
        mtp: bool = False,
        progress=None,
    ) -> "Decoder":
        """Read a model: a Hugging Face directory, a GGUF file or a converted checkpoint; see `load_decoder`.

        `tokenizer`: where to find it if not with the model. Without any, the decoder takes and gives token ids only.
        `mtp`: read the model's multi-token-prediction head too, to draft by.

        Raises:
            CheckpointError: a file is missing, damaged or does not hold what it should, such as an MTP head.
            ValueError: an unknown tier, quantiser or `kv_dtype`, or a capacity below 1. UnsupportedError: a precision
            or implementation that cannot be had, an architecture or a vocabulary that is not supported.
        """
        form = "q4" if tier == "q4" else "f32"
        ops.check_precision(precision, form)
        ops.check_precision(prompt_precision, form, ops.PROMPT_PRECISIONS)
        ops.check_implementation(implementation)
        folder = Path(path)
        with checkpoints.open_checkpoint(path, mtp=mtp) as checkpoint:
            cfg = DecoderConfig.from_hf(checkpoint.config)
            # Refused now, and not after minutes of reading weights.
            decoder_state_shapes(cfg, batch=1, capacity=1 if capacity is None else capacity, kv_dtype=kv_dtype)
            text = _find_tokenizer(folder, tokenizer)
            ends = end_ids(folder) | named_ids(checkpoint.config, END_KEYS, str(path))
            vision = vision_ids(folder) | named_ids(checkpoint.config, VISION_KEYS, str(path))
            sampling = recommended_sampling(folder)
            _, weights = read_decoder(checkpoint, tier=tier, quantiser=quantiser, progress=progress)
            head = read_mtp(checkpoint, cfg=cfg, weights=weights, quantiser=quantiser) if mtp else None
        if text is not None:
            ends, vision = ends | set(text.ends), vision | text.vision
        return cls(
            cfg=cfg,
            weights=weights,
            tokenizer=text,
            ends=tuple(sorted(ends)),
            vision=frozenset(vision),
            capacity=capacity,
            kv_dtype=kv_dtype,
            precision=precision,
            prompt_precision=prompt_precision,
            implementation=implementation,
            sampling=sampling,
            mtp=head,
        )

    @typing.no_type_check
    def generate(
        self,
        prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams = GREEDY,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        on_text: OnText | None = None,
        state: Rows | None = None,
        keep_state: bool = False,
        prefix_cache: PrefixCache | None = None,
        draft: Drafting | None = None,
        chunk: int = 16,
    ) -> GenerateResult:
        """Continue a prompt, or a batch of prompts of any lengths, by up to `max_new_tokens` tokens each.

        A prompt is text or token ids; text is taken as it is, without a chat template. A row ends after a token of
        `ends` (unless `ignore_eos`), where one of the strings in `stop` is complete, or when it has its tokens.
        `on_text(row, piece)` is called with text as it becomes certain. Tokens are generated `chunk` at a time on the
        device; this changes when they are seen, not what they are.

        With `keep_state`, the result's `state` can be given to a further call, which then continues every row where it
        was: all of the row's tokens count as if they stood before the new prompt, which may be empty. A state is a
        value: a call copies it, and it can be used any number of times. Rows that end with a stop string go back to the
        token that completed it, which costs a copy of the GDN state for every chunk in flight.

        With a `prefix_cache`, a prompt that begins as one did that was read before goes on from the state that was kept
        then, and reads only the rest: the tokens are the same, up to the rounding of reading a prompt in other pieces.
        See `PrefixCache` for what is kept. For prompts from the beginning only, not with a `state`.

        With `draft`, tokens are proposed and looked at several at a time: the same tokens, sooner where many proposals
        are right. `drafts` of the result counts them; `chunk` then counts rounds. See `draft_by_ngrams`,
        `draft_by_model` and `draft_by_mtp`. A drafter knows the tokens of this request, not those of a given `state`.
        The same, that is, but for rounding (1e-7), which a token follows where two logits are as close as that. With
        `precision="q8"` that rounding can turn an 8-bit step (a hundredth), and tokens differ here and there; in a
        bfloat16 cache it can turn the last bit of a key or value.

        Ctrl-C ends the generation, not the program: the result holds what was generated so far, its reason is
        "interrupted", and its state is as good as any other. A second Ctrl-C raises KeyboardInterrupt.

        Raises:
            ValueError: an empty prompt, one that does not fit, ids outside the vocabulary, a setting out of range, a
            prefix cache beside a state.
            TypeError: a prompt or setting of another kind. UnsupportedError: text without a tokenizer, images.
            StateMismatchError: a state of another model or batch. GdnError: the model's logits are not finite.
        """
        started = time.perf_counter()
        prompts = read_prompts(
            prompt, self.tokenizer, vocab=self.cfg.vocab, vision=self.vision, may_be_empty=state is not None
        )
        stops = read_stops(stop)
        wanted, chunk = read_count("max_new_tokens", max_new_tokens), read_count("chunk", chunk)
        require_kind("sampling", sampling, SamplingParams)
        if self.tokenizer is None and (stops or on_text is not None):
            raise UnsupportedError(f"stop strings and on_text need a tokenizer, and {NO_TOKENIZER}")
        ends = frozenset() if ignore_eos else frozenset(self.ends)
        policy = _policy(sampling, ends, len(prompts))
        if state is not None:
            _check_rows(state, self.cfg, len(prompts))
        network = TextNetwork(self.cfg, self.precision, self.implementation, self.prompt_precision)
        rows, prompts = self._rows(state, prompts, wanted)
        reading: dict[str, Any] = {"prompts": prompts}
        cached = None
        if prefix_cache is not None:
            cached = self._cached(prefix_cache, network, prompts, fresh=state is None)
            reading = {"prompts": cached.rests, "marks": cached.marks, "at_mark": cached.keep}
        kind: Callable[..., Generation] = Generation
        if draft is not None:
            _check_draft(draft, self.cfg, rows.state, self.implementation)
            known = [prompt[:count] for prompt, count in zip(prompts, cached.reused, strict=True)] if cached else None
            kind = functools.partial(SpeculativeGeneration, drafting=draft, known=known)

        answers = [Answer(self._stream(stops), ends) for _ in prompts]
        with CompileClock() as compiling, Interrupts() as interrupts:
            generation = kind(
                network,
                self.weights,
                rows if cached is None else cached.restore(rows),
                policy,
                wanted=wanted,
                chunk=chunk,
                rewindable=keep_state and bool(stops),
                **reading,
            )
            arrivals = _collect(generation, answers, interrupts, on_text)
            rows = generation.finish()
            if cached is not None:
                cached.keep_answers(rows, [answer.tokens for answer in answers])
            for answer in answers:
                answer.close("length" if len(answer.tokens) == wanted else "interrupted")
            _deliver(answers, on_text, interrupts)
        lengths = [len(answer.tokens) for answer in answers]
        after_first = sum(lengths) - len(lengths)
        first, last = arrivals[0].time, arrivals[-1].time
        return GenerateResult(
            tokens=_matrix([answer.tokens for answer in answers]),
            lengths=np.array(lengths, np.int32),
            text=None if self.tokenizer is None else [answer.text for answer in answers],
            finish_reason=tuple(str(answer.reason) for answer in answers),
            timings=Timings(
                prompt_tokens=sum(map(len, prompts)),
                new_tokens=sum(lengths),
                first_token_seconds=first - started,
                decode_seconds=last - first,
                compile_seconds=compiling.seconds,
                tokens_per_second=after_first / (last - first) if after_first else None,
                reused_tokens=0 if cached is None else sum(cached.reused),
                steady_tokens_per_second=_rate(arrivals[1:]),
            ),
            state=rows if keep_state else None,
            drafts=generation.counts if isinstance(generation, SpeculativeGeneration) else None,
        )

    @functools.cached_property
    def weights_id(self) -> str:
        """What identifies the weights; see `gdn_jax.fingerprint`, which is asked once."""
        return fingerprint(self.weights)

    @typing.no_type_check
    def save_state(self, path: str | os.PathLike[str], state: Rows) -> None:
        """Save the `state` of a result as the directory `path`, to go on from in any process; see `gdn_jax.save_state`.

        Raises:
            As `gdn_jax.save_state`.
        """
        require_kind("state", state, Rows)
        save_state(path, state, cfg=self.cfg, weights_id=self.weights_id)

    @typing.no_type_check
    def load_state(self, path: str | os.PathLike[str]) -> Rows:
        """The sequences that were saved at `path` with a model of the same weights, for `generate` to go on from.

        Raises:
            As `gdn_jax.load_state`. StateMismatchError: it is a bare state, which does not say what comes next.
        """
        state = load_state(path, cfg=self.cfg, weights_id=self.weights_id)
        if not isinstance(state, Rows):
            raise StateMismatchError(
                f"{path}: holds a {type(state).__name__} without the tokens that are to come next; "
                "read it with gdn_jax.load_state, and go on with decode_step"
            )
        return state

    @typing.no_type_check
    def _cached(
        self, cache: PrefixCache, network: TextNetwork, prompts: list[list[int]], *, fresh: bool
    ) -> CachedPrompts:
        require_kind("prefix_cache", cache, PrefixCache)
        if not fresh:
            raise ValueError("a prefix_cache is for prompts from the beginning; go on with the state, or begin anew")
        return CachedPrompts(cache, cache.model(self.weights, (network, self.kv_dtype)), prompts)

    def _rows(self, state: Rows | None, prompts: list[list[int]], wanted: int) -> tuple[Rows, list[list[int]]]:
        """The sequences to start from, with room enough, and what is to be fed to each."""
        if state is None:
            capacity = self._room(np.zeros(len(prompts), np.int32), prompts, wanted)
            fresh = init_decoder_state(self.cfg, batch=len(prompts), capacity=capacity, kv_dtype=self.kv_dtype)
            return new_rows(fresh, batch=len(prompts), vocab=self.cfg.vocab), prompts
        fed = [[last, *ids] for last, ids in zip(np.asarray(state.tokens).tolist(), prompts, strict=True)]
        capacity = max(self._room(np.asarray(state.state.position), fed, wanted), state.state.capacity)
        return resize(state, capacity=capacity), fed

    def _room(self, used: np.ndarray, prompts: list[list[int]], wanted: int) -> int:
        """The capacity for a request whose rows have `used` [B] tokens already."""
        needed = used + np.array([len(prompt) for prompt in prompts]) + wanted
        row = int(needed.argmax())
        if self.capacity is None:
            return bucket(int(needed[row]), least=_LEAST_CAPACITY)
        if needed[row] > self.capacity:
            raise ValueError(
                f"prompt {row} does not fit: {used[row]} tokens so far, {len(prompts[row])} in the prompt and {wanted} "
                f"new ones make {needed[row]}, and the capacity is {self.capacity}; load the model with a larger "
                "capacity, or with none to have it grow"
            )
        return self.capacity

    def _stream(self, stops: tuple[str, ...]) -> TextStream | None:
        return None if self.tokenizer is None else TextStream(self.tokenizer.decode, stops)


class _Arrival(NamedTuple):
    """When a block had come, and how many tokens there were with it."""

    time: float
    tokens: int


def _collect(
    generation: Generation, answers: list[Answer], interrupts: Interrupts, on_text: OnText | None
) -> list[_Arrival]:
    """Read the generation to its end, block by block."""
    arrivals = []
    for block in generation:
        arrived = time.perf_counter()
        for row, answer in enumerate(answers):
            steps = answer.take(block[:, row])
            if steps is not None:
                generation.halt(row, steps)
        arrivals.append(_Arrival(arrived, sum(len(answer.tokens) for answer in answers)))
        _deliver(answers, on_text, interrupts)
        if interrupts.requested:
            generation.stop()
    return arrivals


def _rate(arrivals: list[_Arrival]) -> float | None:
    """Tokens per second from the first of them to the last."""
    if len(arrivals) < 2:
        return None
    (begin, before), *_, (end, after) = arrivals
    return (after - before) / (end - begin) if after > before and end > begin else None


def _deliver(answers: list[Answer], on_text: OnText | None, interrupts: Interrupts) -> None:
    """Hand out new text. A callback that is interrupted ends the generation as Ctrl-C elsewhere does."""
    if on_text is None:
        return
    for row, answer in enumerate(answers):
        piece = answer.undelivered()
        if piece:
            try:
                on_text(row, piece)
            except KeyboardInterrupt:
                interrupts.requested = True


def _policy(sampling: SamplingParams, ends: frozenset[int], batch: int) -> Policy:
    padded = np.full(max(1, -(-len(ends) // _ENDS)) * _ENDS, _NO_TOKEN, np.int32)
    padded[: len(ends)] = sorted(ends)
    return Policy(sampling.knobs(), jnp.asarray(sampling.row_seeds(batch)), jnp.asarray(padded))


def _check_draft(draft: Any, cfg: DecoderConfig, state: DecoderState, implementation: str | None) -> None:
    require_kind("draft", draft, Drafting)
    check_drafter(draft.drafter, vocab=cfg.vocab, hidden=cfg.hidden)
    if state.gdn is not None:
        ops.choose_delta_window(state.gdn.S, draft.drafter.count + 1, implementation)  # refuses what it cannot look at


def _check_rows(rows: Any, cfg: DecoderConfig, batch: int) -> None:
    check_rows(rows, cfg)
    if rows.state.batch != batch:
        raise StateMismatchError(f"the state has {rows.state.batch} rows, but there are {batch} prompts")


def _matrix(rows: list[list[int]]) -> np.ndarray:
    matrix = np.full((len(rows), max(map(len, rows))), NOTHING, np.int32)
    for row, tokens in enumerate(rows):
        matrix[row, : len(tokens)] = tokens
    return matrix


def _find_tokenizer(folder: Path, wanted: Any) -> "Tokenizer | None":
    """The tokenizer that was given, that of the files named, or that of the model where it has one."""
    try:
        from gdn_jax.decoder import tokenizer
    except ModuleNotFoundError as error:
        if wanted is None:
            return None
        raise UnsupportedError(f"reading a tokenizer needs the package {error.name}, which is not installed") from error
    if isinstance(wanted, tokenizer.Tokenizer):
        return wanted
    if wanted is not None:
        return tokenizer.load_tokenizer(wanted)
    return tokenizer.load_tokenizer(folder) if tokenizer.has_tokenizer(folder) else None
