"""A conversation whose state stays on the device between turns."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gdn_jax.decoder.decoder import Decoder, GenerateResult
from gdn_jax.decoder.prefix_cache import PrefixCache
from gdn_jax.decoder.prompts import NO_TOKENIZER
from gdn_jax.decoder.sample import GREEDY, SamplingParams
from gdn_jax.errors import UnsupportedError

__all__ = ["Conversation", "Turn"]


_BEGINNING_OF_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"


class Turn(NamedTuple):
    """One answer: its `text`, the whole `result`, and how many tokens of the conversation did not have to be read."""

    text: str
    result: GenerateResult
    reused: int


class Conversation:
    """A dialogue with a model by its chat template; `messages` is what has been said.

    Every turn, the template writes out the whole conversation. As long as that begins with exactly the tokens that the
    model has consumed and generated so far, only the rest is fed. Some templates rewrite earlier turns (they drop what
    a model has thought), and text does not always divide into the tokens that the model chose for it; then the
    conversation is read from the beginning, and `Turn.reused` is 0; with a `prefix_cache`, it is what the cache knows
    of the beginning. What stands before `</think>` in an answer goes into the message's `reasoning_content`, where
    templates look for it.

    `variables` are handed to the template; see `Decoder.generate` for the other arguments.

    Raises:
        UnsupportedError: the model has no tokenizer or no chat template.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        sampling: SamplingParams = GREEDY,
        stop: str | tuple[str, ...] = (),
        variables: Mapping[str, Any] | None = None,
        prefix_cache: PrefixCache | None = None,
    ):
        if decoder.tokenizer is None:
            raise UnsupportedError(f"a conversation needs a tokenizer, and {NO_TOKENIZER}")
        decoder.tokenizer.require_template()
        self._decoder, self._tokenizer = decoder, decoder.tokenizer
        self._settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop}
        self._variables, self._prefix_cache = dict(variables or {}), prefix_cache
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self._tokens: list[int] = []  # of the sequence on the device, the pending one included
        self._rows: Any = None

    def say(self, text: str, on_text: Callable[[str], None] | None = None) -> Turn:
        """Say something and get the answer, piece by piece through `on_text`.

        After an error the conversation is as it was before. Errors are those of `Decoder.generate` and
        `ChatTemplate.render`.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self._tokenizer.encode_chat(messages, **self._variables)
        known = len(self._tokens)
        continues = self._rows is not None and tokens[:known] == self._tokens
        result = self._decoder.generate(
            [tokens[known:] if continues else tokens],
            state=self._rows if continues else None,
            keep_state=True,
            prefix_cache=None if continues else self._prefix_cache,
            on_text=None if on_text is None else lambda _, piece: on_text(piece),
            **self._settings,
        )
        assert result.text is not None
        answer = result.text[0]
        self.messages = [*messages, _assistant(answer)]
        self._tokens, self._rows = tokens + result.tokens[0, : result.lengths[0]].tolist(), result.state
        return Turn(answer, result, known if continues else result.timings.reused_tokens)


def _assistant(answer: str) -> dict[str, str]:
    """The answer as a message. The generation prompt may have opened the thought, so only its end is relied upon."""
    thought, end, rest = answer.partition(_END_OF_THOUGHT)
    if not end:
        return {"role": "assistant", "content": answer}
    thought = thought.removeprefix(_BEGINNING_OF_THOUGHT).strip("\n")
    return {"role": "assistant", "reasoning_content": thought, "content": rest.lstrip("\n")}
