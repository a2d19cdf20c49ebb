"""Whatever JSON a body has, it is taken or refused with a sentence; nothing of it makes a surface fall over."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.chat import ChatSurface
from gateway.api.completions import CompletionsSurface
from gateway.api.count_tokens import CountTokensSurface
from gateway.api.embeddings import EmbeddingsSurface
from gateway.api.messages import MessagesSurface
from gateway.api.responses import ResponsesSurface
from gateway.api.surface import Surface
from gateway.errors import ApiError
from gateway.upstreams.anthropic import AnthropicDialect
from gateway.upstreams.dialect import Limits
from tests.gateway.surfaces import chat_stream, chunk, streamed, whole


def words(text: str) -> list[str]:
    return text.split()


KEYS = st.sampled_from(
    words(
        "type role content text name id input arguments function tools tool_calls tool_use_id call_id source url data"
        " thinking signature image_url file file_data schema json_schema format output effort mode budget_tokens"
        " reasoning_details summary encrypted_content user_id media_type"
    )
)
WORDS = st.sampled_from(
    words(
        "user assistant system tool developer text image image_url document thinking tool_use tool_result function"
        " function_call function_call_output reasoning message input_text output_text input_image refusal file"
        " base64 url custom json_schema json_object allowed_tools enabled adaptive any auto none required"
    )
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODIES: list[tuple[Surface, dict[str, Any]]] = [
    (ChatSurface(), CHAT),
    (MessagesSurface(), CHAT | {"max_tokens": 5}),
    (CountTokensSurface(), CHAT),
    (ResponsesSurface(), {"model": "m", "input": "hi"}),
    (CompletionsSurface(), {"model": "m", "prompt": "hi"}),
    (EmbeddingsSurface(), {"model": "m", "input": "hi"}),
]
FIELDS = words(
    "model messages input prompt system instructions stream stream_options max_tokens max_completion_tokens"
    " max_output_tokens n best_of user metadata tools tool_choice parallel_tool_calls thinking output_config reasoning"
    " reasoning_effort text include truncation stop stop_sequences temperature response_format service_tier store"
    " encoding_format top_logprobs logprobs modalities cache_control container conversation brand_new"
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Any]:
    """Nearly right, so that a translation gets far before it meets what is wrong."""
    turns = st.fixed_dictionaries({"role": WORDS, "content": VALUES}, optional={"tool_calls": VALUES, "type": WORDS})
    return draw(st.lists(turns | VALUES, min_size=1, max_size=3))


@pytest.mark.parametrize(("surface", "body"), BODIES, ids=[surface.api for surface, _ in BODIES])
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json(surface: Surface, body: dict[str, Any], data: st.DataObject) -> None:
    changes = data.draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
    for name in ("messages", "input"):
        if name in body and data.draw(st.booleans()):
            changes[name] = data.draw(conversations())
    try:
        call = surface.decode(json.dumps(body | changes).encode())
    except ApiError as error:
        assert error.status == 400
        json.loads(surface.error(error))
        return
    for drop in (False, True):
        try:
            request = AnthropicDialect().request(call, "claude", Limits(), drop)
        except ApiError as error:
            assert error.status == 400
        else:
            json.loads(request.body)
            assert all(name.isprintable() and name.isascii() for name in request.dropped)
    if surface.api in ("messages", "responses"):
        surface.whole(call, whole({"content": "a", "reasoning_content": "b"}, "stop"))
        streamed(surface, call, [chat_stream(chunk({"content": "a", "reasoning_content": "b"}), chunk({}, "stop"))])


@pytest.mark.parametrize(("surface", "body"), BODIES, ids=[surface.api for surface, _ in BODIES])
@pytest.mark.parametrize("wrong", [b"", b"[]", b"{", b'{"model":"\xff"}', b'{"model":"\\ud800"}', b"[" * 5000])
def test_what_is_no_body(surface: Surface, body: dict[str, Any], wrong: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        surface.decode(wrong)
    assert caught.value.status == 400
