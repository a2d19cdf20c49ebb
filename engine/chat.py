"""A conversation to prompt tokens, through the chat template that the model brings.

Templates are Jinja programs written for the Hugging Face libraries; they run in Jinja's sandbox with the same filters
and functions that those give them. Text from outside never turns into control tokens: before a template sees a
control token written out in a message (`<|im_end|>`), the text is broken by a random mark that no message can
contain, and the mark is taken out again when the text is tokenised.
"""

import json
import re
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.tokenizer import Tokenizer, one_of

ROLES = ("system", "developer", "user", "assistant", "tool")

OWNERS = {"tool_calls": "assistant", "tool_call_id": "tool"}
"""Fields that templates look for in messages of one role only."""

FIELD_USE = r"""\bm(sg|essages?(\[[^\]]+\])?)?(\.|\.get\(['"]|\[['"]){key}\b"""
"""How a template reads a field of a message: `message.name`, `messages[0]['name']`, `msg.get("name")`, …"""

OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of every template, which are set here."""

MAX_DEPTH = 100
"""Levels of objects and lists in a field; far deeper ones would exhaust the stack of whoever walks through them."""


class ChatError(ValueError):
    """The conversation can't be turned into a prompt. `param` names the part of the request that is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    check: Callable[[str], None] = lambda text: None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Prompt token ids of a conversation in the OpenAI shape, the start of the assistant's next message included.

    `check` sees the prompt's text before it is tokenised, and may raise. `tools` are shown to the model; `options` are
    variables of its template's own, such as `enable_thinking`. Raises ChatError for what the template or the model
    can't take.
    """
    if tokenizer.chat_template is None:
        raise ChatError(
            "this model has no chat template (it is a base model): use /v1/completions with a prompt", "model"
        )
    if not messages:
        raise ChatError("messages is empty: send at least one message", "messages")
    template = tokenizer.chat_template
    if tools:
        template = tokenizer.tool_template or template
        if "tools" not in template_variables(template):
            raise ChatError("this model's chat template has no place for tools: leave tools out", "tools")
        _check_depth(tools, "tools")
    own = dict(options or {})
    _check_options(own, template, tokenizer)
    plain = [_plain(message, f"messages[{i}]", template) for i, message in enumerate(messages)]

    mark = f"\ufdd0{secrets.token_hex(8)}\ufdd0"
    starts = _control_starts(tokenizer)
    marked = [{key: value if key == "role" else _mark(value, starts, mark) for key, value in m.items()} for m in plain]
    try:
        text = _compile(template).render(
            messages=marked,
            tools=_mark(list(tools), starts, mark) if tools else None,
            documents=None,
            add_generation_prompt=True,
            **_mark(own, starts, mark),
            **tokenizer.special_tokens,
        )
    except (TemplateError, TypeError, LookupError, ArithmeticError) as error:
        reason = str(error).replace(mark, "")
        raise ChatError(f"the model's chat template refused these messages: {reason}", "messages") from error
    check(text.replace(mark, ""))
    try:
        ids = _encode(tokenizer, text, mark)
    except ValueError as error:
        raise ChatError(str(error), "messages") from error
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _plain(message: Mapping[str, Any], where: str, template: str) -> dict[str, Any]:
    """The message as templates expect it: content is one string, empty fields are gone, arguments are objects."""
    if not isinstance(message, Mapping):
        raise ChatError(f"{where} must be an object with a role and a content", where)
    role = message.get("role")
    if role not in ROLES:
        raise ChatError(f"{where}.role is {reprlib.repr(role)}; it must be one of {', '.join(ROLES)}", f"{where}.role")
    if role == "developer" and role not in template:
        role = "system"  # what the role was called before it was renamed
    plain: dict[str, Any] = {"role": role}
    plain["content"] = _text(message.get("content"), role, f"{where}.content")
    for key, value in message.items():
        if key in plain or value in (None, [], {}):
            continue
        if role != (owner := OWNERS.get(key, role)):
            raise ChatError(f"{where}.{key} belongs to messages of the role {owner}, not {role}", f"{where}.{key}")
        # A tool's answer must name its call; most templates tell by the order, so that the id alone is not in them.
        # A name as long as a body is no pattern to compile: first see that the template has it at all.
        if key != "tool_call_id" and (
            key not in template or not re.search(FIELD_USE.format(key=re.escape(key)), template)
        ):
            raise ChatError(
                f"{where}.{key} is not supported: this model's chat template has no place for it", f"{where}.{key}"
            )
        _check_depth(value, f"{where}.{key}")
        plain[key] = _tool_calls(value, f"{where}.{key}") if key == "tool_calls" else value
    return plain


def _text(content: Any, role: str, where: str) -> str:
    """Content as one string; text parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise ChatError(f"{where} must be a string or a list of text parts", where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", None):
            raise ChatError(
                f"{where}[{i}] is a part of type {reprlib.repr(kind)}: this model takes text only",
                f"{where}[{i}].type",
            )
        if kind is None or not isinstance(part.get("text"), str):
            raise ChatError(f'{where}[{i}] must look like {{"type": "text", "text": "…"}}', f"{where}[{i}]")
        for key, value in part.items():
            if key not in ("type", "text") and value is not None:
                raise ChatError(f"{where}[{i}].{key[:60]} is not supported: leave it out", f"{where}[{i}].{key[:60]}")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: the API carries them as JSON text, templates write them as JSON."""
    try:
        read: list[dict[str, Any]] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
            for call in calls
        ]
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ChatError(f"{where} must be a list of function calls whose arguments are JSON text", where) from error
    for i, call in enumerate(read):
        if not isinstance(call["function"].get("name"), str) or call.get("type") not in (None, "function"):
            raise ChatError(f"{where}[{i}] must have the type function and name the function", f"{where}[{i}]")
        _check_depth(call["function"]["arguments"], f"{where}[{i}].function.arguments")
    return read


def _arguments(text: str) -> Any:
    return json.loads(text, parse_constant=_no_number)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_depth(value: Any, where: str) -> None:
    """Refuse what is nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, Mapping | list)
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not level:
            return
    raise ChatError(f"{where} has objects or lists nested more than {MAX_DEPTH} levels deep: flatten it", where)


def _mark(value: Any, starts: re.Pattern[str], mark: str) -> Any:
    """`value` with every control token in its strings, at any depth, broken by `mark` after its first character."""
    if isinstance(value, str):
        return starts.sub(lambda start: start[0] + mark, value)
    if isinstance(value, Mapping):
        return {_mark(key, starts, mark): _mark(item, starts, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, starts, mark) for item in value]
    return value


@lru_cache(maxsize=16)
def _control_starts(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches the first character of every control token in a text, also of one that begins inside another."""
    tails: dict[str, list[str]] = {}
    for name in tokenizer.control_tokens:
        tails.setdefault(name[0], []).append(name[1:])
    return re.compile("|".join(f"{re.escape(first)}(?={one_of(rest)})" for first, rest in tails.items()) or r"(?!)")


def _encode(tokenizer: Tokenizer, text: str, mark: str) -> list[int]:
    """Token ids of rendered text: control tokens where the template wrote them, not where a message did."""
    if mark not in text:
        return tokenizer.encode(text, add_special=False)
    ids: list[int] = []
    done = 0
    for start, end in tokenizer.control_spans(text):
        ids += tokenizer.encode_plain(text[done:start].replace(mark, ""))
        ids.append(tokenizer.control_tokens[text[start:end]])
        done = end
    return ids + tokenizer.encode_plain(text[done:].replace(mark, ""))


def _check_options(options: Mapping[str, Any], template: str, tokenizer: Tokenizer) -> None:
    """Refuse options that the template does not look at, or that are not the caller's to set."""
    known = template_variables(template) - OURS - set(tokenizer.special_tokens)
    for name, value in options.items():
        where = name if name == "reasoning_effort" else f"chat_template_kwargs.{name[:60]}"
        if name not in known:
            names = ", ".join(sorted(known)) or "no options at all"
            raise ChatError(f"{where} is not an option of this model's chat template: it has {names}", where)
        _check_depth(value, where)


@lru_cache(maxsize=16)
def template_variables(source: str) -> frozenset[str]:
    """Names that a template looks at and does not set itself."""
    try:
        return frozenset(find_undeclared_variables(ENVIRONMENT.parse(source))) - frozenset(ENVIRONMENT.globals)
    except TemplateSyntaxError as error:
        raise ChatError(f"the model's chat template is not valid: {error}", "model") from error


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    try:
        return ENVIRONMENT.from_string(source)
    except TemplateSyntaxError as error:
        raise ChatError(f"the model's chat template is not valid: {error}", "model") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained to see it: Jinja's own filter would escape `<`, `>`, `&` and `'` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model is trained on; for a prompt it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


ENVIRONMENT = _environment()
