"""`farthing audit …`: who changed what. Heavy imports wait, as in cli.py."""

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.command_line import DatabaseUrl, DataDir, Json, in_database, show

if TYPE_CHECKING:
    import msgspec
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.audit import Entry

app = typer.Typer(help="Look at what administrators have changed.", no_args_is_help=True)


@app.callback()
def audit() -> None:
    """Look at what administrators have changed."""


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, the newest first.")] = 50,
    noun: Annotated[
        str | None, typer.Option(help="Only changes of one kind of thing: key, budget, price, administrator, …")
    ] = None,
    noun_id: Annotated[str | None, typer.Option("--id", help="Only changes of one thing.")] = None,
    actor: Annotated[str | None, typer.Option(help="Only what one actor did, as the column shows them.")] = None,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """List changes, newest first; --json shows each thing before and after."""

    async def work(connection: "AsyncConnection") -> "list[Entry]":
        from billing.audit import list_entries

        return await list_entries(connection, limit, noun=noun, noun_id=noun_id, actor=actor)

    show([_row(entry, as_json) for entry in in_database(work, database_url, data_dir)], as_json)


def _row(entry: "Entry", whole: bool) -> dict[str, Any]:
    before, after = _object(entry.before), _object(entry.after)
    row = {
        "id": entry.id,
        "at": entry.at,
        "actor": entry.actor,
        "action": entry.action,
        "noun": entry.noun,
        "noun_id": entry.noun_id,
    }
    return row | ({"before": before, "after": after} if whole else {"what": _summary(before, after)})


def _object(raw: "msgspec.Raw | None") -> dict[str, Any] | None:
    """Numbers keep every digit."""
    found: dict[str, Any] | None = None if raw is None else json.loads(bytes(raw), parse_float=Decimal)
    return found


def _summary(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str:
    """What changed, or what the thing is called."""
    if before is None or after is None:
        thing = after or before or {}
        return str(thing.get("name") or thing.get("model") or thing.get("scope_id") or "")
    changed = (name for name in after if before.get(name) != after[name])
    return ", ".join(f"{name}: {_word(before.get(name))} → {_word(after[name])}" for name in changed)


def _word(value: object) -> str:
    return "none" if value is None else str(value)
