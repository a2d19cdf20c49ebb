"""An OpenAI chat body's parameters as those of Anthropic's Messages."""

from typing import Any

import msgspec

from gateway.call import Call, plain
from gateway.upstreams.anthropic_turns import Turns
from gateway.upstreams.dialect import Limits

Json = dict[str, Any]

DEFAULT_MAX_TOKENS = 4096
"""Anthropic wants a limit where OpenAI's callers need not give one; every model of Anthropic's takes this one. For a
longer answer the configuration tells what the model can (`max_output`)."""

_CANNOT: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "n": (None, 1),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "seed": (None,),
    "store": (None, False),
    "top_logprobs": (None, 0),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
"""Parameters that Anthropic has nothing like, each with the values that ask for nothing."""

_HINTS = frozenset({"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"})
"""How OpenAI's cache shall go about it: a cheaper prompt, not another answer. Anthropic's has `cache_control`."""

_TRANSLATED = frozenset(
    {
        "model",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "stream_options",  # every stream of Anthropic's tells its usage
        "stop",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "user",
        "safety_identifier",
        "reasoning_effort",
        "response_format",
        "service_tier",
        "temperature",
        "output_config",
        "thinking",
    }
)
"""Every other field is unknown here, or has the same name there: it goes to Anthropic as it is."""

_EFFORTS = {"minimal": "low"}
_TIERS = {"auto": "auto", "default": "standard_only"}


class Parameters:
    """`said` in Anthropic's words; `cannot` names what it has none for. Raises ApiError 400 where a value is wrong."""

    def __init__(self, call: Call, turns: Turns, limits: Limits) -> None:
        self.cannot: list[str] = list(turns.lost)
        self._turns = turns
        self._fields = call.fields
        given = (self._value(name) for name in ("max_completion_tokens", "max_tokens"))
        known = (limits.cap, *given, limits.usual, DEFAULT_MAX_TOKENS)
        self.said: Json = {"max_tokens": next(limit for limit in known if limit is not None)}
        self._forward()
        self._temperature()
        self._stop()
        self._tools()
        self._thinking()
        self._format()
        self._caller()

    def _value(self, name: str) -> Any:
        raw = self._fields.get(name)
        return None if raw is None else msgspec.json.decode(raw)

    def _forward(self) -> None:
        """What is the same there, or unknown here."""
        for name, raw in self._fields.items():
            if name in _CANNOT:
                if self._value(name) not in _CANNOT[name]:
                    self.cannot.append(name)
            elif name not in _TRANSLATED and name not in _HINTS and bytes(raw) != b"null":
                self.said[name] = raw

    def _temperature(self) -> None:
        """OpenAI's goes to 2, Anthropic's to 1."""
        value = self._value("temperature")
        if isinstance(value, int | float) and value > 1:
            self.cannot.append("temperature (above 1)")
        elif value is not None:
            self.said["temperature"] = value

    def _stop(self) -> None:
        stop = self._value("stop")
        if stop:
            self.said["stop_sequences"] = [stop] if isinstance(stop, str) else stop

    def _tools(self) -> None:
        tools = []
        for i, tool in enumerate(self._value("tools") or ()):  # an array, as every surface sees to
            function = tool.get("function") if isinstance(tool, dict) else None
            if isinstance(function, dict):
                tools.append(_tool(function, tool))
            else:
                self.cannot.append(f"tools[{i}]")
        if tools:
            self.said["tools"] = tools
        choice = self._choice(self._value("tool_choice"))
        if tools and self._value("parallel_tool_calls") is False and (choice or {}).get("type") != "none":
            choice = {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True}
        if choice and tools:
            self.said["tool_choice"] = choice

    def _choice(self, given: Any) -> Json | None:
        if given in ("auto", "none"):
            return {"type": given}
        if given == "required":
            return {"type": "any"}
        if isinstance(given, dict) and isinstance(function := given.get("function"), dict):
            return {"type": "tool", "name": function.get("name")}
        if given is not None:
            self.cannot.append("tool_choice")
        return None

    def _thinking(self) -> None:
        """Anthropic's own `thinking` may come along; else an effort has the model think as it sees fit."""
        effort, thinking = self._value("reasoning_effort"), self._value("thinking")
        output = self._value("output_config")
        if not isinstance(output, dict):
            output = {}
        if isinstance(effort, str) and effort != "none":
            output = {"effort": _EFFORTS.get(effort, effort), **output}
            if thinking is None and self._turns.may_think:
                thinking = {"type": "adaptive"}
        elif effort == "none" and thinking is None:
            thinking = {"type": "disabled"}
        elif effort not in (None, "none"):
            self.cannot.append("reasoning_effort")
        if output:
            self.said["output_config"] = output
        if thinking is not None:
            self.said["thinking"] = thinking

    def _format(self) -> None:
        given = self._value("response_format")
        kind = given.get("type") if isinstance(given, dict) else given
        if kind == "json_schema" and isinstance(schema := given.get("json_schema"), dict):
            wanted = {"format": {"type": "json_schema", "schema": schema.get("schema")}}
            self.said["output_config"] = {**self.said.get("output_config", {}), **wanted}
        elif kind not in (None, "text"):
            self.cannot.append(f"response_format ({plain(kind)})")

    def _caller(self) -> None:
        if user := self._value("user") or self._value("safety_identifier"):
            self.said["metadata"] = {"user_id": user}
        tier = self._value("service_tier")
        if isinstance(tier, str) and tier in _TIERS:
            self.said["service_tier"] = _TIERS[tier]
        elif tier is not None:
            self.cannot.append("service_tier")


def _tool(function: Json, tool: Json) -> Json:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    said: Json = {"name": function.get("name"), "input_schema": schema}
    said |= {name: function[name] for name in ("description", "strict") if function.get(name) is not None}
    return said | ({"cache_control": tool["cache_control"]} if tool.get("cache_control") else {})
