"""The chat completions surface: the upstream's own JSON, with what the caller did not ask for taken out of it."""

from collections.abc import Sequence

import msgspec

from gateway.api.openai import decode_chat, error_body
from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.frames import DONE, Frame, fields_of
from gateway.upstreams.usage import Usage

_NULL = msgspec.Raw(b"null")
_NO_CHOICES = msgspec.Raw(b"[]")


class ChatSurface:
    api = "chat.completions"

    def decode(self, body: bytes) -> Call:
        return decode_chat(body)

    def error(self, error: ApiError) -> bytes:
        return error_body(error)

    def whole(self, call: Call, reply: Frame) -> bytes:
        return without_account(reply)

    def writer(self, call: Call) -> "ChatWriter":
        return ChatWriter(call)


class ChatWriter:
    """Frames pass through byte for byte unless they carry usage or an account; also what text completions need."""

    needs_prompt_count = False

    def __init__(self, call: Call) -> None:
        self.prompt_tokens: int | None = None
        self._show_usage = call.continuous_usage
        self._usage_last = call.include_usage
        self._latest = b"{}"
        self._reported: bytes | None = None
        """The upstream's last word on usage."""

    def write(self, frame: Frame) -> bytes:
        self._latest = frame.raw
        return b"data: " + (frame.raw if frame.plain else self._stripped(frame)) + b"\n\n"

    def end(self, held: Sequence[Frame]) -> bytes:
        self._reported = next((frame.raw for frame in reversed(held) if frame.usage is not None), None)
        return b"".join(self.write(frame) for frame in held if frame.has_choices)

    def finish(self, usage: Usage) -> bytes:
        return self._usage_event(usage) + DONE

    def fail(self, error: ApiError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def _stripped(self, frame: Frame) -> bytes:
        """Without the account; usage as it came, null (the caller gets it last), or gone."""
        fields = fields_of(frame.raw)
        fields.pop("farthing", None)
        if not self._show_usage and fields.pop("usage", None) is not None and self._usage_last:
            fields["usage"] = _NULL
        return msgspec.json.encode(fields)

    def _usage_event(self, usage: Usage) -> bytes:
        """Exactly one where the caller asked: the upstream's last word, else what was settled."""
        if not self._usage_last:
            return b""
        fields = fields_of(self._latest if self._reported is None else self._reported)
        fields.pop("farthing", None)
        if self._reported is None:
            fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
        fields["choices"] = _NO_CHOICES
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def without_account(reply: Frame) -> bytes:
    """A whole reply as it came, the engine's account taken out."""
    if not reply.has_account:
        return reply.raw
    fields = fields_of(reply.raw)
    del fields["farthing"]
    return msgspec.json.encode(fields)
