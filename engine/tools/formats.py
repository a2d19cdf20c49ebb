"""How a model writes tool calls: known from its chat template, read back from its answer, enforced by a grammar.

- hermes (Hermes, Qwen): `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, one pair of tags a call
- llama (Llama 3): the answer is `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`; more follow a `;`
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from engine import json_schema
from engine.guided import JSON_SPACE, Grammar, sized
from engine.tokenizer import Tokenizer
from engine.tools.declared import Function, Tools
from engine.tools.splitters import CLOSE, OPEN, PYTHON, HermesSplitter, LlamaSplitter

Format = Literal["hermes", "llama"]

MARKS: dict[Format, tuple[str, ...]] = {"hermes": (OPEN, CLOSE), "llama": (PYTHON,)}
"""What the splitter of a format looks for, be it a control token."""


def format_of(tokenizer: Tokenizer) -> Format | None:
    """The format that the model's template teaches; None when it is not a known one."""
    template = tokenizer.tool_template or tokenizer.chat_template or ""
    if OPEN in template and "<function=" not in template:  # Qwen3-Coder writes XML between the same tags
        return "hermes"
    if tokenizer.token_id(PYTHON) is not None and '"parameters"' in template:
        return "llama"
    return None


def needs_grammar(format: Format, tools: Tools) -> bool:
    """Whether an answer must be held to a grammar; without need a Llama model keeps its freedom to begin with `{`."""
    strict = any(function.strict for function in tools.functions)
    return format == "hermes" or tools.choice != "auto" or strict


def splitter_of(format: Format, tools: Tools) -> HermesSplitter | LlamaSplitter:
    names = frozenset(function.name for function in tools.callable)
    return (HermesSplitter if format == "hermes" else LlamaSplitter)(names, tools.parallel)


def grammar_of(format: Format, tools: Tools, tokenizer: Tokenizer, answer: Any = None) -> Grammar:
    """What the answer must match.

    Where a call must come, its arguments follow the function's schema. Where a model may choose, a call once begun is
    a whole one, of a declared function, and follows the schema where the function is strict; an answer that calls
    nothing is any text, or JSON of the schema `answer`. Llama's calls have no mark to begin with, so that a text there
    may not begin as a call does.
    """
    return sized(Grammar("lark", "\n".join(_rules(format, tools, tokenizer, answer))), json_schema.MAX_BYTES)


def _rules(format: Format, tools: Tools, tokenizer: Tokenizer, answer: Any) -> list[str]:
    key = "arguments" if format == "hermes" else "parameters"
    rules = [_call_rule(i, function, tools, key) for i, function in enumerate(tools.callable)]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(rules))))
    if format == "llama":
        calls = 'calls: call (";" SPACE? call)*' if tools.parallel else "calls: call"
        rules += [calls, r"SPACE: /[ \n]/"]
        if tools.choice != "auto":
            return ["start: calls", *rules]
        text = r"TEXT: /[^{ \t\r\n](.|\n)*/ & ~/<\|python_tag\|>(.|\n)*/"
        return ["start: calls | TEXT?", text, *rules]
    opening, closing = _tag(OPEN, tokenizer), _tag(CLOSE, tokenizer)
    body = f'"\\n" call "\\n" {closing}'
    tagged = r'tagged ("\n" tagged)*' if tools.parallel else "tagged"
    if tools.choice != "auto":
        return [f"start: {tagged}", f"tagged: {opening} {body}", *rules]
    if answer is not None:
        return [f"start: {tagged} | answer", f"tagged: {opening} {body}", f"answer: {_json_rule(answer)}", *rules]
    if opening == OPEN:
        free = [f"tagged: TEXT? {opening} {body}"]
    else:
        free = [f"head[lazy]: TEXT {opening}", f"tagged: head {body}"]
    start = "start: tagged* text" if tools.parallel else "start: text | tagged"
    return [start, "text: TEXT", r"TEXT: /(.|\n)*/", *free, *rules]


def _call_rule(number: int, function: Function, tools: Tools, key: str) -> str:
    follows = function.strict or tools.choice != "auto"
    schema = {**(function.parameters if follows else {}), "type": "object"}
    head = json.dumps(f'{{"name": "{function.name}", "{key}": ')
    return f'call_{number}: {head} {_json_rule(schema)} "}}"'


def _json_rule(schema: Mapping[str, Any]) -> str:
    options = {"x-guidance": {"whitespace_pattern": JSON_SPACE}}
    return f"%json {json.dumps({**schema, **options}, ensure_ascii=False)}"


def _tag(tag: str, tokenizer: Tokenizer) -> str:
    """The tag in a grammar: its token where it is a control token, else its text."""
    return tag if tag in tokenizer.control_tokens else json.dumps(tag)
