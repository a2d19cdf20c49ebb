"""Alerts against what is hostile or broken: receivers' answers, names of keys and tags, addresses, references."""

import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web
from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.alerts.channels import Channel, resolve, set_channel
from billing.alerts.message import Cause, Message
from billing.alerts.outbox import deliver, deliver_one, enqueue, find_delivery
from billing.alerts.pruning import KEPT, forget_old
from billing.alerts.send import SendError, send
from billing.alerts.senders.email import compose
from billing.ids import new_id
from billing.tables import alert, alert_channel, alert_delivery, alert_silence, audit_log
from tests.billing.receivers import Receiver, http_receiver
from tests.billing.test_alert_outbox import a_message

NOW = datetime.now(UTC)


@pytest.fixture
async def receiver(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    async with http_receiver() as running, engine.begin() as conn:
        monkeypatch.setenv("ALERT_URL", running.url)
        await set_channel(conn, "ops", "webhook", "env:ALERT_URL")
        await conn.commit()
        yield running


async def test_an_answer_that_cannot_be_stored_does_not_make_it_sent_for_ever(
    engine: AsyncEngine, receiver: Receiver
) -> None:
    receiver.answer = lambda _: web.Response(status=500, body=b"a\x00b\x1b[31m\r\nc")
    async with engine.begin() as conn:
        [identifier] = await enqueue(conn, ["ops"], a_message())
    await deliver(engine)
    async with engine.connect() as conn:
        found = await find_delivery(conn, identifier)
    assert found is not None and found.attempts == 1 and found.error == "HTTP 500: a b [31m  c"
    assert len(receiver.got) == 1


async def test_a_message_that_cannot_be_read_holds_up_no_other(engine: AsyncEngine, receiver: Receiver) -> None:
    """Of another release, say."""
    async with engine.begin() as conn:
        [odd, usual] = [*await enqueue(conn, ["ops"], a_message()), *await enqueue(conn, ["ops"], a_message())]
        broken = update(alert_delivery).where(alert_delivery.c.id == odd)
        await conn.execute(broken.values(message={"event": "opened"}, due_at=func.now() - timedelta(hours=1)))
    while await deliver_one(engine):
        pass
    async with engine.connect() as conn:
        first, second = await find_delivery(conn, odd), await find_delivery(conn, usual)
    assert first is not None and first.attempts == 1 and first.error is not None and "cannot be sent" in first.error
    assert second is not None and second.status == "sent"


async def test_a_mailbox_that_no_mail_can_have_is_refused_when_it_is_set(conn: AsyncConnection) -> None:
    for bad in ("a(b)c@d.test", "a:b@c.test", "a;b@c.test", "a@b@c.test", "a b@c.test", "a@c.test\nBcc:x@y.test"):
        for terms in ({"sender": bad, "recipients": ["a@b.test"]}, {"sender": "a@b.test", "recipients": [bad]}):
            with pytest.raises(ValueError, match="is not an e-mail address"):
                await set_channel(conn, "mail", "email", "env:MAIL", **terms)  # type: ignore[arg-type]
    await set_channel(conn, "mail", "email", "env:MAIL", sender="ops+x@b.test", recipients=["o'neil@b.test"])


def test_a_reference_reads_ordinary_files_only(tmp_path: Path) -> None:
    """A pipe that nobody writes to would hold a thread for ever."""
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/dev/tty"), tmp_path / "missing"):
        with pytest.raises(ValueError, match="cannot be read by this gateway"):
            resolve(f"file:{name}")
    (tmp_path / "url").write_text("https://hook.test/secret\n")
    (tmp_path / "link").symlink_to(tmp_path / "url")
    assert resolve(f"file:{tmp_path / 'link'}") == "https://hook.test/secret", "as mounted secrets are"


NO_URLS = [
    "smtp://user:s3cret-word@mail.test:notaport-s3cret-word",
    "smtps://user:s3cret-word@[mail.test",
    "smtp://us\u2100er:s3cret-word@mail.test",
    "https://user:s3cret-word@host:notaport/",
    "https://[s3cret-word/",
    "https://s3cret-word\u2100.test/",
    "root:x:0:0:s3cret-word:/root:/bin/sh",
    "POSTGRES_PASSWORD=s3cret-word",
    "https://" + "s3cret-word" * 100 + ".test/",
    "https://exa mple/s3cret-word\x00",
]


@pytest.mark.parametrize("content", NO_URLS)
@pytest.mark.parametrize("kind", ["webhook", "email", "dingtalk"])
async def test_what_a_reference_holds_is_never_told(tmp_path: Path, content: str, kind: Any) -> None:

    (tmp_path / "held").write_text(content)
    mail: dict[str, Any] = {"sender": "a@b.test", "recipients": ("c@d.test",)} if kind == "email" else {}
    channel = Channel(
        name="c", kind=kind, address=f"file:{tmp_path / 'held'}", secret=None, created_at=NOW,
        **{"sender": None, "recipients": None} | mail,
    )  # fmt: skip
    with pytest.raises(SendError) as refused:
        await send(channel, a_message(), uuid4())
    assert "s3cret-word" not in str(refused.value) and "root" not in str(refused.value)


def test_names_make_no_lines_and_no_headers() -> None:
    evil = "x\r\nBcc: all@b.test\r\n\r\nResolved: \u2028everything\x1b[2J\u202eis well"
    message = Message(
        event="opened", alert_id=None, rule="spike", scope_kind="key", scope_id="1", scope=f"key {evil}",
        summary=f"{evil} spent much.", causes=(Cause("tag", f"app={evil}", "1", 0.5),), opened_at=NOW, at=NOW,
    )  # fmt: skip
    for line in (message.title, *message.lines):
        assert line.isprintable(), line
    mail = compose(message, new_id(), "a@b.test", ["c@d.test"])
    assert mail["Bcc"] is None and mail["Subject"].isprintable()
    assert mail.get_content_type() == "text/plain"


async def test_what_is_long_over_is_forgotten(engine: AsyncEngine, receiver: Receiver) -> None:
    old, recent = NOW - KEPT - timedelta(days=1), NOW - KEPT + timedelta(days=1)
    row = {
        "rule_id": new_id(), "kind": "spike", "scope_kind": "all", "scope_id": "", "level": 0, "summary": "s",
        "details": {}, "opened_at": old, "updated_at": old,
    }  # fmt: skip
    alerts = {name: new_id() for name in ("old", "recent", "open")}
    ended = {"old": old, "recent": recent, "open": None}
    async with engine.begin() as conn:
        for name, identifier in alerts.items():
            values = row | {"id": identifier, "subject": name, "resolved_at": ended[name]}
            await conn.execute(insert(alert).values(values))
            await enqueue(conn, ["ops"], a_message(alert_id=identifier))
        [test_of_old, test_of_recent] = [(await enqueue(conn, ["ops"], a_message("test")))[0] for _ in range(2)]
        for identifier, at in ((test_of_old, old), (test_of_recent, recent)):
            sent = update(alert_delivery).where(alert_delivery.c.id == identifier)
            await conn.execute(sent.values(status="sent", ended_at=at))
        for until in (old, recent, NOW + timedelta(hours=1)):
            await conn.execute(insert(alert_silence).values(id=new_id(), until=until, reason="r"))
    await forget_old(engine)
    async with engine.connect() as conn:
        left = set((await conn.execute(select(alert.c.subject))).scalars())
        told = set((await conn.execute(select(alert_delivery.c.alert_id))).scalars())
        tests = set(
            (await conn.execute(select(alert_delivery.c.id).where(alert_delivery.c.alert_id.is_(None)))).scalars()
        )
        silences = (await conn.execute(select(func.count()).select_from(alert_silence))).scalar_one()
        actors = set((await conn.execute(select(audit_log.c.actor).where(audit_log.c.action == "remove"))).scalars())
        channels = (await conn.execute(select(func.count()).select_from(alert_channel))).scalar_one()
    assert left == {"recent", "open"} and told == {alerts["recent"], alerts["open"], None}
    assert tests == {test_of_recent} and silences == 2 and channels == 1
    assert actors == {"gateway"}
