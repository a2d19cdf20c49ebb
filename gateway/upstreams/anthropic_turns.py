"""OpenAI's messages as Anthropic's: a system prompt, and turns of content blocks."""

from typing import Any

import msgspec

from gateway.errors import ApiError

Json = dict[str, Any]

CANNOT = "an upstream of Anthropic's has no way to take this. Leave it out, or choose another model"


class Turns:
    """`system` and `turns` are Anthropic's; `lost` names fields of messages that it has no counterpart for."""

    def __init__(self, messages: list[Json]) -> None:
        self.system: list[Json] = []
        self.turns: list[Json] = []
        self.lost: list[str] = []
        for i, message in enumerate(messages):
            self._message(message, f"messages[{i}]")

    @property
    def may_think(self) -> bool:
        """Anthropic refuses to think on about the results of tools where the thoughts before the calls are gone."""
        answer: list[Json] = next((turn["content"] for turn in reversed(self.turns) if turn["role"] == "assistant"), [])
        kinds = {block["type"] for block in answer}
        results = bool(self.turns) and any(block["type"] == "tool_result" for block in self.turns[-1]["content"])
        return not results or bool(kinds & {"thinking", "redacted_thinking"})

    def _message(self, message: Json, where: str) -> None:
        role, content = message.get("role"), f"{where}.content"
        if message.get("name"):
            self.lost.append(f"{where}.name")
        if role in ("system", "developer"):
            blocks = self._blocks(message.get("content"), content)
            if self.turns:
                self._add("system", blocks)
            else:
                self.system += blocks
        elif role == "user":
            self._add("user", self._blocks(message.get("content"), content))
        elif role == "assistant":
            self._assistant(message, where)
        elif role == "tool":
            result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id")}
            self._add("user", [result | {"content": self._blocks(message.get("content"), content)}])
        else:
            raise _unsaid(f"{where}.role", repr(role))

    def _assistant(self, message: Json, where: str) -> None:
        for name in ("audio", "function_call"):
            if message.get(name):
                raise _unsaid(f"{where}.{name}", name)
        blocks = _thinking(_list(message, "reasoning_details", where))
        blocks += self._blocks(message.get("content") or message.get("refusal"), f"{where}.content")
        for i, call in enumerate(_list(message, "tool_calls", where)):
            blocks.append(_tool_use(call, f"{where}.tool_calls[{i}]"))
        if blocks:  # an empty answer is refused there, and says nothing
            self._add("assistant", blocks)

    def _add(self, role: str, blocks: list[Json]) -> None:
        """The results of parallel calls, and what the user adds to them, belong into one turn."""
        if self.turns and self.turns[-1]["role"] == role:
            self.turns[-1]["content"] += blocks
        else:
            self.turns.append({"role": role, "content": blocks})

    def _blocks(self, content: Any, where: str) -> list[Json]:
        if content is None or isinstance(content, str):
            return [{"type": "text", "text": content}] if content else []
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise ApiError(400, "invalid_value", f"`{where}` must be a string or an array of parts.", param=where)
        blocks = []
        for i, part in enumerate(content):
            block = self._block(part, f"{where}[{i}]")
            if part.get("cache_control"):
                block["cache_control"] = part["cache_control"]
            blocks.append(block)
        return blocks

    def _block(self, part: Json, where: str) -> Json:
        kind = part.get("type")
        if kind in ("text", "refusal"):
            return {"type": "text", "text": part.get(kind)}
        if kind == "image_url":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else image
            if isinstance(image, dict) and image.get("detail") not in (None, "auto"):
                self.lost.append(f"{where}.image_url.detail")
            return {"type": "image", "source": _source(url, f"{where}.image_url")}
        if kind == "file" and isinstance(file := part.get("file"), dict) and file.get("file_data"):
            document = {"type": "document", "source": _source(file["file_data"], f"{where}.file.file_data")}
            return document | ({"title": file["filename"]} if file.get("filename") else {})
        raise _unsaid(where, repr(kind))


def _unsaid(where: str, what: str) -> ApiError:
    return ApiError(400, "unsupported_content", f"`{where}` ({what}): {CANNOT}.", param=where)


def _source(url: Any, where: str) -> Json:
    """Where a picture or a file is: in the body as base64, or on the web."""
    if not isinstance(url, str):
        raise ApiError(400, "invalid_value", f"`{where}` must be a URL.", param=where)
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    kind, comma, data = url.removeprefix("data:").partition(",")
    media_type, *options = kind.split(";")
    if not comma or "base64" not in options:
        raise ApiError(400, "invalid_value", f"`{where}` must be a data URL in base64.", param=where)
    return {"type": "base64", "media_type": media_type, "data": data}


def _list(message: Json, name: str, where: str) -> list[Any]:
    value = message.get(name)
    if value is not None and not isinstance(value, list):
        raise ApiError(400, "invalid_value", f"`{where}.{name}` must be an array.", param=f"{where}.{name}")
    return value or []


def _thinking(details: list[Any]) -> list[Json]:
    """What the model thought, where it can check that the thoughts are its own; others it refuses to read."""
    blocks: list[Json] = []
    for detail in details:
        if isinstance(detail, dict) and detail.get("data"):
            blocks.append({"type": "redacted_thinking", "data": detail["data"]})
        elif isinstance(detail, dict) and detail.get("signature"):
            blocks.append({"type": "thinking", "thinking": detail.get("text"), "signature": detail["signature"]})
    return blocks


def _tool_use(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise _unsaid(where, "not a function")
    try:
        given = msgspec.json.decode(function.get("arguments") or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, TypeError, RecursionError):
        name = f"{where}.function.arguments"
        raise ApiError(400, "invalid_value", f"`{name}` must be a JSON object as a string.", param=name) from None
    return {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": given}
