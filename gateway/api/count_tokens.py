"""Anthropic's `/v1/messages/count_tokens`: how long a prompt is, exactly or not at all."""

import msgspec

from gateway.api.chat import ChatWriter
from gateway.api.fields import read_fields
from gateway.api.messages import decode_messages
from gateway.api.messages_output import error_body
from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.frames import Frame


class CountTokensSurface:
    api = "count_tokens"

    def decode(self, body: bytes) -> Call:
        return decode_messages(self.api, read_fields(body), stream=False)

    def error(self, error: ApiError) -> bytes:
        return error_body(error)

    def whole(self, call: Call, reply: Frame) -> bytes:
        raise AssertionError("no upstream generates anything here")

    def writer(self, call: Call) -> ChatWriter:
        raise AssertionError("no upstream generates anything here")

    def answer(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})


def uncountable(model: str) -> ApiError:
    """For a model whose upstream does not count and whose tokenizer we lack: a guess would be taken for a count."""
    text = f"The upstream of {model!r} cannot count tokens. Choose a model of the engine, or one of Anthropic's."
    return ApiError(501, "not_supported", text, param="model", headers={"x-should-retry": "false"})
