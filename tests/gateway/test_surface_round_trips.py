"""What is said in one dialect and then in the other comes back as it was, conversations and answers alike."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.chat import ChatSurface
from gateway.api.messages import MessagesSurface
from gateway.api.responses import ResponsesSurface
from gateway.upstreams.anthropic import AnthropicDialect
from gateway.upstreams.anthropic_decoder import AnthropicDecoder
from gateway.upstreams.dialect import Limits
from gateway.upstreams.frames import Frame
from tests.gateway.surfaces import (
    USAGE,
    chat_stream,
    chunk,
    decoded,
    fields_of,
    message_of,
    response_of,
    streamed,
    usage_fields,
    whole,
)

Json = dict[str, Any]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
ARGUMENTS = st.dictionaries(TEXT, TEXT | st.integers(-(2**53), 2**53) | st.booleans() | st.none(), max_size=3)
IMAGE = st.sampled_from(["data:image/png;base64,iVBORw0KGgo=", "https://example.org/cat.jpg"])


def tool_call(number: int, arguments: Json) -> Json:
    text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return {"id": f"call_{number}", "type": "function", "function": {"name": f"tool_{number % 3}", "arguments": text}}


@st.composite
def said_by_user(draw: st.DrawFn) -> Json:
    parts = [{"type": "image_url", "image_url": {"url": draw(IMAGE)}} for _ in range(draw(st.integers(0, 2)))]
    texts = [{"type": "text", "text": draw(TEXT)} for _ in range(draw(st.integers(0 if parts else 1, 2)))]
    content: Any = [*parts, *texts]
    return {"role": "user", "content": content[0]["text"] if len(content) == 1 and not parts else content}


@st.composite
def conversations(draw: st.DrawFn) -> list[Json]:
    """As OpenAI's callers send them: questions, answers, and rounds of one or more tools."""
    messages: list[Json] = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    calls = 0
    for _ in range(draw(st.integers(0, 3))):
        messages.append(draw(said_by_user()))
        for _ in range(draw(st.integers(0, 2))):
            number = draw(st.integers(1, 3))
            made = [tool_call(calls + i, draw(ARGUMENTS)) for i in range(number)]
            calls += number
            messages.append({"role": "assistant", "content": draw(st.none() | TEXT), "tool_calls": made})
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": draw(TEXT)} for c in made]
        messages.append({"role": "assistant", "content": draw(TEXT)})
    return [*messages, draw(said_by_user())]


PARAMETERS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 10**6)},
    optional={
        "temperature": st.sampled_from([0, 0.25, 1]),
        "top_p": st.sampled_from([0.5, 1]),
        "top_k": st.integers(1, 50),
        "stop": st.lists(TEXT, min_size=1, max_size=3),
        "user": TEXT,
        "stream": st.booleans(),
        "reasoning_effort": st.sampled_from(["low", "medium", "high", "xhigh"]),
        "service_tier": st.sampled_from(["auto", "default"]),
        "brand_new": st.lists(st.integers(), max_size=2),
        "response_format": st.just(
            {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True}}
        ),
    },
)
TOOLS = st.fixed_dictionaries(
    {
        "tools": st.lists(
            st.builds(
                lambda name, words: {
                    "type": "function",
                    "function": {"name": name, "description": words, "parameters": {"type": "object"}},
                },
                TEXT,
                TEXT,
            ),
            min_size=1,
            max_size=3,
        ),
        "tool_choice": st.sampled_from(
            ["auto", "required", {"type": "function", "function": {"name": "tool_0"}}],
        ),
    },
    optional={"parallel_tool_calls": st.just(False)},
)


@given(conversations(), PARAMETERS, st.just({}) | TOOLS)
def test_a_request_to_anthropic_and_back(messages: list[Json], parameters: Json, tools: Json) -> None:
    body = {"model": "m", "messages": messages, **parameters, **tools}
    request = AnthropicDialect().request(decoded(ChatSurface(), body), "m", Limits(), False)
    assert request.dropped == ()
    call = MessagesSurface().decode(request.body)
    assert call.unsaid == ()
    assert fields_of(call) == body


@given(conversations(), PARAMETERS, st.just({}) | TOOLS)
def test_anthropic_s_own_callers_are_not_translated(messages: list[Json], parameters: Json, tools: Json) -> None:
    body = {"model": "m", "messages": messages, **parameters, **tools}
    theirs = AnthropicDialect().request(decoded(ChatSurface(), body), "m", Limits(), False).body
    request = AnthropicDialect().request(MessagesSurface().decode(theirs), "claude", Limits(), False)
    assert json.loads(request.body) == json.loads(theirs) | {"model": "claude"}


@given(TEXT, TEXT, TEXT, ARGUMENTS, st.booleans())
def test_thinking_in_a_round_of_tools(question: str, thought: str, signature: str, arguments: Json, says: bool) -> None:
    detail = {"type": "reasoning.text", "text": thought, "signature": signature}
    answer = {"role": "assistant", "content": "one moment" if says else None, "reasoning_content": thought}
    answer |= {"tool_calls": [tool_call(1, arguments)]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
    messages = [{"role": "user", "content": question}, answer | {"reasoning_details": [detail]}, result]
    body = {"model": "m", "messages": messages, "max_tokens": 5000, "reasoning_effort": "high"}
    request = json.loads(AnthropicDialect().request(decoded(ChatSurface(), body), "m", Limits(), False).body)
    thinking = request["messages"][1]["content"][0]
    assert thinking == {"type": "thinking", "thinking": thought, "signature": signature}
    assert request["thinking"] == {"type": "adaptive"}
    back = fields_of(decoded(MessagesSurface(), request))
    assert back["messages"][1] == answer


@st.composite
def answers(draw: st.DrawFn) -> tuple[Json, str]:
    """(a chat message, its finish reason)."""
    message: Json = {"content": draw(st.none() | TEXT)}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(TEXT)
    calls = [tool_call(i, draw(ARGUMENTS)) for i in range(draw(st.integers(0, 3)))]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = draw(TEXT)
    finish = "tool_calls" if calls else draw(st.sampled_from(["stop", "length", "content_filter"]))
    return message, finish


def facts(frame: Frame) -> Json:
    """What a whole chat reply says."""
    (choice,) = json.loads(frame.raw)["choices"]
    message = {name: value for name, value in choice["message"].items() if value is not None and name != "role"}
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {"message": message, "finish": choice["finish_reason"], "usage": frame.usage}


@given(answers())
def test_an_answer_to_anthropic_and_back(answer: tuple[Json, str]) -> None:
    message, finish = answer
    ours = whole(message, finish)
    call = decoded(MessagesSurface(), {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "q"}]})
    theirs = MessagesSurface().whole(call, ours)
    back = AnthropicDecoder(native=False).whole(theirs)
    assert facts(back) == facts(ours)


def chunks_of(message: Json, finish: str, sizes: list[int]) -> list[Json]:
    """The message in fragments of these sizes, the calls' arguments mixed."""
    chunks = [chunk({"role": "assistant", "content": ""})]
    for name in ("reasoning_content", "content"):
        chunks += [chunk({name: piece}) for piece in pieces(message.get(name) or "", sizes)]
    calls = message.get("tool_calls", [])
    left = []
    for index, call in enumerate(calls):
        first = {"index": index, "id": call["id"], "type": "function", "function": {"name": call["function"]["name"]}}
        chunks.append(chunk({"tool_calls": [first]}))
        left.append([(index, piece) for piece in pieces(call["function"]["arguments"], sizes)])
    while any(left):
        for fragments in left:
            if fragments:
                index, piece = fragments.pop(0)
                chunks.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
    return [*chunks, chunk({}, finish, usage=usage_fields(USAGE))]


def pieces(text: str, sizes: list[int]) -> list[str]:
    found = []
    for size in sizes:
        found.append(text[:size])
        text = text[size:]
    return [piece for piece in (*found, text) if piece]


@given(answers(), st.lists(st.integers(1, 6), max_size=6))
def test_a_streamed_answer_says_the_same_in_every_dialect(answer: tuple[Json, str], sizes: list[int]) -> None:
    message, finish = answer
    ours = whole(message, finish)
    upstream = chat_stream(*chunks_of(message, finish, sizes))
    body = {"model": "m", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "q"}]}
    call = decoded(MessagesSurface(), body)
    stream = streamed(MessagesSurface(), call, [upstream], usage=USAGE)
    whole_message = message_of(stream)
    for attribute in ("content", "stop_reason"):
        expected = json.loads(MessagesSurface().whole(call, ours))[attribute]
        assert json.loads(whole_message.to_json())[attribute] == expected

    responses = decoded(ResponsesSurface(), {"model": "m", "input": "q", "stream": True})
    chat = AnthropicDecoder(native=False)  # and Anthropic's stream in OpenAI's items
    for decoder, source in ((None, upstream), (chat, stream)):
        response = response_of(streamed(ResponsesSurface(), responses, [source], decoder=decoder, usage=USAGE))
        expected = json.loads(ResponsesSurface().whole(responses, ours))
        assert [_without_id(item.to_dict()) for item in response.output] == [
            _without_id(item) for item in expected["output"]
        ]
        assert response.status == expected["status"]


def _without_id(item: Any) -> Json:
    return {name: value for name, value in item.items() if name != "id"}
