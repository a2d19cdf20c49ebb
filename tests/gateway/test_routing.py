"""The rules router on prompts from both sides of the threshold, in English and Chinese."""

import time
from typing import Any

import msgspec
import pytest

from gateway.api.openai import decode_chat
from gateway.call import Call
from gateway.routing.rules import RulesRouter, about_tokens


def call(prompt: str, **fields: Any) -> Call:
    body = {"model": "auto", "messages": [{"role": "user", "content": prompt}]} | fields
    return decode_chat(msgspec.json.encode(body))


SMALL = [
    "hi",
    "Thanks, that helps!",
    "What is the capital of France?",
    "Translate 'good morning' into Spanish.",
    "Select a gift from the list for my mother",
    "From Paris to Rome by train, how long?",
    "Why is the sky blue?",
    "你好",
    "法国的首都是哪里？",
    "把“早上好”翻译成英文",
    "今天天气怎么样",
    "谢谢你",
]
LARGE = [
    "Write a Python function that merges two sorted lists.",
    "Fix this:\n```python\nprint(1\n```",
    "def f(x):\n    return x +\nwhat is wrong?",
    "Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyError: 'a'",
    "SELECT name FROM users WHERE 1=1; is this fast?",
    "Prove that there are infinitely many primes.",
    "Evaluate \\int_0^1 x^2 dx",
    "Compare Kafka and RabbitMQ and design a migration plan, step by step.",
    "First read the contract, then list the risks and explain why each matters.",
    "写一个函数，合并两个有序链表",
    "这段代码报错了，帮我调试一下",
    "证明素数有无穷多个",
    "求解方程 x^2 - 5x + 6 = 0",
    "比较两种方案的优缺点，并逐步给出实施步骤",
    "首先分析需求，然后设计架构，最后说明为什么这样做",
]


@pytest.mark.parametrize("prompt", SMALL)
def test_simple_prompts_go_to_the_small_model(prompt: str) -> None:
    decision = RulesRouter(0.5).route(call(prompt))
    assert decision.role == "small", decision
    assert 0 <= decision.score < 0.5


@pytest.mark.parametrize("prompt", LARGE)
def test_hard_prompts_go_to_the_large_model(prompt: str) -> None:
    decision = RulesRouter(0.5).route(call(prompt))
    assert decision.role == "large", decision
    assert 0.5 <= decision.score < 1
    assert decision.reasons and decision.reasons != ("no cue",)


def test_tools_length_and_depth_count() -> None:
    router = RulesRouter(0.5)
    tool = {"type": "function", "function": {"name": "f"}}
    plain = router.route(call("hi"))
    assert (plain.score, plain.reasons) == (0.0, ("no cue",))
    assert "tools" in router.route(call("hi", tools=[tool])).reasons
    assert router.route(call("hi", tools=[tool])).score > plain.score
    assert router.route(call("word " * 10_000)).role == "large"
    assert router.route(call("词" * 10_000)).role == "large"
    turns = [{"role": "user", "content": "hi"}] * 10
    assert router.route(call("", messages=turns)).reasons == ("10 messages",)


def test_only_the_last_user_turn_is_read_for_cues() -> None:
    messages = [
        {"role": "user", "content": "Prove that there are infinitely many primes."},
        {"role": "assistant", "content": "Suppose …"},
        {"role": "user", "content": "thanks"},
    ]
    assert RulesRouter(0.5).route(call("", messages=messages)).role == "small"


def test_text_parts_are_read_like_text() -> None:
    parts = [{"type": "text", "text": "Prove Fermat's little theorem."}, {"type": "image_url", "image_url": {}}]
    assert RulesRouter(0.5).route(call("", messages=[{"role": "user", "content": parts}])).role == "large"


def test_the_threshold_decides() -> None:
    prompt = call("Why is the sky blue?")
    assert RulesRouter(0.3).route(prompt).role == "large"
    assert RulesRouter(1.0).route(call("Prove this theorem")).role == "small"
    assert RulesRouter(0.0).route(call("hi")).role == "large"


@pytest.mark.parametrize(
    "hostile", ["\n" * 100_000, " " * 100_000, "1. a\n" * 20_000, "first " * 20_000, "write " * 20_000, "首先" * 50_000]
)
def test_no_prompt_makes_routing_slow(hostile: str) -> None:
    prompt = call(hostile)
    began = time.process_time()
    RulesRouter(0.5).route(prompt)
    assert time.process_time() - began < 0.5  # tens of milliseconds; a quadratic pattern would take minutes


def test_token_guess() -> None:
    assert about_tokens("abcd" * 10) == 10
    assert about_tokens("你好世界你好") == 4
