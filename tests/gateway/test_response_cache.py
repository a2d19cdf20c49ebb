"""The response cache at a running gateway: what is given again, to whom, for how long, and what is not kept."""

from typing import Any

import httpx
import pytest

from tests.gateway.running import Gateway
from tests.gateway.scripted import Scripted

ON = {"seconds": 60}


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    for model in settings["models"].values():
        model["response_cache"] = ON
    return settings


def outcome(answer: httpx.Response) -> str | None:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-farthing-cache")


async def test_a_hit_is_the_same_answer_without_tokens_or_an_attempt(gateway: Gateway, upstream: Scripted) -> None:
    first, second = await gateway.chat(), await gateway.chat()
    assert (outcome(first), outcome(second)) == ("miss", "hit")
    assert second.content == first.content and len(upstream.chats) == 1
    assert second.headers["age"] == "0" and "age" not in first.headers
    assert second.headers["x-farthing-trace-id"] != first.headers["x-farthing-trace-id"]
    assert second.headers["x-farthing-cost"] == "0"
    made, hit = await gateway.rows(2)
    assert (hit["status"], hit["http_status"], hit["finish_reason"]) == ("ok", 200, "stop")
    assert (hit["attempts"], hit["billed"], hit["cost"]) == ([], 0, 0)
    assert hit["cached_from"] == made["id"] and "response_cache" in hit["route_reasons"]
    (attempt,) = made["attempts"]
    assert (hit["saved_prompt_tokens"], hit["saved_completion_tokens"]) == (10, attempt["output_text"])
    assert (hit["saved_billed"], hit["saved_cost"]) == (made["billed"], made["cost"])
    assert made["cached_from"] is None and made["saved_billed"] is None
