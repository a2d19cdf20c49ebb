"""Lines of a batch: what one of the input file must look like, and what becomes of it in the output or error file."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from billing.ids import new_id

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_CUSTOM_ID = 512
_PROMPTS = ("messages", "prompt", "input", "instructions", "tools")
_BYTES_PER_TOKEN = 4
_MOST_TOKENS = 10**12
"""No answer has more, and all of a batch's together fit into its columns."""
_FIELDS = ("custom_id", "method", "url", "body")


class LineError(ValueError):
    """A line of the input file that cannot run. `param`: the field that is wrong."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    """From 1, as an editor counts."""
    position: int
    """Of its first byte in the file, from 0."""
    length: int
    custom_id: str
    model: str | None
    prompt_tokens: int
    """Estimated from the length: lines of about one length run together, so the estimate need only sort them."""


def read_line(raw: bytes, number: int, position: int, endpoint: str) -> Line:
    """Raises LineError. `body` is looked into only as far as a batch must: the endpoint judges the rest."""
    fields = _object(raw, None, "the line")
    for name in fields:
        if name not in _FIELDS:
            raise LineError("unknown_parameter", f"a line has no field `{name[:100]}`; remove it.", name[:100])
    custom_id = _text(fields, "custom_id")
    if not 0 < len(custom_id) <= MAX_CUSTOM_ID or "\0" in custom_id:
        text = f"`custom_id` must have 1 to {MAX_CUSTOM_ID} characters and no NUL."
        raise LineError("invalid_custom_id", text, "custom_id")
    if _text(fields, "method") != "POST":
        raise LineError("invalid_method", '`method` must be "POST".', "method")
    if _text(fields, "url") != endpoint:
        raise LineError("mismatched_url", f'`url` must be the batch\'s endpoint, "{endpoint}".', "url")
    body = _object(_field(fields, "body"), "body", "`body`")
    if bytes(body.get("stream", b"false")) not in (b"false", b"null"):
        raise LineError("invalid_stream", "a batch answers no streams: remove `stream` from the body.", "body.stream")
    model = None
    with contextlib.suppress(msgspec.DecodeError):
        model = msgspec.json.decode(body.get("model", b"null"), type=str)
    prompt = sum(len(bytes(body[name])) for name in _PROMPTS if name in body)
    return Line(number, position, len(raw), custom_id, model, prompt // _BYTES_PER_TOKEN)


def body_of(raw: bytes) -> bytes:
    """The request body in a line that was read before. Raises LineError when it is not the line that it was."""
    return bytes(_field(_object(raw, None, "the line"), "body"))


def _object(raw: bytes | msgspec.Raw, param: str | None, what: str) -> dict[str, msgspec.Raw]:
    try:
        bytes(raw).decode()  # msgspec does not look inside raw strings
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except UnicodeDecodeError:
        raise LineError("invalid_json_line", "the line is not UTF-8 text.", param) from None
    except msgspec.ValidationError:
        raise LineError("invalid_json_line", f"{what} must be a JSON object.", param) from None
    except msgspec.DecodeError:
        raise LineError("invalid_json_line", f"{what} is not valid JSON.", param) from None
    except RecursionError:
        raise LineError("invalid_json_line", f"{what} is nested too deeply.", param) from None


def _field(fields: dict[str, msgspec.Raw], name: str) -> msgspec.Raw:
    if name not in fields:
        raise LineError("missing_required_parameter", f"the line needs a field `{name}`.", name)
    return fields[name]


def _text(fields: dict[str, msgspec.Raw], name: str) -> str:
    try:
        return msgspec.json.decode(_field(fields, name), type=str)
    except msgspec.DecodeError:
        raise LineError("invalid_type", f"`{name}` must be a string.", name) from None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Output(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


def answered(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The line of a request that was answered, with whatever status."""
    return _encoded(_Output(_new_id(), custom_id, _Response(status, request_id, _one_line(body)), None))


def unanswered(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that has no answer: it did not run, or gave none."""
    return _encoded(_Output(_new_id(), custom_id, None, _Error(code, message)))


def _encoded(output: _Output) -> bytes:
    return msgspec.json.encode(output) + b"\n"


def _new_id() -> str:
    return f"batch_req_{new_id().hex}"


def _one_line(body: bytes) -> msgspec.Raw:
    """JSON on one line; what an upstream sent that is no JSON, as a string."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
        body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(body.decode(errors="replace")))
    return msgspec.Raw(msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else body)


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Counts(msgspec.Struct):
    """`usage` of chat completions, completions and embeddings, and under other names of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Counts | None = None


def _numbers(counts: _Counts) -> Iterator[int]:
    for value in msgspec.structs.astuple(counts):
        yield from msgspec.structs.astuple(value) if isinstance(value, _Details) else () if value is None else (value,)


def usage_of(body: bytes) -> dict[str, int]:
    """What an answer says it used, as the batch's columns; nothing where it says nothing that makes sense."""
    try:
        counts = msgspec.json.decode(body, type=_Answer).usage
    except (msgspec.DecodeError, RecursionError):
        counts = None
    if counts is None or not all(0 <= count <= _MOST_TOKENS for count in _numbers(counts)):
        return {}
    into = counts.prompt_tokens_details or counts.input_tokens_details or _Details()
    out = counts.completion_tokens_details or counts.output_tokens_details or _Details()
    return {
        "input_tokens": counts.prompt_tokens + counts.input_tokens,
        "cached_tokens": into.cached_tokens,
        "output_tokens": counts.completion_tokens + counts.output_tokens,
        "reasoning_tokens": out.reasoning_tokens,
    }
