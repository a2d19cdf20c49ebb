"""The audit log: who changed what, with the row before and after. Triggers write it, so nothing that changes is missed.

Who opens a transaction names its actor; a change without one is noted with the database's own user.
"""

from datetime import datetime
from typing import Literal, NamedTuple

import msgspec
from sqlalchemy import RowMapping, Text, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.tables import audit_log

Action = Literal["create", "change", "remove"]


class Audited(NamedTuple):
    """A table whose changes are logged."""

    table: str
    noun: str
    """What people call a row of it."""
    hidden: tuple[str, ...] = ()
    """Columns that the log never shows, only that they changed."""


AUDITED = (
    Audited("org", "org"),
    Audited("team", "team"),
    Audited("app_user", "user"),
    Audited("api_key", "key"),
    Audited("budget", "budget"),
    Audited("price_version", "price"),
    Audited("alert_rule", "alert rule"),
    Audited("alert_channel", "alert channel"),
    Audited("alert_silence", "silence"),
    Audited("administrator", "administrator"),
    Audited("admin_token", "token", ("hash",)),
    Audited("invoice", "invoice"),
)
"""The triggers on these tables are made by the migrations; a test compares the two."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one row."""

    id: int
    at: datetime
    actor: str
    action: Action
    noun: str
    noun_id: str | None
    before: msgspec.Raw | None
    """The row as a JSON object; None when it was made. Amounts are numbers of any length: read them as decimals."""
    after: msgspec.Raw | None
    """None when it was removed."""


async def act_as(conn: AsyncConnection, actor: str) -> None:
    """What `conn` changes until the end of its transaction is `actor`'s doing."""
    await conn.execute(select(func.set_config("farthing.actor", actor, True)))


async def list_entries(
    conn: AsyncConnection,
    limit: int,
    *,
    older_than: int | None = None,
    noun: str | None = None,
    noun_id: str | None = None,
    actor: str | None = None,
) -> list[Entry]:
    """The newest `limit` entries, newest first: of one noun, one thing or one actor where given.

    `older_than`: the id of the last entry that was seen.
    """
    columns = audit_log.c
    before, after = cast(columns.before, Text), cast(columns.after, Text)
    query = select(
        columns.id,
        columns.at,
        columns.actor,
        columns.action,
        columns.noun,
        columns.noun_id,
        before.label("before"),
        after.label("after"),
    )
    if older_than is not None:
        query = query.where(columns.id < older_than)
    for column, wanted in ((columns.noun, noun), (columns.noun_id, noun_id), (columns.actor, actor)):
        if wanted is not None:
            query = query.where(column == wanted)
    rows = (await conn.execute(query.order_by(columns.id.desc()).limit(limit))).mappings()
    return [Entry(**(dict(row) | {name: _json(row, name) for name in ("before", "after")})) for row in rows]


def _json(row: RowMapping, name: str) -> msgspec.Raw | None:
    return None if row[name] is None else msgspec.Raw(row[name].encode())
