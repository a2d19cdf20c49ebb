"""A conversation in Anthropic's blocks as OpenAI's messages."""

import json
from collections.abc import Iterable
from typing import Any

from gateway.api.content import Json, apart, simple, string, text_part
from gateway.api.fields import invalid
from gateway.call import Unsaid, plain


class Conversation:
    """`messages` in OpenAI's form; `unsaid` has what they lack."""

    def __init__(self, system: str | list[Json] | None, turns: list[Json]) -> None:
        self.messages: list[Json] = []
        self.unsaid: list[Unsaid] = []
        if system:
            self._add("system", self._parts(system, "system"))
        question = _last_question(turns)
        for i, turn in enumerate(turns):
            where = f"messages[{i}]"
            if turn.get("role") == "user":
                self._user(turn.get("content"), f"{where}.content")
            elif turn.get("role") == "assistant":
                self._assistant(turn.get("content"), f"{where}.content", thinking=i > question)
            elif turn.get("role") == "system":
                self._add("system", self._parts(turn.get("content"), f"{where}.content"))
            else:
                raise invalid(f"{where}.role", "must be user, assistant or system")
        if turns[-1].get("role") == "assistant":
            self.unsaid.append(Unsaid(f"messages[{len(turns) - 1}] (the start of the answer)", False))

    def _user(self, content: Any, where: str) -> None:
        """Results of tools come first, as OpenAI wants them right behind their calls; pictures in them follow."""
        rest: list[Json] = []
        for block, place in _blocks(content, where):
            if block["type"] != "tool_result":
                rest += self._part(block, place)
                continue
            texts, others = apart(self._parts(block.get("content") or "", f"{place}.content"))
            if block.get("is_error"):  # OpenAI's tools can only say so
                first = texts[0]["text"] if texts else "the tool failed"
                texts = [text_part(f"Error: {first}"), *texts[1:]]
            result = {"role": "tool", "tool_call_id": string(block, "tool_use_id", place), "content": simple(texts)}
            self.messages.append(result)
            rest += others
        if rest or content == "":
            self._add("user", rest)

    def _assistant(self, content: Any, where: str, thinking: bool) -> None:
        parts: list[Json] = []
        thoughts: list[str] = []
        calls: list[Json] = []
        for block, place in _blocks(content, where):
            if block["type"] == "tool_use":
                calls.append(_call(block, place))
            elif block["type"] == "thinking":
                thoughts.append(string(block, "thinking", place))
            elif block["type"] != "redacted_thinking":  # which only the model that wrote it can read
                parts += self._part(block, place)
        message: Json = {"role": "assistant", "content": simple(parts) if parts or not calls else None}
        if thinking and any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _add(self, role: str, parts: list[Json]) -> None:
        self.messages.append({"role": role, "content": simple(parts)})

    def _parts(self, content: Any, where: str) -> list[Json]:
        return [part for block, place in _blocks(content, where) for part in self._part(block, place)]

    def _part(self, block: Json, where: str) -> list[Json]:
        """A block as a part of OpenAI's content; none where there is no such part."""
        kind = block["type"]
        if kind == "text":
            return [text_part(string(block, "text", where))]
        if kind == "image" and (url := _url(block.get("source"))):
            return [{"type": "image_url", "image_url": {"url": url}}]
        if kind == "document" and (part := _document(block)):
            return [part]
        self.unsaid.append(Unsaid(f"{where} ({plain(kind)})", False))
        return []


def _last_question(turns: list[Json]) -> int:
    """Index of the last turn in which the user says something; what was thought before it is of no more use.

    Anthropic leaves it out too. What follows are the rounds of tools that the model is thinking about.
    """
    for i in range(len(turns) - 1, -1, -1):
        content = turns[i].get("content")
        if turns[i].get("role") == "user" and not (isinstance(content, list) and _has_results(content)):
            return i
    return -1


def _has_results(blocks: Iterable[Any]) -> bool:
    return any(isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks)


def _blocks(content: Any, where: str) -> list[tuple[Json, str]]:
    """Each block and its place. Raises ApiError 400 where there are none."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)] if content else []
    if not isinstance(content, list):
        raise invalid(where, "must be a string or an array of content blocks")
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(f"{where}[{i}]", "must be a content block, an object with a `type`")
    return [(block, f"{where}[{i}]") for i, block in enumerate(content)]


def _call(block: Json, where: str) -> Json:
    given = block.get("input")
    if not isinstance(given, dict):
        raise invalid(f"{where}.input", "must be an object")
    arguments = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    function = {"name": string(block, "name", where), "arguments": arguments}
    return {"id": string(block, "id", where), "type": "function", "function": function}


def _url(source: Any) -> str | None:
    """Where a picture is; base64 becomes a data URL."""
    if not isinstance(source, dict):
        return None
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    url = source.get("url") if source.get("type") == "url" else None
    return url if isinstance(url, str) else None


def _document(block: Json) -> Json | None:
    """A text as text, a PDF in the body as a file."""
    source = block.get("source")
    if not isinstance(source, dict):
        return None
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return text_part(source["data"])
    if source.get("type") == "base64":
        name = block.get("title") or "document.pdf"
        return {"type": "file", "file": {"filename": name, "file_data": _url(source)}}
    return None
