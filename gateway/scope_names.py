"""What people call the scopes of budgets, limits, wallets and prices, which are stored as ids. Heavy imports wait."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

DEFAULT_ORG = "default"


def refuse_role(kind: str, which: str) -> None:
    """Raises ValueError for a role in place of a model: a call is counted under the model that answers it."""
    from gateway.settings import ROLES

    if kind == "model" and which in ("auto", *ROLES):
        raise ValueError(f"{which!r} only says who shall answer; name the model itself, as `farthing.toml` does")


async def scope_names(connection: "AsyncConnection", scopes: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The name of each (kind, id) of an org, team, user or key that exists.

    A team or user of another organisation than `default` is `ORG/NAME`, a key its name and prefix.
    """
    from uuid import UUID

    from sqlalchemy import select

    from billing.tables import api_key, app_user, org, team

    wanted: dict[str, set[UUID]] = {"org": set(), "team": set(), "user": set(), "key": set()}
    for kind, identifier in scopes:
        if kind in wanted:
            wanted[kind].add(UUID(identifier))
    names: dict[tuple[str, str], str] = {}
    if wanted["org"]:
        for identifier, name in await connection.execute(
            select(org.c.id, org.c.name).where(org.c.id.in_(wanted["org"]))
        ):
            names["org", str(identifier)] = name
    for kind, table in (("team", team), ("user", app_user)):
        query = select(table.c.id, table.c.name, org.c.name).join(org, org.c.id == table.c.org_id)
        for identifier, name, of in await connection.execute(query.where(table.c.id.in_(wanted[kind]))):
            names[kind, str(identifier)] = name if of == DEFAULT_ORG else f"{of}/{name}"
    keys = select(api_key.c.id, api_key.c.name, api_key.c.prefix).where(api_key.c.id.in_(wanted["key"]))
    for identifier, name, prefix in await connection.execute(keys):
        names["key", str(identifier)] = f"{name} {prefix}"
    return names
