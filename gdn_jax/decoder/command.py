"""`gdn generate` and `gdn chat`. The library is imported when a command runs, not when a command line is parsed."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdn_jax.arguments import positive

if TYPE_CHECKING:
    from gdn_jax.decoder.decoder import Decoder, GenerateResult
    from gdn_jax.decoder.sample import SamplingParams
    from gdn_jax.decoder.speculate import Drafting
    from gdn_jax.decoder.tokenizer import Tokenizer

__all__ = ["add_parser"]

_INTERRUPTED = 130
_DRAFT_TOKENS = 3
_PLAIN_TOKENS = 49
"""To measure what generation without drafts takes: three dispatches behind the first token."""
_FILTERS = ("top_k", "top_p", "min_p")
_LOADING = ("tier", "quantiser", "precision", "prompt_precision", "implementation", "capacity", "kv_dtype")


def add_parser(commands: Any) -> None:
    """Add both commands to the subparsers of `gdn`."""
    _add_generate(commands)
    _add_chat(commands)


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue a prompt; the text comes as it is generated",
        description=(
            "Text goes to standard output, speed to standard error. The prompt is put into the model's chat template "
            "where there is one, unless --raw. Ctrl-C ends the text; a second one ends the program."
        ),
    )
    generate.add_argument("prompt", metavar="PROMPT", help="text, or - to read it from standard input")
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="insist on the chat template")
    form.add_argument("--raw", action="store_true", help="the prompt as it is, without a chat template")
    _add_common(generate, max_new_tokens=256)
    drafting = generate.add_argument_group(
        "drafting", "tokens proposed and looked at several at a time; the text is the same, sooner if they are right"
    )
    drafting.add_argument(
        "--speculate",
        metavar="HOW",
        help="ngram (what followed such tokens before), mtp (the model's own head), or the path of a smaller model",
    )
    drafting.add_argument(
        "--draft-tokens", type=positive, metavar="N", help="proposals at a time, with --speculate (default 3)"
    )
    generate.add_argument("--json", action="store_true", help="one JSON object at the end instead of text")
    generate.set_defaults(run=_generate)


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="a conversation, line by line; its state stays on the device between turns",
        description="Reads lines until the end of input. /reset begins anew. Ctrl-C ends an answer.",
    )
    _add_common(chat, max_new_tokens=2048)
    chat.set_defaults(run=_chat)


def _add_common(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="directory, GGUF file or conversion")
    parser.add_argument("--tier", choices=("f32", "bf16", "q4"), default="f32", help="form of the weights")
    parser.add_argument("--quantiser", choices=("absmax", "q4_0", "mse"), default="absmax", help="with --tier q4")
    parser.add_argument("--precision", choices=("exact", "q8"), default="exact", help="of products (q8: with q4 only)")
    parser.add_argument(
        "--prompt-precision",
        choices=("exact", "q8", "bf16"),
        default="exact",
        help="of products while a prompt is read",
    )
    parser.add_argument("--implementation", help="xla, triton, …: refused where it cannot be had (default: the best)")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="where the tokenizer is, if not with the model")
    parser.add_argument("--capacity", type=positive, metavar="N", help="most tokens of a sequence (default: as needed)")
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16"), default="float32", help="of keys and values")
    parser.add_argument("--system", metavar="TEXT", help="the system message of the conversation")
    parser.add_argument(
        "--set", type=_variable, action="append", default=[], metavar="NAME=JSON",
        help="a variable for the chat template, such as enable_thinking=false",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=positive, default=max_new_tokens, metavar="N", help="(default %(default)s)"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    drawing = parser.add_argument_group("drawing", "by default as the model's generation_config.json says, else greedy")
    drawing.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token")
    drawing.add_argument("--top-k", type=int, metavar="K", help="only the K most likely tokens (0: all)")
    drawing.add_argument("--top-p", type=float, metavar="P", help="only the most likely tokens that make up P")
    drawing.add_argument("--min-p", type=float, metavar="P", help="only tokens P times as likely as the most likely")
    drawing.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1: fewer repetitions")
    drawing.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")


def _variable(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        if name.isidentifier():
            return name, json.loads(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be NAME=JSON, such as enable_thinking=false, got {text!r}")


def _generate(options: argparse.Namespace) -> int:
    # Everything that can be refused is, before the weights are read.
    tokenizer = _tokenizer(options)
    sampling = _sampling(options)
    prompt = _encoded(sys.stdin.read() if options.prompt == "-" else options.prompt, tokenizer, options)
    _check_drafting(options)
    decoder = _load(options, tokenizer, mtp=options.speculate == "mtp")
    draft = _draft(options, decoder)
    result = decoder.generate(
        prompt,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        stop=options.stop,
        on_text=None if options.json else lambda _, piece: _show(piece),
        draft=draft,
        keep_state=draft is not None,
    )
    interrupted = "interrupted" in result.finish_reason
    speed_up = None if draft is None or interrupted else _speed_up(decoder, sampling, result)
    if options.json:
        print(json.dumps(_as_json(result, sampling, speed_up), indent=1, ensure_ascii=False))
    else:
        print()
    print(f"gdn generate: {_summary(result)}", file=sys.stderr)
    if result.drafts is not None:
        print(f"gdn generate: {_drafting(result, speed_up)}", file=sys.stderr)
    return _INTERRUPTED if interrupted else 0


def _check_drafting(options: argparse.Namespace) -> None:
    from gdn_jax.decoder.draft_check import check_vocabulary
    from gdn_jax.memory import of_checkpoint

    if options.speculate is None and options.draft_tokens is not None:
        raise ValueError("--draft-tokens belongs to --speculate")
    if options.speculate in (None, "ngram", "mtp"):
        return
    if not options.speculate or not Path(options.speculate).exists():
        raise FileNotFoundError(f"--speculate must be ngram, mtp or the path of a model, got {options.speculate!r}")
    ours, theirs = (of_checkpoint(path)[0] for path in (options.model, options.speculate))
    check_vocabulary(theirs.vocab, ours.vocab)


def _draft(options: argparse.Namespace, decoder: "Decoder") -> "Drafting | None":
    from gdn_jax.decoder import drafters

    count = options.draft_tokens or _DRAFT_TOKENS
    if options.speculate is None:
        return None
    if options.speculate == "ngram":
        return drafters.draft_by_ngrams(count)
    if options.speculate == "mtp":
        return drafters.draft_by_mtp(decoder, count)
    # Its tokens come as ids, and go into the other model's vocabulary, which is checked.
    smaller = _read(options, Path(options.speculate), decoder.tokenizer, mtp=False)
    return drafters.draft_by_model(smaller, count)


def _speed_up(decoder: "Decoder", sampling: "SamplingParams", result: "GenerateResult") -> float | None:
    """How many times as fast as without drafts, which is measured on the tokens that would come next, if they fit."""
    fast = result.timings.steady_tokens_per_second
    held = int(result.state.state.position[0]) + 1
    if fast is None or (decoder.capacity is not None and held + _PLAIN_TOKENS > decoder.capacity):
        return None
    plain = decoder.generate(
        [[]], max_new_tokens=_PLAIN_TOKENS, sampling=sampling, ignore_eos=True, state=result.state
    ).timings.steady_tokens_per_second
    return fast / plain if plain else None


def _drafting(result: "GenerateResult", speed_up: float | None) -> str:
    drafts = result.drafts
    assert drafts is not None
    share = f" ({drafts.accepted / drafts.proposed:.0%})" if drafts.proposed else ""
    a_round = (
        f"{(drafts.accepted + drafts.rounds) / drafts.rounds:.2f} tokens a round" if drafts.rounds else "no rounds"
    )
    ratio = "" if speed_up is None else f"; {speed_up:.2f} times as fast as without drafts"
    return f"{drafts.accepted} of {drafts.proposed} drafts accepted{share}, {a_round}{ratio}"


def _chat(options: argparse.Namespace) -> int:
    from gdn_jax.decoder.conversation import Conversation

    tokenizer = _tokenizer(options)
    tokenizer.require_template()
    sampling = _sampling(options)
    decoder = _load(options, tokenizer)

    def new() -> Conversation:
        return Conversation(
            decoder,
            system=options.system,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            stop=tuple(options.stop),
            variables=dict(options.set),
        )

    conversation = new()
    while (line := _next_line()) is not None:
        if line == "/reset":
            conversation = new()
        elif line:
            before = len(conversation.messages)
            turn = conversation.say(line, _show)
            print()
            anew = before > 1 and not turn.reused
            note = "; the earlier turns were read anew, because their tokens have changed" if anew else ""
            print(f"[{_summary(turn.result)}{note}]", file=sys.stderr)
    return 0


def _next_line() -> str | None:
    """The next line of input, None at its end; asked for on a terminal."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


def _tokenizer(options: argparse.Namespace) -> "Tokenizer":
    from gdn_jax.decoder.tokenizer import load_tokenizer

    if not options.model.exists():
        raise FileNotFoundError(f"{options.model}: no such file or directory")
    return load_tokenizer(options.tokenizer or options.model)


def _load(options: argparse.Namespace, tokenizer: "Tokenizer", *, mtp: bool = False) -> "Decoder":
    from gdn_jax import environment
    from gdn_jax.decoder.compilation import keep_compiled_programs

    keep_compiled_programs()
    for warning in environment.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    return _read(options, options.model, tokenizer, mtp=mtp)


def _read(options: argparse.Namespace, path: Path, tokenizer: "Tokenizer | None", *, mtp: bool) -> "Decoder":
    from gdn_jax.decoder.decoder import Decoder
    from gdn_jax.progress import Meter

    settings = {name: getattr(options, name) for name in _LOADING}
    with Meter("loading", sys.stderr) as meter:
        return Decoder.load(path, tokenizer=tokenizer, **settings, mtp=mtp, progress=meter)


def _encoded(prompt: str, tokenizer: "Tokenizer", options: argparse.Namespace) -> list[int]:
    """The prompt's ids, in the chat template where there is one and it is not declined."""
    if options.raw or (tokenizer.template is None and not options.chat):
        if options.system is not None or options.set:
            raise ValueError("--system and --set belong to a chat template, which is not used here")
        ids = tokenizer.encode(prompt)
    else:
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        ids = tokenizer.encode_chat([*system, {"role": "user", "content": prompt}], **dict(options.set))
    if not ids:
        raise ValueError("the prompt is empty: it has no tokens")
    return ids


def _sampling(options: argparse.Namespace) -> "SamplingParams":
    """What the model's files recommend, but for what the command line says."""
    from gdn_jax.decoder.generation_config import recommended_sampling

    names = ("temperature", *_FILTERS, "repetition_penalty", "seed")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    sampling = dataclasses.replace(recommended_sampling(options.model), **given)
    idle = [f"--{name.replace('_', '-')}" for name in _FILTERS if name in given]
    if sampling.temperature == 0 and idle:
        raise ValueError(f"{', '.join(idle)} changes nothing at temperature 0; give --temperature too")
    return sampling


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _summary(result: "GenerateResult") -> str:
    timings = result.timings
    speed = "" if timings.tokens_per_second is None else f" at {timings.tokens_per_second:,.1f} tok/s"
    compiling = f", {timings.compile_seconds:.2f} s of it compiling" if timings.compile_seconds else ""
    return (
        f"{timings.prompt_tokens} prompt tokens, {timings.new_tokens} new ones{speed}, the first after "
        f"{timings.first_token_seconds:.2f} s{compiling}; ended: {', '.join(result.finish_reason)}"
    )


def _as_json(result: "GenerateResult", sampling: "SamplingParams", speed_up: float | None) -> dict[str, Any]:
    assert result.text is not None
    drafts = result.drafts
    counts = {} if drafts is None else {name: getattr(drafts, name) for name in ("rounds", "proposed", "accepted")}
    return {
        "text": result.text[0],
        "tokens": result.tokens[0].tolist(),
        "finish_reason": result.finish_reason[0],
        "timings": result.timings._asdict(),
        "sampling": dataclasses.asdict(sampling),
        **({} if drafts is None else {"drafts": counts | {"speed_up": speed_up}}),
    }
