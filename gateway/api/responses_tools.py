"""Tools of the Responses format in the words of chat completions."""

from typing import Any

from gateway.api.fields import invalid
from gateway.call import Unsaid, plain

Json = dict[str, Any]

_FUNCTION = ("name", "description", "parameters", "strict")
_NEUTRAL = {"async": (False,), "defer_loading": (False,), "allowed_callers": (["direct"],)}


def tools(given: list[Json]) -> tuple[list[Json], list[Unsaid]]:
    """(functions, tools and fields of them that chat completions do not have)."""
    functions: list[Json] = []
    unsaid: list[Unsaid] = []
    for i, tool in enumerate(given):
        if tool.get("type") != "function":
            unsaid.append(Unsaid(f"tools[{i}] ({plain(tool.get('type'))})", True))
            continue
        if not isinstance(tool.get("name"), str):
            raise invalid(f"tools[{i}].name", "must be a string")
        for name, value in tool.items():
            if name not in ("type", *_FUNCTION) and value not in (None, *_NEUTRAL.get(name, ())):
                unsaid.append(Unsaid(f"tools[{i}].{plain(name)}", True))
        function = {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
    return functions, unsaid


def tool_choice(given: str | Json | None) -> tuple[str | Json | None, list[Unsaid]]:
    if given is None or isinstance(given, str):
        return given, []
    kind = given.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": given.get("name")}}, []
    if kind == "allowed_tools" and isinstance(allowed := given.get("tools"), list):
        names = [
            {"type": "function", "function": {"name": tool.get("name")}} for tool in allowed if isinstance(tool, dict)
        ]
        return {"type": kind, "allowed_tools": {"mode": given.get("mode"), "tools": names}}, []
    return None, [Unsaid(f"tool_choice ({plain(kind)})", True)]
