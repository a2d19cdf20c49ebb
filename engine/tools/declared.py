"""The functions that a request declares, and what it wants done with them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine import json_schema

MAX_FUNCTIONS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ToolError(ValueError):
    """The tools of a request can't be used. `param` names the part of the request that is wrong."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Function:
    """`parameters` is the JSON Schema of its arguments, `strict` whether every call must follow it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class Tools:
    """`choice` names one function that must be called, or is "required" where any one will do, or "auto"."""

    functions: tuple[Function, ...]
    choice: Literal["auto", "required"] | Function
    parallel: bool
    declared: tuple[Mapping[str, Any], ...]
    """As a chat template shows them to the model."""

    @property
    def callable(self) -> tuple[Function, ...]:
        return (self.choice,) if isinstance(self.choice, Function) else self.functions


def read_tools(tools: Sequence[Any], choice: str | Mapping[str, Any] | None, parallel: bool) -> Tools | None:
    """The request's `tools`, `tool_choice` and `parallel_tool_calls`; None where the model shall see no tools.

    Raises ToolError. Schemas that will be enforced are checked for keywords that can't be.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ToolError("tool_choice is only allowed together with tools: declare the functions", "tool_choice")
        return None
    if len(tools) > MAX_FUNCTIONS:
        raise ToolError(f"tools has {len(tools)} functions; the most is {MAX_FUNCTIONS}", "tools")
    functions = tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [function.name for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ToolError(f"tools has two functions of the name {name!r}: rename one", f"tools[{i}].function.name")
    wanted = _choice(choice, functions)
    if wanted is None:
        return None
    for i, function in enumerate(functions):
        enforced = wanted == "required" or wanted is function or function.strict
        if enforced:
            _check(function, f"tools[{i}].function.parameters")
    return Tools(functions, wanted, parallel, tuple(_shown(tool) for tool in tools))


def _function(tool: Any, where: str) -> Function:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise ToolError(f'{where} must look like {{"type": "function", "function": {{"name": …}}}}', where)
    if unknown := set(tool) - {"type", "function"}:
        raise ToolError(f"{where} has the unknown field {min(unknown)!r}", where)
    function = tool["function"]
    where = f"{where}.function"
    if unknown := set(function) - {"name", "description", "parameters", "strict"}:
        raise ToolError(f"{where} has the unknown field {min(unknown)!r}", where)
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ToolError(f"{where}.name must be 1 to 64 letters, digits, dots, _ or -", f"{where}.name")
    if not isinstance(function.get("description"), str | None):
        raise ToolError(f"{where}.description must be a string", f"{where}.description")
    if not isinstance(parameters, Mapping | None):
        raise ToolError(f"{where}.parameters must be a JSON Schema of an object", f"{where}.parameters")
    if not isinstance(strict, bool | None):
        raise ToolError(f"{where}.strict must be true or false", f"{where}.strict")
    # Left out, the function takes no arguments.
    schema = {"type": "object", "properties": {}, "additionalProperties": False} if parameters is None else parameters
    return Function(name, schema, bool(strict))


def _choice(
    choice: str | Mapping[str, Any] | None, functions: Sequence[Function]
) -> Literal["auto", "required"] | Function | None:
    if choice is None or choice == "auto":
        return "auto"
    if choice == "required":
        return "required"
    if choice == "none":
        return None
    named = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        text = 'tool_choice must be auto, none, required, or {"type": "function", "function": {"name": …}}'
        raise ToolError(text, "tool_choice")
    assert isinstance(choice, Mapping) and isinstance(named, Mapping)
    if unknown := [*(set(choice) - {"type", "function"}), *(set(named) - {"name"})]:
        raise ToolError(f"tool_choice has the unknown field {min(unknown)!r}", "tool_choice")
    for function in functions:
        if function.name == name:
            return function
    raise ToolError(f"tool_choice names the function {name[:64]!r}, which is not among the tools", "tool_choice")


def _check(function: Function, where: str) -> None:
    if function.parameters.get("type", "object") != "object":
        raise ToolError(f"{where} must have the type object", where)
    try:
        json_schema.check(function.parameters)
    except json_schema.SchemaError as error:
        raise ToolError(f"the arguments of {function.name} can't be enforced: {error}", where) from error


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Without `strict`, which is for us and not for the model."""
    return {**tool, "function": {key: value for key, value in tool["function"].items() if key != "strict"}}
