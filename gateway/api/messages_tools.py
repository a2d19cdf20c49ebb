"""Anthropic's tools, and how hard to think, in OpenAI's words."""

from typing import Any

from gateway.api.fields import invalid
from gateway.call import Unsaid, plain

Json = dict[str, Any]

EFFORTS = ((4096, "low"), (16384, "medium"))
"""(most tokens to think with, OpenAI's effort): a budget has no counterpart, the nearest step stands for it."""
MOST_EFFORT = "high"

_HINTS = frozenset({"name", "description", "input_schema", "strict", "type", "cache_control", "eager_input_streaming"})
"""Fields of a tool that are translated, or change nothing of the answer."""


def tools(given: list[Json]) -> tuple[list[Json], list[Unsaid]]:
    """(functions, tools and fields of them that only Anthropic has)."""
    functions: list[Json] = []
    unsaid: list[Unsaid] = []
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        kind = tool.get("type") or "custom"
        if kind != "custom":
            unsaid.append(Unsaid(f"{where} ({plain(kind)})", True))
            continue
        if not isinstance(tool.get("name"), str):
            raise invalid(f"{where}.name", "must be a string")
        unsaid += [
            Unsaid(f"{where}.{plain(name)}", True) for name, value in tool.items() if name not in _HINTS and value
        ]
        function = {"name": tool["name"], "parameters": tool.get("input_schema")}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
    return functions, unsaid


def tool_choice(given: Json) -> Json:
    """The OpenAI fields for a choice. Raises ApiError 400 where it is none."""
    kind = given.get("type")
    if kind == "tool" and isinstance(given.get("name"), str):
        fields: Json = {"tool_choice": {"type": "function", "function": {"name": given["name"]}}}
    elif kind in ("auto", "any", "none"):
        fields = {"tool_choice": "required" if kind == "any" else kind}
    else:
        raise invalid("tool_choice", "must have the `type` auto, any, none, or tool with a `name`")
    if given.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def effort(thinking: Json, output: Json) -> tuple[str | None, list[Unsaid]]:
    """(`reasoning_effort`, None where nothing is asked for; what has no counterpart).

    `output_config.effort` says it in OpenAI's words; else the budget of `thinking` stands for it.
    """
    kind = thinking.get("type", "disabled")
    if kind not in ("enabled", "adaptive", "disabled"):
        return None, [Unsaid(f"thinking ({plain(kind)})", True)]
    if output.get("effort"):
        return str(output["effort"]), []
    if kind != "enabled":
        return None, []
    budget = thinking.get("budget_tokens")
    if not isinstance(budget, int):
        raise invalid("thinking.budget_tokens", "must be an integer")
    return next((word for most, word in EFFORTS if budget <= most), MOST_EFFORT), []
