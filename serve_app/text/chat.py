"""Chat templates, in Jinja's sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from engine.errors import InvalidRequestError, TokenizerError

MAX_PRODUCT_LEN = 1_000_000
"""Longest string or list that `*` may make in a template."""

MAX_POWER_OPERAND = 1_000
"""Largest operand of `**` in a template."""

MAX_PROMPT_CHARS = 16 * 1024 * 1024
"""Longest text that a template may render."""

_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class ChatTemplate:
    """A model's chat template, compiled once.

    Templates are written for Hugging Face's `apply_chat_template`, and find here what they find there: trimmed blocks,
    `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, loop controls and `{% generation %}`.

    The rendered text is tokenized with special tokens recognised, user content included: a user who writes
    "<|im_end|>" ends the turn, as with Hugging Face and the servers built on it. Exact agreement with the reference
    wants it so; a deployment that must tell users' text from structure has to refuse such text before rendering.

    The sandbox keeps a template from Python's internals, and from huge ranges, products and outputs. It does not bound
    the time and memory that loops take: templates come with the model, never from a client.
    """

    def __init__(
        self, source: str, bos_token: str, eos_token: str, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`bos_token`, `eos_token`: "" where the model has none. `now` is the clock of `strftime_now`.

        Raises `TokenizerError` where `source` is no valid template.
        """
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        try:
            self._template = environment.from_string(source)
            self._variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as e:
            raise TokenizerError(f"the chat template is no valid Jinja template: {e}") from e
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        `content` is a string, or a list of {"type": "text", "text": ...} parts, which are joined by newlines; it may
        be null in a message with `tool_calls`. `template_kwargs` are further variables, such as `enable_thinking`.

        Raises `InvalidRequestError` for messages that are malformed or that the template refuses, and for tools or
        variables that the template never reads; `TokenizerError` where the template does what the sandbox forbids.
        """
        variables = {
            "messages": [_plain_message(i, m) for i, m in enumerate(messages)],
            "tools": self._used("tools", list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokens,
            **self._extra(template_kwargs or {}),
        }
        try:
            return self._generate(variables)
        except _RaisedByTemplate as e:
            raise InvalidRequestError(f"the model's chat template refuses these messages: {e}", "messages") from e
        except (SecurityError, OverflowError, MemoryError, RecursionError) as e:
            raise TokenizerError(f"the chat template does what the sandbox forbids: {e}") from e
        except Exception as e:  # a template runs expressions of its own on the client's data: anything can come out
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {type(e).__name__}: {e}", "messages"
            ) from e

    def _generate(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_PROMPT_CHARS:
                raise InvalidRequestError(f"the rendered chat is longer than {MAX_PROMPT_CHARS} characters", "messages")
        return "".join(pieces)

    def _extra(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        for name, value in kwargs.items():
            if name in _ARGUMENTS:
                raise InvalidRequestError(f"{name} cannot be set by chat_template_kwargs", "chat_template_kwargs")
            self._used(name, value)
        return kwargs

    def _used(self, name: str, value: Any) -> Any:
        if name not in self._variables:
            param = "tools" if name == "tools" else "chat_template_kwargs"
            raise InvalidRequestError(f"the model's chat template does not read {name}", param)
        return value


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its content as one string, and without fields that are null: templates ask `is defined`."""
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where}.role is {message.get('role')!r}; expected a string", "messages")
    content = message.get("content")
    message = {name: value for name, value in message.items() if value is not None}
    if content is None and message.get("tool_calls"):
        return {**message, "content": None}
    if isinstance(content, list):
        content = "\n".join(_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequestError(
            f"{where}.content is {'null' if content is None else f'a {type(content).__name__}'}; "
            "expected a string or a list of text parts",
            "messages",
        )
    return {**message, "content": content}


def _part_text(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{where} is a {type(part).__name__}; expected an object", "messages")
    if part.get("type") != "text":
        raise InvalidRequestError(f"{where}.type is {part.get('type')!r}; this model reads only 'text'", "messages")
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{where}.text is {part.get('text')!r}; expected a string", "messages")
    return part["text"]


class _RaisedByTemplate(jinja2.TemplateError):
    """A template called `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes <, > and & for HTML; a prompt wants them as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with products bounded as it bounds ranges: "x" * 10**10 would fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Jinja's own renders as nothing; a template that reaches for internals is not to go unnoticed."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is unsafe")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and max(abs(left), abs(right)) > MAX_POWER_OPERAND:
            raise OverflowError(f"** has an operand above {MAX_POWER_OPERAND}")
        for sequence, count in ((left, right), (right, left)):
            repeats = isinstance(sequence, (str, list, tuple)) and isinstance(count, int)
            if repeats and len(sequence) * count > MAX_PRODUCT_LEN:
                raise OverflowError(f"a sequence repeated {count} times has more than {MAX_PRODUCT_LEN} items")
        return super().call_binop(context, operator, left, right)
