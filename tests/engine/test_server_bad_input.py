"""What the engine's HTTP server refuses, each with the parameter's name, and what asks for nothing and passes."""

import json
import re
import time

import httpx
import pytest

from engine.server import MAX_BODY
from engine.tokenizer import Tokenizer
from tests.engine.serving import complete

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "fake", "prompt": "x"}


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({**CHAT, "model": "gpt-9"}, 404, "model", "use one of fake, other"),
        ({"messages": []}, 400, "model", "Missing required parameter: model"),
        ({"model": "fake"}, 400, "messages", "Missing required parameter: messages"),
        ({**CHAT, "messages": []}, 400, "messages", "at least one message"),
        ({**CHAT, "messages": "hi"}, 400, "messages", "expected `array`"),
        ({**CHAT, "messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role", "wizard"),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages[0].content[0].type",
            "text only",
        ),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
            400,
            "messages[0].content[0].cache_control",
            "not supported",
        ),
        (
            {**CHAT, "messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
            400,
            "messages[0].tool_call_id",
            "of the role tool",
        ),
        ({**CHAT, "temperature": -0.1}, 400, "temperature", "-0.1"),
        ({**CHAT, "temperature": "hot"}, 400, "temperature", "expected `float | null`, got `str`"),
        ({**CHAT, "temperature": True}, 400, "temperature", "bool"),
        ({**CHAT, "top_p": 0}, 400, "top_p", "above 0"),
        ({**CHAT, "top_k": -2}, 400, "top_k", "-2"),
        ({**CHAT, "min_p": 1.5}, 400, "min_p", "1.5"),
        ({**CHAT, "seed": 2**70}, 400, "seed", "64 bits"),
        ({**CHAT, "stop": [""]}, 400, "stop", "stop string"),
        ({**CHAT, "stop": [1]}, 400, "stop[0]", "got `int`"),
        ({**CHAT, "max_tokens": 0}, 400, "max_tokens", "at least 1, not 0"),
        ({**CHAT, "max_completion_tokens": -5}, 400, "max_completion_tokens", "at least 1, not -5"),
        ({**CHAT, "max_tokens": 1, "max_completion_tokens": 1}, 400, "max_tokens", "not both"),
        ({**CHAT, "max_tokens": 1.5}, 400, "max_tokens", "got `float`"),
        ({**CHAT, "functions": [{"name": "f"}]}, 400, "functions", "not supported"),
        ({**CHAT, "frequency_penalty": 2.5}, 400, "frequency_penalty", "from -2 to 2"),
        ({**CHAT, "store": True}, 400, "store", "keeps no conversations"),
        ({**CHAT, "stream_options": {"include_usage": True}}, 400, "stream_options", "stream: true"),
        ({**CHAT, "stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x", "Unknown parameter"),
        ({**CHAT, "prompt": "x"}, 400, "prompt", "Unknown parameter: prompt"),
        ({**CHAT, "mirostat": 2}, 400, "mirostat", "Unknown parameter: mirostat"),
    ],
)
def test_bad_chat_requests_are_named(http: httpx.Client, body, status, param, says) -> None:
    reply = http.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert says in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({**TEXT, "prompt": ""}, "prompt", "empty"),
        ({**TEXT, "prompt": []}, "prompt", "empty"),
        ({**TEXT, "prompt": [1, -1]}, "prompt[1]", ">= 0"),
        ({**TEXT, "prompt": [1, 97]}, "prompt", "97"),
        ({**TEXT, "prompt": [1, 10**30], "echo": True}, "prompt", "ids below 97"),
        ({**TEXT, "prompt": ["a", [1]]}, "prompt", "not a mixture"),
        ({**TEXT, "prompt": ["a", 1]}, "prompt", "not a mixture"),
        ({**TEXT, "prompt": ["a", ""]}, "prompt", "empty"),
        ({**TEXT, "prompt": [[1], [1, 97]]}, "prompt[1]", "97"),
        ({**TEXT, "prompt": ["a"] * 20, "n": 128}, "prompt", "20 prompts with 128 answers each"),
        ({**TEXT, "prompt": ["a", "x" * 400]}, None, "400 tokens, but fake has a context of 400"),
        ({**TEXT, "prompt": "x" * 400}, None, "400 tokens, but fake has a context of 400"),
        ({"model": "other", "prompt": "x" * 200}, None, "200 tokens, but other has KV memory for 128 tokens"),
        ({**TEXT, "echo": "yes"}, "echo", "expected `bool | null`, got `str`"),
        ({**TEXT, "suffix": "x"}, "suffix", "fake has no tokens that mark a gap"),
        ({**TEXT, "suffix": "x", "echo": True}, "echo", "not available with suffix"),
    ],
)
def test_bad_prompts_are_refused_with_numbers(http: httpx.Client, body, param, says) -> None:
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("piece", ["x", "<eos>", "<", "▁"])
def test_a_prompt_far_too_long_is_refused_before_it_is_tokenised(http: httpx.Client, monkeypatch, piece: str) -> None:
    def tokenise(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "_encode", tokenise)
    prompt = piece * (7_000_000 // len(piece.encode()))
    messages = [{"role": "user", "content": prompt}]
    bodies = [
        ("/v1/completions", {**TEXT, "prompt": prompt}),
        ("/v1/chat/completions", {**CHAT, "messages": messages}),
        ("/tokenize", {**TEXT, "prompt": prompt}),
        ("/tokenize", {"model": "fake", "messages": messages}),
    ]
    for path, body in bodies:
        begun = time.monotonic()
        reply = http.post(path, content=json.dumps(body, ensure_ascii=False).encode())
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
        found = re.fullmatch(
            r"The prompt has at least (\d+) tokens, but fake has a context of 400 tokens .*: shorten the prompt\.",
            reply.json()["error"]["message"],
        )
        # The longest token of this vocabulary is `<eos>`, and `▁` may stand for a space of one byte.
        size = len(prompt.replace("▁", " "))
        assert found and size // 5 <= int(found[1]) <= size // 5 + 3
        assert time.monotonic() - begun < 10


def test_tokenize_still_counts_what_is_only_a_little_too_long(http: httpx.Client) -> None:
    reply = http.post("/tokenize", json={"model": "fake", "prompt": "x" * 1000})
    assert (reply.status_code, reply.json()["count"]) == (200, 1000)


def test_arguments_nested_too_deeply_are_refused_by_name(http: httpx.Client, model, monkeypatch) -> None:
    template = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    function = {"name": "f", "arguments": "[" * 900 + "]" * 900}
    call = {"id": "1", "type": "function", "function": function}
    reply = http.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b"{", None, "not valid JSON"),
        (b"", None, "not valid JSON"),
        (b"[1]", None, "not a JSON object"),
        (b'{"model": "\xff\xfe"}', None, "not valid JSON in UTF-8"),
        (b'{"model": "fake\\u00', None, "not valid JSON"),
        (b'{"a":' * 100_000, None, "not valid JSON"),
        (b'{"model": "fake", "prompt": "x", "temperature": NaN}', "temperature", "finite"),
        (b'{"model": "fake", "prompt": "x", "top_p": 1e999}', "top_p", "finite"),
    ],
)
def test_bad_bodies(http: httpx.Client, body: bytes, param: str | None, says: str) -> None:
    reply = http.post("/v1/completions", content=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert says in reply.json()["error"]["message"]


@pytest.mark.parametrize("half", ["\\ud800", "\\udfff", "a\\ud83db", "\\ude00\\ud83d"])
def test_half_a_surrogate_pair_is_refused_everywhere(http: httpx.Client, half: str) -> None:
    prompt, messages = f'"prompt": "{half}"', f'"messages": [{{"role": "user", "content": "{half}"}}]'
    for path, given in [
        ("/v1/completions", prompt),
        ("/v1/chat/completions", messages),
        ("/tokenize", prompt),
        ("/tokenize", messages),
    ]:
        for body in (f'{{"model": "fake", {given}}}', f'{{{given}, "model": "fake"}}'):
            reply = http.post(path, content=body)
            assert reply.status_code == 400 and "half of a surrogate pair" in reply.json()["error"]["message"]
    assert http.post("/tokenize", content=b'{"model": "fake", "prompt": "\\ud83d\\ude00"}').status_code == 200


def test_values_that_ask_for_nothing_are_accepted(http: httpx.Client) -> None:
    off = {
        "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False, "tools": [],
        "tool_choice": "none", "response_format": {"type": "text"}, "user": "u", "metadata": {"a": "b"}, "store": False,
        "seed": None, "stop": None, "top_p": None, "stream_options": None,
    }  # fmt: skip
    reply = http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2, **off})
    assert reply.status_code == 200, reply.text


def test_a_huge_body_is_refused_clearly(http: httpx.Client) -> None:
    reply = complete(http, "x" * (10 << 20))
    assert reply.status_code == 413 and str(MAX_BODY) in reply.json()["error"]["message"]
    assert complete(http, "x").status_code == 200
