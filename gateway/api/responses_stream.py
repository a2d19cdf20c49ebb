"""Chat frames as the events of a streamed response, each with its number."""

from collections.abc import Iterable, Sequence
from typing import Any

from gateway.api.chunk import read_chunk
from gateway.api.events import event
from gateway.api.parts import Part, Parts, Step
from gateway.api.responses_object import UNFINISHED, Answer
from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.frames import Frame
from gateway.upstreams.usage import Usage

Json = dict[str, Any]


class ResponsesWriter:
    needs_prompt_count = False

    def __init__(self, call: Call) -> None:
        self.prompt_tokens: int | None = None
        self._call = call
        self._answer: Answer | None = None
        self._parts = Parts()
        self._sequence = 0
        self._finish: str | None = None

    def write(self, frame: Frame) -> bytes:
        chunk = read_chunk(frame.raw)
        choice = chunk.choice
        if choice is None:
            return b""
        self._finish = choice.finish_reason or self._finish
        begun = self._begin(chunk.model)
        return begun + self._steps(self._parts.take(choice.said), choice.token_logprobs)

    def end(self, held: Sequence[Frame]) -> bytes:
        events = b"".join(self.write(frame) for frame in held) + self._begin("")
        return events + self._steps(self._parts.end(), [])

    def finish(self, usage: Usage) -> bytes:
        response = self._told().ended(self._parts.row, self._finish, usage)
        return self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> bytes:
        """The failed response, then an error: OpenAI's clients raise at the latter, and tell of the former."""
        events = self._begin("")
        failed = self._event("response.failed", response=self._told().failed(self._parts.row, error))
        words = {"code": error.code, "message": error.message, "param": error.param}
        return events + failed + self._event("error", **words, error={"type": error.type, **words})

    def _begin(self, model: str) -> bytes:
        if self._answer is not None:
            return b""
        self._answer = Answer(self._call, model)
        response = self._answer.begun()
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _told(self) -> Answer:
        assert self._answer is not None, "_begin comes first"
        return self._answer

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **fields})

    def _steps(self, steps: Iterable[Step], logprobs: list[Json]) -> bytes:
        events = b""
        for what, part, text in steps:
            if what == "open":
                events += self._open(part)
            elif what == "grow":
                part.logprobs += logprobs if part.kind == "text" else []
                events += self._grow(part, text, logprobs)
            else:
                events += self._close(part)
        return events

    def _open(self, part: Part) -> bytes:
        answer = self._told()
        item = answer.item(part, "in_progress")
        added = self._event("response.output_item.added", output_index=part.index, item=item)
        return added + self._content(part, "added", answer.content(Part(part.kind, part.index)))

    def _grow(self, part: Part, text: str, logprobs: list[Json]) -> bytes:
        more: Json = {"logprobs": logprobs} if part.kind == "text" else {}
        return self._event(f"{self._stem(part)}.delta", **self._place(part), delta=text, **more)

    def _close(self, part: Part) -> bytes:
        answer = self._told()
        done = b""
        if part.kind != "redacted":
            name = {"tool": "arguments", "refusal": "refusal"}.get(part.kind, "text")
            more: Json = {"logprobs": part.logprobs} if part.kind == "text" else {}
            more |= {"name": part.name} if part.kind == "tool" else {}
            done = self._event(f"{self._stem(part)}.done", **self._place(part), **{name: part.text}, **more)
            done += self._content(part, "done", answer.content(part))
        cut = self._finish in UNFINISHED and part is self._parts.row[-1]
        item = answer.item(part, "incomplete" if cut else "completed")
        return done + self._event("response.output_item.done", output_index=part.index, item=item)

    def _content(self, part: Part, what: str, content: Json) -> bytes:
        """A part of an item; calls and hidden reasoning have none."""
        if part.kind in ("tool", "redacted"):
            return b""
        stem = "reasoning_summary_part" if self._is_summary(part) else "content_part"
        return self._event(f"response.{stem}.{what}", **self._place(part), part=content)

    def _stem(self, part: Part) -> str:
        stems = {"text": "output_text", "refusal": "refusal", "tool": "function_call_arguments"}
        summary = "reasoning_summary_text" if self._is_summary(part) else "reasoning_text"
        return f"response.{stems.get(part.kind, summary)}"

    def _place(self, part: Part) -> Json:
        place: Json = {"item_id": self._told().item_id(part), "output_index": part.index}
        if part.kind != "tool":
            place["summary_index" if self._is_summary(part) else "content_index"] = 0
        return place

    def _is_summary(self, part: Part) -> bool:
        return part.kind == "thinking" and self._told().summarises
