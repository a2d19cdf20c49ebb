"""Options that say which period and whose operations: shared by what reports and exports usage. Heavy imports wait."""

import re
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from gateway.command_line import fail

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.filters import Filters

Last = Annotated[
    str | None,
    typer.Option(
        metavar="30d", help="Days (30d: today and the 29 before), weeks (4w) or hours (6h) until now. Default: 30d."
    ),
]
From = Annotated[str | None, typer.Option("--from", metavar="DATE", help="First day, like 2026-11-01.")]
To = Annotated[str | None, typer.Option("--to", metavar="DATE", help="Last day, included. Default: until now.")]
TimeZone = Annotated[str, typer.Option(help="Where days begin, like Europe/Paris.")]
Org = Annotated[str | None, typer.Option(help="Only this organisation.")]
Team = Annotated[str | None, typer.Option(help="Only this team (with --org).")]
User = Annotated[str | None, typer.Option(help="Only this user (with --org).")]
Key = Annotated[str | None, typer.Option(help="Only this key: its id or prefix.")]
Model = Annotated[str | None, typer.Option(help="Only what this model answered.")]
Tag = Annotated[str | None, typer.Option(metavar="NAME=VALUE", help="Only what carries this tag.")]

_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


class Wanted(NamedTuple):
    """Whose operations, as people write it."""

    org: str | None = None
    team: str | None = None
    user: str | None = None
    key: str | None = None
    model: str | None = None
    tag: str | None = None


def period(last: str | None, first: str | None, to: str | None, time_zone: str) -> tuple[datetime, datetime]:
    """[start, end) in UTC; ends with a sentence where the options do not say one."""
    from billing.windows import zone

    try:
        tz = zone(time_zone)
    except ValueError as error:
        fail(str(error))
    now = datetime.now(UTC)

    def midnight(day: date) -> datetime:
        return datetime(day.year, day.month, day.day, tzinfo=tz).astimezone(UTC)

    if first is None and to is not None:
        fail("--to needs --from")
    if first is not None:
        if last is not None:
            fail("give --last or --from, not both")
        start, end = midnight(_day(first)), now if to is None else midnight(_day(to) + timedelta(days=1))
        if start >= end:
            fail("the period is empty: --from is after its end")
        return start, end
    found = re.fullmatch(r"([1-9]\d{0,4})([hdw])", last or "30d")
    if found is None:
        fail(f"{last!r} is no length of time; write it like 30d, 4w or 6h")
    length = int(found[1]) * _UNITS[found[2]]
    if found[2] == "h":
        return now - length, now
    return midnight(now.astimezone(tz).date() - length + timedelta(days=1)), now


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        fail(f"{text!r} is not a date; write it like 2026-11-01")


async def filters(connection: "AsyncConnection", wanted: Wanted) -> "Filters":
    """With ids for names. Raises ValueError where one does not exist."""
    from billing import people
    from billing.filters import Filters

    org_id = team_id = user_id = key_id = None
    if wanted.org is not None:
        org_id = await people.find_org(connection, wanted.org)
        if org_id is None:
            raise ValueError(f"there is no organisation {wanted.org!r}; `farthing orgs list` shows all")
    for kind, name in (("team", wanted.team), ("user", wanted.user)):
        if name is not None and org_id is None:
            raise ValueError(f"--{kind} needs --org: two organisations may have a {kind} of the same name")
    if wanted.team is not None and org_id is not None:
        team_id = await people.find_team(connection, org_id, wanted.team)
        if team_id is None:
            raise ValueError(f"there is no team {wanted.team!r} in {wanted.org!r}; `farthing teams list` shows all")
    if wanted.user is not None and org_id is not None:
        user_id = await people.find_user(connection, org_id, wanted.user)
        if user_id is None:
            raise ValueError(f"there is no user {wanted.user!r} in {wanted.org!r}; `farthing users list` shows all")
    if wanted.key is not None:
        key_id = (await people.get_key(connection, wanted.key)).key_id
    tag = None
    if wanted.tag is not None:
        name, equals, value = wanted.tag.partition("=")
        if not (name and equals):
            raise ValueError(f"{wanted.tag!r} is not a tag; write it like app=editor")
        tag = (name, value)
    return Filters(org_id=org_id, team_id=team_id, user_id=user_id, key_id=key_id, model=wanted.model, tag=tag)
