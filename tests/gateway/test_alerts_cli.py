"""`farthing alerts …` as a shell sees it, beside a running gateway that evaluates and sends."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from billing.alerts import evaluation
from billing.rollups import refresh
from gateway.cli import app
from tests.billing.receivers import Receiver, http_receiver
from tests.gateway.running import Gateway, running_gateway


@pytest.fixture
def run(database_url: str) -> Any:
    async def command(*arguments: str) -> Result:
        environment = {"FARTHING_DATABASE_URL": database_url, "COLUMNS": "200"}
        return await asyncio.to_thread(CliRunner().invoke, app, ["alerts", *arguments], env=environment)

    return command


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with http_receiver() as running:
        yield running


async def test_an_unpriced_model_is_told_through_a_channel(
    settings: dict[str, Any], receiver: Receiver, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_URL", f"{receiver.url}/hush")
    monkeypatch.setattr(evaluation, "EVERY_SECONDS", 0.5)
    made = await run("channels", "set", "ops", "webhook", "--address-env", "HOOK_URL")
    assert made.stdout == "ops: webhook, address from env:HOOK_URL. Try it: farthing alerts test ops\n", made.stderr
    async with running_gateway(settings) as gateway:
        tested = await run("test", "ops")
        assert tested.stdout == "sent to ops\n", tested.stderr
        assert (await gateway.chat(model="gratis")).status_code == 200
        await gateway.row()
        await refresh(gateway.engine)  # which the gateway does once a minute
        told = await _events(receiver, 2)
        assert [each["type"] for each in told] == ["alert.test", "alert.opened"]
        assert "gratis has no price" in told[1]["data"]["summary"]
        [listed] = json.loads((await run("list", "--json")).stdout)
        shown = await run("show", listed["id"])
        assert "unpriced model, everything: The model gratis has no price" in shown.stdout and "sent" in shown.stdout
        detail = json.loads((await run("show", listed["id"], "--json")).stdout)
        assert [each["status"] for each in detail["deliveries"]] == ["sent"]
        await _refused_by_the_receiver(gateway, receiver, run)
    assert "hush" not in made.stdout + tested.stdout + shown.stdout + json.dumps(detail)


async def _refused_by_the_receiver(gateway: Gateway, receiver: Receiver, run: Any) -> None:

    receiver.answer = lambda _: web.Response(status=404, text="no such hook")
    tested = await run("test", "ops")
    assert tested.exit_code == 1
    assert tested.stderr == "farthing: ops did not take it: HTTP 404: no such hook. It will be tried again\n"


async def _events(receiver: Receiver, count: int) -> list[Any]:
    for _ in range(600):
        if len(receiver.got) >= count:
            break
        await asyncio.sleep(0.05)
    return [json.loads(got.body) for got in receiver.got]


async def test_rules_channels_and_silences(run: Any) -> None:
    rules = json.loads((await run("rules", "list", "--json")).stdout)
    assert [rule["kind"] for rule in rules] == ["budget_share", "unpriced_model", "spool"]
    made = await run("rules", "set", "spike", "tag", "feature=*", "--set", "minimum=0.5")
    assert made.exit_code == 0, made.stderr
    listed = (await run("rules", "list")).stdout
    assert "minimum=0.5" in listed and "feature=*" in listed
    silent = await run("silence", "--rule", made.stdout.strip(), "--hours", "2", "--reason", "load test")
    assert silent.stdout.startswith("silent until 20"), silent.stderr
    [silence] = json.loads((await run("silences", "list", "--json")).stdout)
    assert (silence["reason"], silence["over"]) == ("load test", "no")
    assert (await run("silences", "end", silence["id"])).exit_code == 0
    assert (await run("rules", "remove", made.stdout.strip())).exit_code == 0
    mail = ["email", "--address-file", "/run/secrets/smtp", "--from", "f@x.org", "--to", "a@x.org"]
    assert (await run("channels", "set", "mail", *mail)).exit_code == 0
    [channel] = json.loads((await run("channels", "list", "--json")).stdout)
    assert (channel["address"], channel["to"]) == ("file:/run/secrets/smtp", "a@x.org")
    assert (await run("channels", "remove", "mail")).exit_code == 0
    assert (await run("list")).stdout == "none\n"


async def test_what_makes_no_sense_is_refused_with_a_sentence(run: Any) -> None:
    for arguments, sentence in [
        (["rules", "set", "spice"], "'spice' is not a kind of rule"),
        (["rules", "set", "spike", "--set", "score"], "'score' is no parameter; write it as NAME=VALUE"),
        (["rules", "set", "spike", "user", "nobody"], "there is no organisation 'default'"),
        (["rules", "set", "spike", "user"], "say which user"),
        (["rules", "remove", "00000000-0000-0000-0000-000000000000"], "there is no rule"),
        (["channels", "set", "x", "slack"], "say where its URL is: --address-env NAME or --address-file PATH"),
        (["channels", "set", "x", "slack", "--address-env", "https://x"], "must say where it is read"),
        (["channels", "remove", "x"], "there is no channel 'x'"),
        (["silence"], "say how long: --hours or --until"),
        (["silence", "--until", "tomorrow"], "'tomorrow' is no moment"),
        (["silence", "--hours", "1", "--which", "x"], "--which needs --scope"),
        (["test", "x"], "there is no channel 'x'"),
        (["show", "00000000-0000-0000-0000-000000000000"], "there is no alert"),
    ]:
        result = await run(*arguments)
        assert result.exit_code == 1 and sentence in result.stderr, result.stderr
