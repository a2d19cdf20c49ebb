"""The quick start, as printed, with real models: what an app sees and what the ledger says about it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from typing import Any
from uuid import UUID

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from playwright.async_api import async_playwright
from sqlalchemy import text
from stack import FARTHING, Stack, alive, wait_for

from billing.records import TOKEN_CLASSES
from gateway.connect import asyncpg_url, transaction

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]  # a first start fetches the models

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Say hello to the reader."}]


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.file.base_url, api_key=stack.file.api_key, max_retries=0, timeout=120)


async def query(stack: Stack, sql: str, **values: Any) -> list[Any]:
    async with transaction(asyncpg_url(stack.file.database_url)) as connection:
        return list((await connection.execute(text(sql), values)).all())


async def ledger_row(stack: Stack, trace_id: str) -> tuple[Any, list[Any]]:
    """An operation and its attempts, once the spool has been copied; there must be exactly one."""
    deadline = time.monotonic() + 60
    while True:
        rows = await query(stack, "SELECT * FROM operation WHERE id = :id", id=UUID(trace_id))
        if rows:
            break
        assert time.monotonic() < deadline, "no row"
        await asyncio.sleep(0.1)
    assert len(rows) == 1
    attempts = await query(stack, "SELECT * FROM attempt WHERE operation_id = :id ORDER BY number", id=UUID(trace_id))
    return rows[0], attempts


async def check_money(stack: Stack, operation: Any, attempts: list[Any]) -> None:
    """`billed` is the price version's price times the tokens, to the last digit."""
    billed = Decimal(0)
    for attempt in attempts:
        [price] = await query(stack, "SELECT * FROM price_version WHERE id = :id", id=attempt.price_version_id)
        charge = sum((getattr(price, name) * getattr(attempt, name) for name in TOKEN_CLASSES), Decimal(0)) / 1_000_000
        assert attempt.billed == charge > 0
        assert attempt.cost > 0 and attempt.usage_source == "engine"
        billed += charge
    assert operation.billed == billed


async def test_an_answer_and_its_row(stack: Stack, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="auto", messages=HELLO, max_tokens=24)
    reply = raw.parse()
    assert reply.choices[0].message.content and reply.usage is not None
    operation, attempts = await ledger_row(stack, raw.headers["x-farthing-trace-id"])
    assert (operation.status, operation.requested_model, operation.stream) == ("ok", "auto", False)
    assert operation.route_reasons and operation.model == "smollm2-135m"
    [attempt] = attempts
    assert attempt.input_fresh + attempt.input_cached + attempt.input_cache_write == reply.usage.prompt_tokens
    assert attempt.output_text + attempt.output_reasoning == reply.usage.completion_tokens
    await check_money(stack, operation, attempts)


@pytest.mark.parametrize("model", ["auto", "small", "large", "smollm2-135m", "qwen2.5-coder-0.5b"])
async def test_a_stream_and_its_row(stack: Stack, client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=HELLO, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(raw.parse())
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage is not None
    operation, attempts = await ledger_row(stack, raw.headers["x-farthing-trace-id"])
    assert (operation.status, operation.stream) == ("ok", True)
    tokens = [(a.input_fresh + a.input_cached + a.input_cache_write, a.output_text) for a in attempts]
    assert tokens == [(usage.prompt_tokens, usage.completion_tokens)]
    await check_money(stack, operation, attempts)


async def test_a_second_arrival_is_billed_as_cached(stack: Stack, client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "A farthing was a quarter of a penny. " * 30 + "What was it?"}]
    seen = []
    for _ in range(2):
        raw = client.chat.completions.with_raw_response.create(model="small", messages=long, max_tokens=4)  # type: ignore[arg-type]
        usage = raw.parse().usage
        assert usage is not None and usage.prompt_tokens_details is not None
        operation, attempts = await ledger_row(stack, raw.headers["x-farthing-trace-id"])
        assert attempts[0].input_cached == usage.prompt_tokens_details.cached_tokens
        await check_money(stack, operation, attempts)
        seen.append((usage.prompt_tokens, attempts[0].input_cached, operation.billed))
    (first, second) = seen
    assert first[0] == second[0] and second[1] > first[1] and second[1] % 16 == 0 and second[2] < first[2]


@pytest.mark.browser
async def test_the_dashboard_shows_the_money_in_a_browser(stack: Stack, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="small", messages=HELLO, max_tokens=8)
    operation, _ = await ledger_row(stack, raw.headers["x-farthing-trace-id"])
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = await browser.new_page()
        await page.goto(stack.file.dashboard_url)
        await page.get_by_label("Admin key").fill(stack.file.admin_key)
        await page.keyboard.press("Enter")
        await page.get_by_role("heading", name="Overview", level=1).wait_for()
        assert await page.get_by_role("heading", name="Users", level=2).is_visible()
        await page.goto(f"{stack.file.dashboard_url}/operations/{operation.id}")
        shown = await page.locator("data").evaluate_all("found => found.map(each => each.value)")
        await browser.close()
    assert operation.billed > 0 and operation.cost > 0
    assert {operation.billed, operation.cost} <= {Decimal(value) for value in shown}


def printed_snippets(stack: Stack) -> tuple[str, str]:
    """The curl line and the Python example, cut out of what the terminal shows."""
    lines = stack.printed.splitlines()
    curl = next(line for line in lines if line.startswith("curl "))
    begin = lines.index("from openai import OpenAI")
    return curl, "\n".join(lines[begin : begin + 6])


def test_the_printed_curl_line_works(stack: Stack) -> None:
    curl, _ = printed_snippets(stack)
    result = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(result.stdout)["choices"][0]["message"]["content"]


def test_the_printed_python_example_works(stack: Stack) -> None:
    _, example = printed_snippets(stack)
    assert len(example.splitlines()) == 6
    result = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 3


def test_the_file_says_what_was_printed(stack: Stack) -> None:
    state = stack.file
    for value in (state.base_url, state.api_key, state.admin_key, state.dashboard_url):
        assert value in stack.printed
    assert (stack.data_dir / "up.json").stat().st_mode & 0o777 == 0o600
    assert state.base_url == f"http://127.0.0.1:{stack.port}/v1"


def test_other_commands_find_the_database(stack: Stack) -> None:
    result = subprocess.run(
        [FARTHING, "keys", "list", "--json", "--data-dir", stack.data_dir], capture_output=True, text=True, check=True
    )
    assert [key["name"] for key in json.loads(result.stdout)] == ["default"]


def test_a_second_up_on_the_folder_is_refused_at_once(stack: Stack) -> None:
    began = time.monotonic()
    second = Stack(stack.data_dir, "--demo")
    assert second.process.wait(60) == 1 and time.monotonic() - began < 30
    assert f"another `farthing up` (pid {stack.process.pid}) is using {stack.data_dir}" in second.progress
    assert "Traceback" not in second.progress


async def test_the_engine_dies_in_the_middle_of_a_stream(stack: Stack, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="large",
        messages=[{"role": "user", "content": "Count from 1 to 1000, one number a line."}],
        max_tokens=1000,
        stream=True,
    )
    received = 0
    with pytest.raises(openai.APIError):
        for chunk in raw.parse():
            received += bool(chunk.choices and chunk.choices[0].delta.content)
            if received == 5:
                os.kill(stack.pid_of("-m engine serve"), signal.SIGKILL)
    assert received >= 5
    operation, attempts = await ledger_row(stack, raw.headers["x-farthing-trace-id"])
    assert operation.status == "upstream_error" and operation.error
    assert attempts[-1].output_text >= 5 and attempts[-1].billed > 0
    # The supervisor brings the engine back; nobody has to restart anything.
    wait_for(lambda: answers(client), 120)
    assert "engine stopped (killed by SIGKILL); starting it again" in stack.progress


async def test_postgresql_dies_and_comes_back(stack: Stack, client: openai.OpenAI) -> None:
    before = stack.pid_of("/bin/postgres -D")
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: "postgres stopped (killed by SIGKILL); starting it again" in stack.progress)
    wait_for(lambda: any("/bin/postgres -D" in line for line in stack.descendants().values()), 60)
    assert stack.pid_of("/bin/postgres -D") != before
    assert answers(client)  # as it did meanwhile: the key and what it may spend are known


def answers(client: openai.OpenAI) -> bool:
    try:
        client.chat.completions.create(model="small", messages=HELLO, max_tokens=4)
    except openai.APIError:
        return False
    return True


async def test_ctrl_c_lets_an_answer_finish_and_leaves_nothing(stack: Stack, client: openai.OpenAI) -> None:
    """Last in this file, because it ends the shared stack."""
    stream = client.chat.completions.create(model="small", messages=HELLO, max_tokens=40, stream=True)
    chunks = [next(stream)]
    below = stack.descendants()
    assert len(below) > 5
    stack.process.send_signal(signal.SIGINT)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert stack.stop() == 0
    assert not any(alive(pid) for pid in below)
    assert stack.progress.endswith("farthing: stopped\n") and "Traceback" not in stack.progress
