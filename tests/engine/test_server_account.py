"""What a request is told it used, what /metrics adds up, and what is refused because it can never fit."""

import re
from collections import Counter

import httpx
import pytest

from tests.engine.fake_model import fake_model
from tests.engine.serving import complete, serving


def numbers(metrics: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", metrics, re.MULTILINE)}


def test_an_account_has_every_count_and_its_parts_add_up(http: httpx.Client) -> None:
    prompt = "an account of sixty characters, to the last of them, is this."
    cold, warm = (complete(http, prompt, 12).json()["farthing"] for _ in range(2))
    assert (cold["input_fresh"], cold["input_cached"]) == (len(prompt), 0)
    assert (warm["input_fresh"], warm["input_cached"]) == (len(prompt) - 48, 48)
    for account in (cold, warm):
        assert account["generated_tokens"] == account["output_text"] == 12
        assert account["recomputed_tokens"] == account["preemptions"] == 0
        assert account["prefill_device_seconds"] > 0 and account["decode_device_seconds"] > 0
        assert 0 < account["mean_inter_token_seconds"] <= account["max_inter_token_seconds"]
        assert account["queue_seconds"] <= account["ttft_seconds"] <= account["total_seconds"]
        assert account["kv_block_seconds"] > 0


def test_one_token_has_none_after_it(http: httpx.Client) -> None:
    account = complete(http, "just one", 1).json()["farthing"]
    assert account["mean_inter_token_seconds"] is None and account["max_inter_token_seconds"] is None


def test_metrics_show_the_times_between_tokens_and_the_weights() -> None:
    with serving(fake_model()) as url, httpx.Client(base_url=url, timeout=20) as http:
        accounts = [complete(http, f"number {i}", 10).json()["farthing"] for i in range(3)]
        found = numbers(http.get("/metrics").text)
    count, total = (found[f'farthing_engine_inter_token_seconds_{part}{{model="fake"}}'] for part in ("count", "sum"))
    assert count == 3 * 9
    assert total == pytest.approx(9 * sum(account["mean_inter_token_seconds"] for account in accounts))
    assert found['farthing_engine_inter_token_seconds_bucket{le="+Inf",model="fake"}'] == count
    weights = {name: value for name, value in found.items() if name.startswith("farthing_engine_cost_seconds")}
    assert len(weights) == 5 and weights['farthing_engine_cost_seconds{model="fake",of="prefill_row"}'] > 0
    kinds = Counter(
        {name: value for name, value in found.items() if name.startswith("farthing_engine_device_seconds_t")}
    )
    attributed = sum(a["prefill_device_seconds"] + a["decode_device_seconds"] for a in accounts)
    assert kinds.total() == pytest.approx(attributed)
    wall, idle = (found[f"farthing_engine_{name}_seconds_total"] for name in ("wall", "idle"))
    assert kinds.total() + idle == pytest.approx(wall, rel=0.01)
    assert found['farthing_engine_kv_blocks_promised{model="fake"}'] == 0


@pytest.mark.parametrize("count", [119, 400])
def test_what_can_never_fit_is_refused_with_both_numbers(http: httpx.Client, count: int) -> None:
    reply = complete(http, "x" * 10, count, model="other")
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "max_tokens", "context_length_exceeded")
    assert f"need {-(-(10 + count) // 16)} KV blocks, but other has 8" in error["message"]


def test_what_just_fits_is_answered(http: httpx.Client) -> None:
    usage = complete(http, "x" * 10, 118, model="other").json()["usage"]
    assert usage["completion_tokens"] == 118


def test_an_answer_of_open_length_is_cut_where_the_memory_ends(http: httpx.Client) -> None:
    body = {"model": "other", "messages": [{"role": "user", "content": "x" * 10}], "ignore_eos": True}
    reply = http.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 128
