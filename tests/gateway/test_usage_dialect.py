"""Each vendor's documented usage object, and the five token classes that are billed for it."""

import json
from decimal import Decimal
from typing import Any

import pytest

from billing.records import TokenClasses
from gateway.settings import UpstreamSettings
from gateway.upstreams.kinds import KINDS, KindName
from gateway.upstreams.upstream import Upstream
from gateway.upstreams.usage import classes_of
from gateway.upstreams.usage_dialect import CostedUsage, VendorUsage
from tests.gateway.samples import chat_call

OPENAI = {
    "prompt_tokens": 2006,
    "completion_tokens": 300,
    "total_tokens": 2306,
    "prompt_tokens_details": {"cached_tokens": 1920, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 200, "accepted_prediction_tokens": 0},
}
VLLM = {"prompt_tokens": 15, "total_tokens": 26, "completion_tokens": 11, "prompt_tokens_details": None}
SGLANG = {
    "prompt_tokens": 40,
    "total_tokens": 60,
    "completion_tokens": 20,
    "prompt_tokens_details": {"cached_tokens": 32},
    "reasoning_tokens": 7,
}
DEEPSEEK = {
    "prompt_tokens": 102,
    "completion_tokens": 52,
    "total_tokens": 154,
    "prompt_cache_hit_tokens": 64,
    "prompt_cache_miss_tokens": 38,
    "completion_tokens_details": {"reasoning_tokens": 12},
}
ANTHROPIC = {
    "input_tokens": 50,
    "cache_creation_input_tokens": 248,
    "cache_read_input_tokens": 1800,
    "output_tokens": 503,
}
GEMINI = {"completion_tokens": 198, "prompt_tokens": 20, "total_tokens": 623}
GEMINI_NAMED = GEMINI | {"completion_tokens_details": {"reasoning_tokens": 405}}
GEMINI_LIKE_OPENAI = {
    "completion_tokens": 603,
    "prompt_tokens": 20,
    "total_tokens": 623,
    "completion_tokens_details": {"reasoning_tokens": 405},
}
MISSES = {"prompt_cache_hit_tokens": 6, "prompt_cache_miss_tokens": 3, "completion_tokens": 1}
OPENROUTER = {
    "completion_tokens": 2,
    "completion_tokens_details": {"reasoning_tokens": 0},
    "cost": 0.00095,
    "cost_details": {"upstream_inference_cost": 19},
    "prompt_tokens": 194,
    "prompt_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 100, "audio_tokens": 0},
    "total_tokens": 196,
}


def of(*counts: int) -> TokenClasses:
    """Fresh, cached and written input, text and reasoning output."""
    return TokenClasses(**dict(zip(TokenClasses.__struct_fields__, counts, strict=True)))


def classes(dialect: VendorUsage, usage: dict[str, Any]) -> tuple[TokenClasses, str | None]:
    found, odd = dialect.normalise(json.dumps(usage).encode())
    assert found is not None
    tokens, flag = classes_of(found)
    return tokens, odd or flag


def dialect_of(kind: KindName) -> VendorUsage:
    facts = KINDS[kind]
    return VendorUsage(facts.cache, facts.reasoning, reports_cost=facts.reports_cost)


@pytest.mark.parametrize(
    ("kind", "usage", "expected"),
    [
        ("openai", OPENAI, (86, 1920, 0, 100, 200)),
        ("vllm", VLLM, (15, 0, 0, 11, 0)),
        ("tensorrt-llm", VLLM | {"prompt_tokens_details": {"cached_tokens": 8}}, (7, 8, 0, 11, 0)),
        ("sglang", SGLANG, (8, 32, 0, 13, 7)),
        ("ollama", {"prompt_tokens": 26, "completion_tokens": 298, "total_tokens": 324}, (26, 0, 0, 298, 0)),
        ("llama.cpp", VLLM | {"prompt_tokens_details": {"cached_tokens": 14}}, (1, 14, 0, 11, 0)),
        ("deepseek", DEEPSEEK, (38, 64, 0, 40, 12)),
        ("deepseek", DEEPSEEK | {"prompt_tokens_details": {"cached_tokens": 64}}, (38, 64, 0, 40, 12)),
        ("anthropic", ANTHROPIC, (50, 1800, 248, 503, 0)),
        ("gemini", GEMINI, (20, 0, 0, 198, 405)),
        ("gemini", GEMINI_NAMED, (20, 0, 0, 198, 405)),
        ("gemini", GEMINI_LIKE_OPENAI, (20, 0, 0, 198, 405)),
        ("openrouter", OPENROUTER, (74, 20, 100, 2, 0)),
        ("openai", {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 4}, (5, 4, 0, 1, 0)),
        ("openai", MISSES, (3, 6, 0, 1, 0)),
    ],
)
def test_documented_usage_becomes_five_classes(
    kind: KindName, usage: dict[str, Any], expected: tuple[int, int, int, int, int]
) -> None:
    tokens, odd = classes(dialect_of(kind), usage)
    assert odd is None
    assert tokens == of(*expected)


def test_counts_beside_their_totals_are_what_the_upstream_settings_say() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 90}}
    assert classes(VendorUsage(cache="beside"), usage) == (of(10, 90, 0, 5, 0), None)
    tokens, flag = classes(VendorUsage(), usage)
    assert (tokens.input_fresh, tokens.input_cached) == (10, 0)
    assert flag is not None and "exceed" in flag


@pytest.mark.parametrize("raw", [b"null", b"{}", b"[]", b'"x"', b'{"prompt_tokens":3}'])
@pytest.mark.parametrize("kind", ["openai", "gemini", "anthropic"])
def test_what_is_no_usage_is_none(kind: KindName, raw: bytes) -> None:
    assert dialect_of(kind).normalise(raw)[0] is None


@pytest.mark.parametrize("kind", ["openai", "deepseek", "anthropic", "gemini", "openrouter"])
@pytest.mark.parametrize("cached", ["many", -3, 1.5, True, {}])
def test_odd_counts_are_flagged_and_earn_no_discount(kind: KindName, cached: Any) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": cached}}
    tokens, odd = classes(dialect_of(kind), usage)
    assert odd is not None
    assert (tokens.input_fresh, tokens.input_cached, tokens.output_text) == (10, 0, 5)


def test_a_cost_is_kept_to_the_last_digit() -> None:
    raw = b'{"prompt_tokens":1,"completion_tokens":2,"cost":0.00014130000000000012}'
    usage, _ = dialect_of("openrouter").normalise(raw)
    assert isinstance(usage, CostedUsage)
    assert usage.cost == Decimal("0.00014130000000000012")


@pytest.mark.parametrize("cost", ["null", '"free"', "-1", "{}"])
def test_a_cost_that_is_none_leaves_the_usage(cost: str) -> None:
    raw = f'{{"prompt_tokens":1,"completion_tokens":2,"cost":{cost}}}'.encode()
    usage, odd = dialect_of("openrouter").normalise(raw)
    assert usage is not None and not isinstance(usage, CostedUsage) and odd is None


def test_a_cost_from_anybody_else_is_not_believed() -> None:
    usage, _ = dialect_of("openai").normalise(json.dumps(OPENROUTER).encode())
    assert not isinstance(usage, CostedUsage)


def test_old_builds_of_llama_cpp_tell_the_cached_tokens_in_their_timings() -> None:
    decoder = Upstream("local", UpstreamSettings(kind="llama.cpp")).dialect.decoder(chat_call())
    usage = {"prompt_tokens": 15, "completion_tokens": 11}
    reply = {"choices": [], "usage": usage, "timings": {"cache_n": 12, "prompt_n": 3}}
    frame = decoder.whole(json.dumps(reply).encode())
    assert frame.usage is not None and classes_of(frame.usage)[0] == of(3, 12, 0, 11, 0)
