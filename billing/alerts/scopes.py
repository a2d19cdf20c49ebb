"""Whom a rule watches: one org, team, user, key, tag or model, each one of a kind, or all together."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, get_args
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, FromClause, Row, Text, cast, literal, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.allowances import LONGEST_SCOPE_ID
from billing.measures import summed
from billing.tables import api_key, app_user, org, team, usage_hour, usage_hour_tag
from billing.usage_rows import tag_usage_rows, usage_rows

RuleScopeKind = Literal["all", "org", "team", "user", "key", "tag", "model"]
EACH = "*"
_NAMED = {"org": org, "team": team, "user": app_user}


class RuleScope(msgspec.Struct, frozen=True):
    """`id`: of an org, team, user or key; a model's name; a tag as name=value; empty for all.

    `*` stands for each one of the kind, name=* for each value of a tag.
    """

    kind: RuleScopeKind
    id: str

    @property
    def each(self) -> bool:
        return self.id == EACH or (self.kind == "tag" and self.id.endswith(f"={EACH}"))

    def holds(self, kind: str, identifier: str) -> bool:
        """Whether what is set on this scope also is about that one."""
        if self.kind == "all":
            return True
        if self.kind != kind:
            return False
        if self.kind == "tag" and self.each and self.id != EACH:
            return identifier.startswith(self.id.removesuffix(EACH))
        return self.each or self.id == identifier


def rule_scope(kind: str, identifier: str) -> RuleScope:
    """Raises ValueError, with a sentence, on what is no scope."""
    if kind not in get_args(RuleScopeKind):
        raise ValueError(f"{kind!r} is not a scope; use one of {', '.join(get_args(RuleScopeKind))}")
    if (kind == "all") != (identifier == ""):
        raise ValueError("the scope all has no id" if identifier else f"say which {kind}, or {EACH} for each")
    if len(identifier) > LONGEST_SCOPE_ID:
        raise ValueError(f"the {kind} has {len(identifier)} characters; at most {LONGEST_SCOPE_ID} are possible")
    name, equals, value = identifier.partition("=")
    if kind == "tag" and identifier != EACH and not (name and equals and value):
        raise ValueError(f"{identifier!r} is not a tag; write it as name=value, or name={EACH} for each value")
    if kind in ("org", "team", "user", "key") and identifier != EACH:
        try:
            UUID(identifier)
        except ValueError:
            raise ValueError(f"{identifier!r} is not the id of a {kind}") from None
    return RuleScope(kind, identifier)  # type: ignore[arg-type]


async def usage(
    conn: AsyncConnection,
    scope: RuleScope,
    start: datetime,
    end: datetime,
    *,
    by: Literal["hour", "model"] | None = None,
    only: Sequence[str] | None = None,
    exact: bool = False,
) -> Sequence[Row[Any]]:
    """Measures of all that `scope` is about, summed by `member` (a scope's id), `currency` and `part`.

    Of the UTC hours that begin from `start` on and before `end`, as they were summed up last: a minute or two ago for
    the running one. `part`: the hour or the model where `by` says so, else NULL. `only`: the members asked for.
    `exact`: of [start, end) to the moment, from the ledger where the sums are not, which takes longer; not by hour.
    """
    rows: FromClause = usage_hour_tag if scope.kind == "tag" else usage_hour
    if exact:
        rows = await (tag_usage_rows if scope.kind == "tag" else usage_rows)(conn, start, end)
    member: ColumnElement[Any]
    if scope.kind == "all":
        member = literal_column("''")
    elif scope.kind == "tag":
        member = rows.c.name + literal("=", literal_execute=True) + rows.c.value
    elif scope.kind == "model":
        member = rows.c.model
    else:
        member = cast(rows.c[f"{scope.kind}_id"], Text)
    part: ColumnElement[Any] = literal_column("NULL::text")
    if by == "hour":
        part = rows.c.bucket
    elif by == "model":
        part = rows.c.model
    query = select(member.label("member"), rows.c.currency, part.label("part"), *summed(rows))
    if not exact:
        query = query.where(rows.c.bucket >= start, rows.c.bucket < end)
    query = query.group_by(literal_column("1"), rows.c.currency, literal_column("3"))
    if scope.kind != "all":
        query = query.where(member.is_not(None), member != "")
    if scope.kind == "tag" and scope.each and scope.id != EACH:
        query = query.where(rows.c.name == scope.id.removesuffix(f"={EACH}"))
    elif not scope.each and scope.kind != "all":
        query = query.where(member == scope.id)
    if only is not None:
        query = query.where(member.in_(only))
    return (await conn.execute(query)).all()


async def label(conn: AsyncConnection, kind: str, identifier: str) -> str:
    """A scope as a person calls it."""
    if kind == "all":
        return "everything"
    if kind in _NAMED:
        table = _NAMED[kind]
        name = (await conn.execute(select(table.c.name).where(table.c.id == UUID(identifier)))).scalar_one_or_none()
        return f"{kind} {name or identifier}"
    if kind == "key":
        query = select(api_key.c.name, api_key.c.prefix).where(api_key.c.id == UUID(identifier))
        key = (await conn.execute(query)).one_or_none()
        return f"key {identifier}" if key is None else f"key {key.name} ({key.prefix}…)"
    return f"{kind} {identifier}"
