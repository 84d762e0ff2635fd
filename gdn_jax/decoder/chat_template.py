"""Chat templates: a conversation as the text that a model was trained on, by the Jinja template that comes with it.

Templates come with downloaded files, so they run in a sandbox that neither reaches Python's internals nor changes what
it is given.
"""

import datetime
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gdn_jax.errors import CheckpointError, UnsupportedError

__all__ = ["ChatTemplate"]

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A compiled template. `specials` are the special tokens it may name, such as `eos_token`; `source` names it.

    Raises:
        CheckpointError: the template is not valid Jinja.
    """

    def __init__(self, template: str, *, source: str, specials: Mapping[str, str]):
        self._source = source
        self._specials = dict(specials)
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{source}: the chat template is not valid: {error}") from error

    @typing.no_type_check
    def render(self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The conversation as text, up to where the model's answer begins if `add_generation_prompt`.

        `messages` are mappings with `role` and `content`, as chat services take them; `variables` are handed to the
        template as they are (`enable_thinking=False`, `tools=[…]`).

        Raises:
            TypeError: a message of another form. UnsupportedError: a message with an image or a video.
            ValueError: the template refuses the conversation.
        """
        for index, message in enumerate(messages):
            _check_message(index, message)
        settings = {"tools": None, "documents": None, **self._specials, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **settings)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ValueError(f"{self._source}: the chat template refuses this conversation: {error}") from error


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"messages[{index}] must be a mapping with a 'role' and a 'content', got {message!r:.80}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, Sequence):
        raise TypeError(f"messages[{index}]['content'] must be text or a list of parts, got {type(content).__name__}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise UnsupportedError(
                f"messages[{index}] has a part of type {kind!r}; this is a text model, which reads parts of type 'text'"
            )


def _environment() -> jinja2.Environment:
    """What published templates are written for: trimmed blocks, loop controls, and these few helpers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: marks what the model wrote, for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False
) -> str:
    """Plain JSON: jinja's own filter escapes characters of HTML, which models have not been shown."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
