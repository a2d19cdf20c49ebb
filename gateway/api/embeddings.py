"""The embeddings surface: texts in, vectors out, as numbers or as base64 whatever the upstream prefers.

Many upstreams ignore `encoding_format`. OpenAI's Node client asks for base64 unless told otherwise and takes what it
gets for base64, so that a list of numbers reads as a quarter as many wrong ones.
"""

import base64
import binascii
import sys
from array import array
from typing import Literal

import msgspec

from gateway.api.chat import ChatWriter, without_account
from gateway.api.fields import encoded, invalid, is_streamed, model_name, optional, read_fields, user_tags
from gateway.api.openai import error_body
from gateway.api.prompt import as_messages, read_prompt
from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.frames import Frame

Encoding = Literal["float", "base64"]


class EmbeddingsSurface:
    api = "embeddings"

    def decode(self, body: bytes) -> Call:
        fields = read_fields(body)
        if is_streamed(fields):
            raise invalid("stream", "must be false or left out: embeddings come whole")
        optional(fields, "encoding_format", Encoding, "float or base64")
        return Call(
            api=self.api,
            requested_model=model_name(fields),
            messages=as_messages(read_prompt(fields, "input")),
            stream=False,
            include_usage=False,
            continuous_usage=False,
            max_output=0,
            choices=1,
            has_tools=False,
            tags=user_tags(optional(fields, "user", str, "a string")),
            fields=fields,
            kind="embedding",
        )

    def error(self, error: ApiError) -> bytes:
        return error_body(error)

    def whole(self, call: Call, reply: Frame) -> bytes:
        wanted: Encoding = optional(call.fields, "encoding_format", Encoding, "float or base64") or "float"
        return _in_encoding(without_account(reply), wanted)

    def writer(self, call: Call) -> ChatWriter:
        raise AssertionError("embeddings come whole")


class _Reply(msgspec.Struct):
    data: list[dict[str, msgspec.Raw]]


def _in_encoding(body: bytes, wanted: Encoding) -> bytes:
    """The reply with its vectors as wanted; as it came where they are, or where it is none that we know."""
    try:
        rows = msgspec.json.decode(body, type=_Reply).data
        if all(_is_base64(row["embedding"]) == (wanted == "base64") for row in rows):
            return body
        for row in rows:
            row["embedding"] = _converted(row["embedding"], wanted)
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, KeyError, binascii.Error, ValueError, OverflowError):
        return body
    fields["data"] = encoded(rows)
    return msgspec.json.encode(fields)


def _is_base64(raw: msgspec.Raw) -> bool:
    return bytes(raw).lstrip().startswith(b'"')


def _converted(raw: msgspec.Raw, wanted: Encoding) -> msgspec.Raw:
    """Numbers and base64 of their float32 bytes, little end first, into one another."""
    if _is_base64(raw) == (wanted == "base64"):
        return raw
    if wanted == "base64":
        numbers = array("f", msgspec.json.decode(raw, type=list[float]))
        return encoded(base64.b64encode(_little_endian(numbers).tobytes()).decode())
    numbers = array("f", base64.b64decode(msgspec.json.decode(raw, type=str)))
    return encoded(_little_endian(numbers).tolist())


def _little_endian(numbers: "array[float]") -> "array[float]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
