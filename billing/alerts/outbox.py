"""The outbox: what is to be told waits in the database until a receiver has taken it, or has refused it too often.

Each sending holds its row's lock and marks it in the same transaction: replicas share the work without meeting, and one
that dies between sending and marking leaves the row to be sent again. So a message comes once or more, never less, and
its id tells a repetition.
"""

import asyncio
from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import cache
from random import uniform
from typing import Any, Literal
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import ColumnElement, exists, func, insert, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.alerts.channels import find_channel
from billing.alerts.message import Message, one_line
from billing.alerts.send import SendError, send
from billing.ids import new_id
from billing.tables import alert_delivery

EVERY_SECONDS = 2.0
AT_ONCE = 4
"""Sendings side by side in one process: a receiver that does not answer holds up no other."""

ATTEMPTS = 12
"""Then it is dead. With these pauses that is after about five hours."""
FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 3600.0

log = structlog.get_logger(__name__)


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    alert_id: UUID | None
    channel: str
    event: str
    status: Literal["waiting", "sent", "dead"]
    attempts: int
    due_at: datetime
    error: str | None
    """Why the last attempt failed; of one that was sent, whom it did not reach."""
    created_at: datetime
    ended_at: datetime | None


async def enqueue(conn: AsyncConnection, channels: Iterable[str], message: Message) -> list[UUID]:
    """Put a message into the outbox, once for each channel; return the deliveries' ids."""
    plain = msgspec.to_builtins(message)
    rows = [{"id": new_id(), "alert_id": message.alert_id, "channel": name, "message": plain} for name in channels]
    if rows:
        await conn.execute(insert(alert_delivery), rows)
    return [row["id"] for row in rows]


async def send_test(conn: AsyncConnection, channel: str) -> UUID:
    """Have a gateway send a test message; return the delivery's id. Raises ValueError when there is no such channel."""
    if await find_channel(conn, channel) is None:
        raise ValueError(f"there is no channel {channel!r}; `farthing alerts channels list` shows all")
    now: datetime = (await conn.execute(select(func.now()))).scalar_one()
    message = Message(
        event="test",
        alert_id=None,
        rule="test",
        scope_kind="all",
        scope_id="",
        scope=f"channel {channel}",
        summary="This is what an alert of Farthing looks like here. Nothing is wrong.",
        opened_at=now,
        at=now,
    )
    [identifier] = await enqueue(conn, [channel], message)
    return identifier


async def find_delivery(conn: AsyncConnection, delivery_id: UUID) -> Delivery | None:
    found = await deliveries(conn, alert_delivery.c.id == delivery_id)
    return found[0] if found else None


async def deliveries(conn: AsyncConnection, which: ColumnElement[bool]) -> list[Delivery]:
    """Those that `which` says, the oldest first."""
    event = alert_delivery.c.message["event"].astext.label("event")
    names = [name for name in Delivery.__struct_fields__ if name != "event"]
    query = select(*(alert_delivery.c[name] for name in names), event).where(which).order_by(alert_delivery.c.id)
    return [Delivery(**row) for row in (await conn.execute(query)).mappings()]


async def deliver(engine: AsyncEngine) -> None:
    """Send all that is due. A receiver's failure is written down; only the database's is raised."""
    done = await asyncio.gather(*(_work(engine) for _ in range(AT_ONCE)), return_exceptions=True)
    for failure in done:
        if failure is not None:
            raise failure


async def _work(engine: AsyncEngine) -> None:
    while await deliver_one(engine):
        pass


async def deliver_one(engine: AsyncEngine) -> bool:
    """Send the delivery that has been due longest; False when none is, or others have them all."""
    async with engine.begin() as conn:
        row = (await conn.execute(_due())).one_or_none()
        if row is None:
            return False
        channel = await find_channel(conn, row.channel)
        if channel is None:
            return False  # removed this moment, and the row goes with it
        attempts = row.attempts + 1
        ended: dict[str, Any] = {"attempts": attempts, "ended_at": func.clock_timestamp()}
        try:
            note = await send(channel, _read(row.message), row.id)
        except SendError as error:
            log.warning("alert_not_delivered", channel=row.channel, attempt=attempts, reason=str(error))
            due = func.clock_timestamp() + timedelta(seconds=error.retry_after or _pause(attempts))
            failed = ended | {"status": "dead"} if attempts >= ATTEMPTS else {"attempts": attempts, "due_at": due}
            values = failed | {"error": str(error)}
        else:
            values = ended | {"status": "sent", "error": None if note is None else one_line(note)}
        await conn.execute(update(alert_delivery).where(alert_delivery.c.id == row.id).values(values))
    return True


def _read(message: Any) -> Message:
    try:
        return msgspec.convert(message, Message)
    except msgspec.ValidationError:
        raise SendError("it cannot be sent: this release does not understand the message") from None


@cache  # it is asked every second
def _due() -> Any:
    """The one to send next, locked. Of one alert and channel the earlier goes first: no end before its beginning."""
    mine, earlier = alert_delivery.c, alert_delivery.alias("earlier")
    before = exists().where(
        earlier.c.alert_id == mine.alert_id,
        earlier.c.channel == mine.channel,
        earlier.c.status == literal_column("'waiting'"),
        earlier.c.id < mine.id,
    )
    return (
        select(mine.id, mine.channel, mine.message, mine.attempts)
        .where(mine.status == literal_column("'waiting'"), mine.due_at <= func.clock_timestamp(), ~before)
        .order_by(mine.due_at)
        .limit(1)
        .with_for_update(skip_locked=True, of=alert_delivery)
    )


def _pause(attempts: int) -> float:
    """Twice as long each time, and never the same for all that failed together."""
    pause: float = min(FIRST_PAUSE_SECONDS * 2 ** (attempts - 1), LONGEST_PAUSE_SECONDS)
    return pause * uniform(0.75, 1.25)  # noqa: S311
