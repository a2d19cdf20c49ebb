"""`/audit`: who changed what."""

from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery

from billing.audit import Action, Entry, list_entries
from gateway.admin.access import needs
from gateway.admin.paging import Listing, Page, listing
from gateway.admin.writing import Admin


class Change(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    at: datetime
    actor: str
    action: Action
    noun: str
    noun_id: str | None
    before: dict[str, Any] | None
    """The thing as it was; amounts are strings. null when it was made."""
    after: dict[str, Any] | None
    """null when it was removed."""


@get("/audit", opt=needs("manage", everywhere=True))
async def list_changes(
    admin: NamedDependency[Admin],
    page: NamedDependency[Page],
    noun: FromQuery[str | None] = None,
    noun_id: FromQuery[str | None] = None,
    actor: FromQuery[str | None] = None,
) -> Listing[Change]:
    """Changes, newest first: of one kind of thing, one thing or one actor where given."""
    async with admin.read() as conn:
        found = await list_entries(
            conn, page.limit + 1, older_than=page.after_number, noun=noun, noun_id=noun_id, actor=actor
        )
    return listing([_change(entry) for entry in found], page, lambda change: change.id)


ROUTES = [list_changes]


def _change(entry: Entry) -> Change:
    return Change(**(msgspec.structs.asdict(entry) | {"before": _row(entry.before), "after": _row(entry.after)}))


def _row(raw: msgspec.Raw | None) -> dict[str, Any] | None:
    """Numbers with a fraction keep every digit."""
    decoder = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal)
    return None if raw is None else decoder.decode(raw)
