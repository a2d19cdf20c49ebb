"""What form an answer must have: its grammar, and how its text comes apart into thinking, calls and content."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine import guided
from engine.api_request import ChatRequest, CompletionRequest, TokenizeRequest
from engine.errors import bad_request
from engine.guided import Grammar, GrammarError
from engine.logits import Grammar as Constraint
from engine.pieces import PlainText, Splitter
from engine.reasoning import CLOSE, OPEN, AfterThinking, ReasoningSplitter, ThinkingMeter, phase_after, thinks
from engine.tokenizer import Tokenizer
from engine.tools import formats
from engine.tools.declared import ToolError, Tools, read_tools

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
CLASHING = ("ignore_eos", "min_tokens", "bad_words")
"""Parameters that could forbid all that a grammar allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """Each function makes what one answer needs of its own."""

    constraint: Callable[[], Constraint] | None = None
    splitter: Callable[[], Splitter] = PlainText
    meter: Callable[[], ThinkingMeter] | None = None
    """Set for models that think."""
    shown: frozenset[int] = frozenset()
    """Control tokens that the splitter looks for, so that they must stand in the text."""


def tools_of(request: ChatRequest | TokenizeRequest) -> Tools | None:
    """The functions that the model shall know of; raises ApiError."""
    try:
        return read_tools(request.tools or [], request.tool_choice, request.parallel_tool_calls is not False)
    except ToolError as error:
        raise bad_request(f"{error}.", error.param) from error


async def answer_form(
    request: ChatRequest | CompletionRequest, tools: Tools | None, tokenizer: Tokenizer, prompt: list[int]
) -> AnswerForm:
    """Raises ApiError for a form that is wrong, or that the model can't be held to."""
    param, grammar = _grammar(request)
    splitter: Callable[[], Splitter] = PlainText
    marks: list[str] = []
    if tools is not None:
        format = formats.format_of(tokenizer)
        if format is None:
            text = "This model writes tool calls in a way that is not supported: leave tools out."
            raise bad_request(text, "tools")
        param, grammar = _with_tools(format, tools, tokenizer, param, grammar)
        splitter = partial(formats.splitter_of, format, tools)
        marks += formats.MARKS[format]
    phase = phase_after(prompt, tokenizer.spell)
    thinking = isinstance(request, ChatRequest) and thinks(tokenizer) and phase != "answering"
    opened = phase == "thinking"
    if thinking:
        splitter = partial(_reasoning, splitter, opened)
        marks += [OPEN, CLOSE]
    return AnswerForm(
        constraint=await _constraint(request, param, grammar, tokenizer, thinking, opened),
        splitter=splitter,
        meter=partial(ThinkingMeter, tokenizer.spell, opened) if thinking else None,
        shown=frozenset(tokenizer.control_tokens[mark] for mark in marks if mark in tokenizer.control_tokens),
    )


def _reasoning(inner: Callable[[], Splitter], opened: bool) -> Splitter:
    return ReasoningSplitter(inner(), opened)


def _grammar(request: ChatRequest | CompletionRequest) -> tuple[str, Callable[[], Grammar] | None]:
    """The one parameter that says what the answer must match, and what reads its grammar."""
    found: list[tuple[str, Callable[[], Grammar]]] = []
    if request.response_format is not None and (schema := _response_schema(request.response_format)) is not None:
        found.append(("response_format", partial(guided.from_json_schema, schema)))
    readers: tuple[Callable[[Any], Grammar], ...] = (
        guided.from_json_schema, guided.from_regex, guided.from_choice, guided.from_lark,
    )  # fmt: skip
    for name, read in zip(GUIDED, readers, strict=True):
        if (value := getattr(request, name)) is not None:
            found.append((name, partial(read, value)))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise bad_request(f"{names} can't both say what the answer must look like: give one of them.", found[1][0])
    return found[0] if found else ("", None)


def _response_schema(wanted: Mapping[str, Any]) -> Any:
    """The schema of a response_format; None where any text will do."""
    kind = wanted.get("type")
    extra = set(wanted) - {"type", "json_schema" if kind == "json_schema" else "type"}
    if extra:
        raise bad_request(f"Unknown parameter: response_format.{min(extra)}.", f"response_format.{min(extra)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        text = "response_format.type must be text, json_object or json_schema."
        raise bad_request(text, "response_format.type")
    where = "response_format.json_schema"
    named = wanted.get("json_schema")
    if not isinstance(named, Mapping) or not isinstance(named.get("schema"), Mapping):
        raise bad_request(f'{where} must look like {{"name": …, "schema": {{…}}}}.', where)
    if extra := set(named) - {"name", "description", "schema", "strict"}:
        raise bad_request(f"Unknown parameter: {where}.{min(extra)}.", f"{where}.{min(extra)}")
    for field, kind in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(named.get(field), kind | None):
            text = f"{where}.{field} must be {'a string' if kind is str else 'true or false'}."
            raise bad_request(text, f"{where}.{field}")
    return named["schema"]


def _with_tools(
    format: formats.Format, tools: Tools, tokenizer: Tokenizer, param: str, grammar: Callable[[], Grammar] | None
) -> tuple[str, Callable[[], Grammar] | None]:
    """The grammar of an answer that may or must call tools, and otherwise is what the request asks for."""
    if grammar is None:
        if not formats.needs_grammar(format, tools):
            return "", None
        return "tools", partial(formats.grammar_of, format, tools, tokenizer)
    if tools.choice != "auto":
        raise bad_request(f"{param} has no meaning with a tool_choice that demands a call: leave one out.", param)
    if format == "llama" or param not in ("response_format", "guided_json"):
        raise bad_request(f"{param} is not available together with tools for this model: leave one out.", param)
    return param, partial(_calls_or, format, tools, tokenizer, grammar)


def _calls_or(format: formats.Format, tools: Tools, tokenizer: Tokenizer, answer: Callable[[], Grammar]) -> Grammar:
    return formats.grammar_of(format, tools, tokenizer, json.loads(answer().text))


async def _constraint(
    request: ChatRequest | CompletionRequest,
    param: str,
    grammar: Callable[[], Grammar] | None,
    tokenizer: Tokenizer,
    thinking: bool,
    opened: bool,
) -> Callable[[], Constraint] | None:
    if grammar is None:
        return None
    for name in CLASHING:
        if getattr(request, name):
            raise bad_request(f"{name} is not available together with {param}: leave one out.", name)
    if not tokenizer.eos_ids:
        raise bad_request(f"{param} needs a model that can end its answer, and this one has no token for it.", param)
    try:
        make = await guided.compile(tokenizer, grammar)
    except GrammarError as error:
        raise bad_request(f"{param}: {error}.", param) from error
    if not thinking:
        return make
    return partial(_after_thinking, make, tokenizer, opened)


def _after_thinking(make: Callable[[], Constraint], tokenizer: Tokenizer, opened: bool) -> Constraint:
    return AfterThinking(make(), ThinkingMeter(tokenizer.spell, opened), tokenizer.token_id(OPEN))
