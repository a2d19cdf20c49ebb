"""A conversation in the items of OpenAI's Responses as chat messages."""

from typing import Any

from gateway.api.content import Json, apart, simple, string, text_part
from gateway.api.fields import invalid
from gateway.api.responses_reasoning import details, thoughts
from gateway.call import Unsaid, plain
from gateway.errors import ApiError


class Items:
    """`messages` in the form of chat completions; `unsaid` has what they lack."""

    def __init__(self, instructions: str | None, items: list[Json]) -> None:
        self.messages: list[Json] = []
        self.unsaid: list[Unsaid] = []
        self._answer: Json | None = None
        """The assistant's message that the next items may still belong to."""
        self._pictures: list[Json] = []
        """Of results of tools, whose messages are text: they follow the last result."""
        if instructions:
            self.messages.append({"role": "system", "content": instructions})
        question = _last_question(items)
        for i, item in enumerate(items):
            self._item(item, f"input[{i}]", thinking=i > question)
        self._settle()

    def _item(self, item: Json, where: str, thinking: bool) -> None:
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") == "assistant":
            self._say(self._parts(item.get("content"), f"{where}.content"))
        elif kind == "message":
            self._settle()
            self.messages.append(self._message(item, where))
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._result(item, where)
        elif kind == "reasoning":
            if thinking:
                self._think(item)
        elif kind == "item_reference":
            text = f"`{where}` refers to an item, and no items are kept here. Send the item itself."
            raise ApiError(400, "unsupported_parameter", text, param=where)
        else:
            self.unsaid.append(Unsaid(f"{where} ({plain(kind)})", False))

    def _message(self, item: Json, where: str) -> Json:
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise invalid(f"{where}.role", "must be user, assistant, system or developer")
        return {"role": role, "content": simple(self._parts(item.get("content"), f"{where}.content"))}

    def _say(self, parts: list[Json]) -> None:
        answer = self._open_answer()
        if answer["content"] and not answer.get("tool_calls"):  # an answer of its own
            self._settle()
            answer = self._open_answer()
        answer["content"] += parts

    def _call(self, item: Json, where: str) -> None:
        function = {name: string(item, name, where) for name in ("name", "arguments")}
        call = {"id": string(item, "call_id", where), "type": "function", "function": function}
        self._open_answer().setdefault("tool_calls", []).append(call)

    def _think(self, item: Json) -> None:
        answer = self._open_answer()
        if text := thoughts(item):
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text
        if signed := details(item):
            answer["reasoning_details"] = [*answer.get("reasoning_details", ()), *signed]

    def _result(self, item: Json, where: str) -> None:
        self._settle_answer()
        parts = self._parts(item.get("output"), f"{where}.output")
        texts, others = apart(parts)
        self._pictures += others
        result = {"role": "tool", "tool_call_id": string(item, "call_id", where), "content": simple(texts)}
        self.messages.append(result)

    def _open_answer(self) -> Json:
        if self._answer is None:
            self._settle()
            self._answer = {"role": "assistant", "content": []}
        return self._answer

    def _settle(self) -> None:
        self._settle_answer()
        if self._pictures:
            self.messages.append({"role": "user", "content": self._pictures})
            self._pictures = []

    def _settle_answer(self) -> None:
        if self._answer is not None:
            parts = self._answer["content"]
            self._answer["content"] = simple(parts) if parts or not self._answer.get("tool_calls") else None
            self.messages.append(self._answer)
            self._answer = None

    def _parts(self, content: Any, where: str) -> list[Json]:
        if isinstance(content, str):
            return [text_part(content)] if content else []
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise invalid(where, "must be a string or an array of content parts")
        return [said for i, part in enumerate(content) for said in self._part(part, f"{where}[{i}]")]

    def _part(self, part: Json, where: str) -> list[Json]:
        """The part in the words of chat completions; none where they have none."""
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text"):
            return [text_part(string(part, "text", where))]
        if kind == "refusal":
            return [{"type": "refusal", "refusal": string(part, "refusal", where)}]
        if kind == "input_image" and part.get("image_url"):
            image = {"url": string(part, "image_url", where)}
            return [{"type": "image_url", "image_url": image | _given(part, "detail")}]
        if kind == "input_file" and not part.get("file_url"):
            return [{"type": "file", "file": _given(part, "file_data", "file_id", "filename")}]
        if kind == "input_audio":
            return [{"type": "input_audio", "input_audio": part.get("input_audio")}]
        self.unsaid.append(Unsaid(f"{where} ({plain(kind)})", False))
        return []


def _last_question(items: list[Json]) -> int:
    """Index of the last message of the user; what was thought before it is of no more use, and OpenAI leaves it out."""
    roles = [item.get("role") if (item.get("type") or "message") == "message" else None for item in items]
    return max((i for i, role in enumerate(roles) if role == "user"), default=-1)


def _given(part: Json, *names: str) -> Json:
    return {name: part[name] for name in names if part.get(name) is not None}
