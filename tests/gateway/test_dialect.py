"""What a call becomes on the wire of each kind of upstream."""

from typing import Any

import msgspec
import pytest

from gateway.call import Call
from gateway.errors import ApiError
from gateway.settings import UpstreamSettings
from gateway.upstreams.dialect import Dialect, Limits
from gateway.upstreams.kinds import KINDS, KindName
from gateway.upstreams.upstream import Upstream
from tests.gateway.samples import chat_call


def dialect(kind: KindName, **settings: Any) -> Dialect:
    return Upstream("x", UpstreamSettings(kind=kind, **settings)).dialect


def sent(dialect: Dialect, call: Call, max_output: int | None = None, drop: bool = False) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(dialect.request(call, "theirs", Limits(max_output), drop).body)
    return body


def test_unknown_fields_are_forwarded_as_they_came() -> None:
    body = sent(dialect("vllm"), chat_call(brand_new={"deep": [1, None, "ü"]}, guided_regex="a+"))
    assert body == {
        "model": "theirs",
        "messages": [{"role": "user", "content": "hi"}],
        "brand_new": {"deep": [1, None, "ü"]},
        "guided_regex": "a+",
    }


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_obfuscation": False}])
def test_a_stream_is_asked_for_usage_whatever_the_caller_asked(options: dict[str, Any] | None) -> None:
    call = chat_call(stream=True, **({} if options is None else {"stream_options": options}))
    assert sent(dialect("openai"), call)["stream_options"] == {**(options or {}), "include_usage": True}
    assert sent(dialect("engine"), call)["stream_options"]["continuous_usage_stats"] is True
    assert "stream_options" not in sent(dialect("openai", stream_options=False), call)


def test_a_whole_answer_has_no_stream_options() -> None:
    assert "stream_options" not in sent(dialect("openai"), chat_call())


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        ("openai", {}, "max_completion_tokens"),
        ("openai", {"base_url": "https://x.openai.azure.com/v1"}, "max_completion_tokens"),
        ("openai", {"base_url": "http://127.0.0.1:9/v1"}, "max_tokens"),
        ("engine", {}, "max_tokens"),
        ("ollama", {}, "max_tokens"),
    ],
)
def test_a_cap_goes_by_the_name_that_the_upstream_obeys(kind: KindName, settings: dict[str, Any], name: str) -> None:
    body = sent(dialect(kind, **settings), chat_call(), max_output=7)
    assert {n: v for n, v in body.items() if n.startswith("max_")} == {name: 7}


@pytest.mark.parametrize(
    ("kind", "given", "name"),
    [
        ("ollama", "max_completion_tokens", "max_tokens"),
        ("deepseek", "max_completion_tokens", "max_tokens"),
        ("openai", "max_tokens", "max_completion_tokens"),
        ("vllm", "max_completion_tokens", "max_completion_tokens"),
        ("vllm", "max_tokens", "max_tokens"),
    ],
)
def test_the_callers_limit_is_translated(kind: KindName, given: str, name: str) -> None:
    body = sent(dialect(kind), chat_call(**{given: 9}))
    assert {n: v for n, v in body.items() if n.startswith("max_")} == {name: 9}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("ollama", "tool_choice", "required"),
        ("ollama", "n", 2),
        ("ollama", "logit_bias", {"5": 1}),
        ("deepseek", "seed", 3),
        ("gemini", "logit_bias", {"5": 1}),
    ],
)
def test_what_cannot_be_honoured_is_refused_or_dropped_by_name(kind: KindName, name: str, value: Any) -> None:
    call = chat_call(**{name: value})
    with pytest.raises(ApiError) as caught:
        sent(dialect(kind), call)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert name in caught.value.message and kind in caught.value.message
    request = dialect(kind).request(call, "theirs", Limits(), True)
    assert request.dropped == (name,)
    assert name not in msgspec.json.decode(request.body)


@pytest.mark.parametrize(("name", "value"), [("tool_choice", "auto"), ("n", 1), ("n", None), ("logit_bias", {})])
def test_what_asks_for_nothing_is_no_reason_to_refuse(name: str, value: Any) -> None:
    assert sent(dialect("ollama"), chat_call(**{name: value}))[name] == value


def test_only_an_engine_is_told_a_priority_of_the_gateway() -> None:
    call = msgspec.structs.replace(chat_call(), priority=5)
    assert sent(dialect("engine"), call)["priority"] == 5
    assert "priority" not in sent(dialect("vllm"), call)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "anthropic"])
def test_a_key_is_a_bearer_token(kind: KindName) -> None:
    assert dialect(kind).headers("secret") == {"authorization": "Bearer secret"}
    assert dialect(kind).headers(None) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_knows_its_address_and_reads_answers(kind: KindName) -> None:
    upstream = Upstream("x", UpstreamSettings(kind=kind))
    assert upstream.settings.base_url.startswith("http")
    assert upstream.dialect.health_path.startswith("/")
    assert upstream.dialect.decoder(chat_call()).ended is False
