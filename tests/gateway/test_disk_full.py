"""No room for the row: nothing is computed that cannot be recorded, and no hold is left behind."""

from pathlib import Path
from typing import Any

import pytest

from billing.spool import Spool
from tests.gateway.running import Gateway
from tests.gateway.scripted import Scripted
from tests.gateway.test_budgets import limit, settled

ONE_CALL = 10 * 10 + 5 * 20
"""Millionths that a call with max_tokens 5 could cost."""


async def test_without_room_nothing_is_dispatched(
    gateway: Gateway, upstream: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    await limit(gateway, ONE_CALL)
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "free_bytes", lambda _: 1_000_000)
        answer = await gateway.chat(max_tokens=5)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        assert "no room" in answer.json()["error"]["message"]
        ready = await gateway.http.get("/health/ready")
        assert ready.status_code == 503 and "make room" in ready.json()["reasons"]["ledger"]
        assert "farthing_spool_free_bytes 1e+06\n" in (await gateway.http.get("/metrics")).text
    assert not upstream.chats
    row = await gateway.row()
    assert (row["status"], row["http_status"], row["attempts"]) == ("upstream_error", 503, [])
    assert await settled(gateway, 1) == 0
    assert (await gateway.chat(max_tokens=5)).status_code == 200, "nothing is held for the refused call"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_row_that_cannot_be_written_leaves_no_hold(
    gateway: Gateway, settings: dict[str, Any], stream: bool
) -> None:
    await limit(gateway, ONE_CALL)
    in_the_way = Path(settings["data_dir"]) / "spool" / "000000000001.segment"
    in_the_way.mkdir()
    answer = await gateway.chat(max_tokens=5, stream=stream)
    if stream:
        assert "cannot record this request" in answer.text and answer.text.endswith("data: [DONE]\n\n")
        assert '"stop"' not in answer.text, "nobody holds a complete answer that has no row"
    else:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
    in_the_way.rmdir()
    assert (await gateway.chat(max_tokens=5)).status_code == 200, "nothing is held for the call without a row"
    assert await settled(gateway, 1) == 124
