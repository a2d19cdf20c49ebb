"""Text completions and embeddings: the forms of a prompt, and vectors in the encoding that was asked for."""

import base64
import json
import struct
from typing import Any

import pytest

from gateway.api.completions import CompletionsSurface
from gateway.api.embeddings import EmbeddingsSurface
from gateway.errors import ApiError
from gateway.upstreams.frames import ChatDecoder
from tests.gateway.surfaces import decoded, fields_of, streamed

COMPLETIONS = CompletionsSurface()
EMBEDDINGS = EmbeddingsSurface()
NUMBERS = [(i - 384) / 128 for i in range(768)]  # exact in float32


@pytest.mark.parametrize(
    ("prompt", "texts", "prompts"),
    [
        ("one", ["one"], 1),
        (["one", "two"], ["one", "two"], 2),
        ([1, 2, 3], [], 1),
        ([[1], [2, 3]], [], 2),
    ],
)
def test_the_forms_of_a_prompt(prompt: Any, texts: list[str], prompts: int) -> None:
    body = {"model": "m", "prompt": prompt, "n": 2, "max_tokens": 4, "echo": True, "logprobs": 1, "suffix": "s", "x": 1}
    call = decoded(COMPLETIONS, body)
    assert [text for _, text in call.texts()] == texts
    assert (call.api, call.kind, call.choices, call.max_output) == ("completions", "completion", 2 * prompts, 4)
    assert fields_of(call) == body

    call = decoded(EMBEDDINGS, {"model": "m", "input": prompt, "dimensions": 8})
    assert [text for _, text in call.texts()] == texts
    assert (call.api, call.kind, call.max_output, call.stream) == ("embeddings", "embedding", 0, False)
    assert fields_of(call) == {"model": "m", "input": prompt, "dimensions": 8}


@pytest.mark.parametrize("prompt", [None, "", [], [1, "a"], [True], [[1], 2], {"a": 1}, [["a"]]])
def test_what_is_no_prompt(prompt: Any) -> None:
    for surface, name in ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input")):
        if prompt == "":  # an empty text is one: whether a model takes it is for its upstream to say
            assert decoded(surface, {"model": "m", name: prompt}).kind
            continue
        with pytest.raises(ApiError) as caught:
            decoded(surface, {"model": "m", name: prompt})
        assert (caught.value.status, caught.value.param) == (400, name)


def test_answers_that_are_written_and_not_shown_are_paid() -> None:
    assert decoded(COMPLETIONS, {"model": "m", "prompt": ["a", "b"], "best_of": 3}).choices == 6
    with pytest.raises(ApiError, match="best_of"):
        decoded(COMPLETIONS, {"model": "m", "prompt": "a", "n": 3, "best_of": 2})


@pytest.mark.parametrize("place", range(12))
def test_a_completion_streams_as_it_came(place: int) -> None:
    text = {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "你好🙂", "finish_reason": None}]}
    end = {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    lines = [b"data: %s\n\n" % json.dumps(line, ensure_ascii=False).encode() for line in (text, end)]
    upstream = b"".join(lines) + b"data: [DONE]\n\n"
    at = upstream.index("你".encode()) + place - 1
    call = decoded(COMPLETIONS, {"model": "m", "prompt": "a", "stream": True})
    assert streamed(COMPLETIONS, call, [upstream[:at], upstream[at:]]) == upstream


def reply(embedding: Any) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": embedding, "extra": [1]}],
        "model": "m-1",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


BASE64 = base64.b64encode(struct.pack("<768f", *NUMBERS)).decode()


@pytest.mark.parametrize("theirs", [NUMBERS, BASE64])
@pytest.mark.parametrize(("wanted", "given"), [("base64", BASE64), ("float", NUMBERS), (None, NUMBERS)])
def test_vectors_in_the_encoding_that_was_asked_for(wanted: str | None, given: Any, theirs: Any) -> None:
    asked = {} if wanted is None else {"encoding_format": wanted}
    call = decoded(EMBEDDINGS, {"model": "m", "input": "a", **asked})
    frame = ChatDecoder().whole(json.dumps(reply(theirs)).encode())
    assert frame.usage is not None and (frame.usage.prompt_tokens, frame.usage.completion_tokens) == (3, 0)
    assert json.loads(EMBEDDINGS.whole(call, frame)) == reply(given)


def test_the_account_of_an_engine_is_not_the_caller_s() -> None:
    frame = ChatDecoder().whole(json.dumps(reply(NUMBERS) | {"farthing": None}).encode())
    assert json.loads(EMBEDDINGS.whole(decoded(EMBEDDINGS, {"model": "m", "input": "a"}), frame)) == reply(NUMBERS)


@pytest.mark.parametrize("theirs", ["not base64", {"a": 1}, ["a"]])
def test_what_is_no_vector_is_left_alone(theirs: Any) -> None:
    for wanted in ("float", "base64"):
        call = decoded(EMBEDDINGS, {"model": "m", "input": "a", "encoding_format": wanted})
        frame = ChatDecoder().whole(json.dumps(reply(theirs)).encode())
        assert json.loads(EMBEDDINGS.whole(call, frame)) == reply(theirs)


def test_embeddings_are_never_streamed() -> None:
    with pytest.raises(ApiError) as caught:
        decoded(EMBEDDINGS, {"model": "m", "input": "a", "stream": True})
    assert caught.value.param == "stream"
    with pytest.raises(ApiError) as caught:
        decoded(EMBEDDINGS, {"model": "m", "input": "a", "encoding_format": "int8"})
    assert caught.value.param == "encoding_format"
