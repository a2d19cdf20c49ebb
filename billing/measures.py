"""What is counted and summed of operations: the measures of `billing.tables.usage`, for rows of the ledger.

They come as rows to be summed, several for one operation: one that counts it, adjustments included, and one for each of
its attempts.
"""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    FromClause,
    Integer,
    Numeric,
    ScalarSelect,
    Select,
    Subquery,
    and_,
    case,
    cast,
    false,
    func,
    literal_column,
    null,
    select,
    union_all,
)

from billing.records import TOKEN_CLASSES
from billing.tables import adjustment, attempt, operation, price_version
from billing.tables.usage import AMOUNTS, COUNTS, MEASURES

NOTHING_DISPATCHED = ("refused", "invalid")
"""Statuses of operations that cost nothing because nothing was computed: their NULL money is not an unknown."""


_OF_ATTEMPTS = {*TOKEN_CLASSES, "cache_hits", "cache_saved", "cache_saved_unknown"}
_OF_OPERATIONS = {*MEASURES} - _OF_ATTEMPTS
_NEEDED = (
    *("id", "started_at", "org_id", "team_id", "user_id", "key_id", "tags", "requested_model", "model", "status"),
    *("billed", "cost", "currency", "cached_from", "saved_billed", "saved_prompt_tokens", "saved_completion_tokens"),
)
"""Columns of `operation` that the measures are made of."""

Measures = dict[str, ColumnElement[Any]]


def ledger_rows(which: ColumnElement[bool], measures: Collection[str] = MEASURES) -> Subquery:
    """The `measures` of the operations that `which` (of `operation`'s columns) says, to be summed.

    Columns: `at` (when the operation started), its owners, its `tags` and `measures`. Where they need no attempts, none
    are looked at.
    """
    found = select(*(operation.c[name] for name in _NEEDED)).where(which).cte("found")
    # The scalar subquery says no more than a join on the id does, and lets PostgreSQL skip earlier days' partitions.
    first = select(found.c.id).order_by(found.c.id).limit(1).scalar_subquery()
    parts = [
        part(found, first, [name for name in MEASURES if name in measures])
        for part, kinds in ((_operations, _OF_OPERATIONS), (_attempts, _OF_ATTEMPTS))
        if kinds & {*measures}
    ]
    return union_all(*parts).subquery("rows")


def summed(rows: FromClause) -> list[ColumnElement[Any]]:
    """The sums of the measures in `rows`, under their names. A sum of SUMS is NULL where none of it is known."""
    sums: list[ColumnElement[Any]] = []
    for name in (name for name in MEASURES if name in rows.c):
        total: ColumnElement[Any] = func.sum(rows.c[name])
        sums.append((cast(total, BigInteger) if name in COUNTS else total).label(name))
    return sums


def _operations(found: CTE, first: ScalarSelect[Any], wanted: Sequence[str]) -> Select[*tuple[Any, ...]]:
    changed = (
        select(
            adjustment.c.operation_id,
            func.sum(adjustment.c.billed_delta).label("billed"),
            func.sum(adjustment.c.cost_delta).label("cost"),
        )
        .where(adjustment.c.operation_id >= first)
        .group_by(adjustment.c.operation_id)
        .subquery("changed")
    )
    apart = _costs_apart(found, first)
    # An operation is known to cost something once all of its attempts are.
    unknown = func.coalesce(apart.c.unknown, false())
    recorded = func.coalesce(found.c.cost, case((~unknown, apart.c.cost)))
    cost_delta = case((~unknown, changed.c.cost))
    billed, cost = changed_by(found.c.billed, changed.c.billed), changed_by(recorded, cost_delta)
    status = found.c.status
    dispatched = status.not_in(NOTHING_DISPATCHED)
    from_cache, saved = found.c.cached_from.is_not(None), found.c.saved_billed - billed
    rows = _rows(
        found,
        wanted,
        {
            "operations": literal_column("1"),
            "failed": _one_if(status == "upstream_error"),
            "refused": _one_if(status == "refused"),
            "invalid": _one_if(status == "invalid"),
            "client_closed": _one_if(status == "client_closed"),
            "routed": _one_if(dispatched & (found.c.requested_model == "auto")),
            "billed_unknown": _one_if(dispatched & billed.is_(None)),
            "cost_unknown": _one_if(dispatched & cost.is_(None)),
            "billed": found.c.billed,
            "cost": recorded,
            "margin": billed - cost,
            "cached_answers": _one_if(from_cache),
            **{name: func.coalesce(found.c[name], 0) for name in ("saved_prompt_tokens", "saved_completion_tokens")},
            "cached_answers_saved": func.coalesce(saved, 0),
            "cached_answers_saved_unknown": _one_if(from_cache & saved.is_(None)),
            "billed_adjustment": func.coalesce(changed.c.billed, 0),
            "cost_adjustment": func.coalesce(cost_delta, 0),
        },
    )
    joined = rows.outerjoin(changed, changed.c.operation_id == found.c.id)
    return joined.outerjoin(apart, apart.c.id == found.c.id)


def _costs_apart(found: CTE, first: ScalarSelect[Any]) -> Subquery:
    """Of operations without a cost of which an attempt's was adjusted: `cost`, the sum of what attempts were recorded
    with, and whether one is still `unknown`."""
    adjusted = (
        select(adjustment.c.operation_id, adjustment.c.number)
        .where(adjustment.c.operation_id >= first, adjustment.c.cost_delta.is_not(None))
        .distinct()
        .subquery("adjusted")
    )
    same = and_(adjusted.c.operation_id == attempt.c.operation_id, adjusted.c.number == attempt.c.number)
    unknown = attempt.c.cost.is_(None) & adjusted.c.number.is_(None)
    return (
        select(found.c.id, func.sum(attempt.c.cost).label("cost"), func.bool_or(unknown).label("unknown"))
        .join(attempt, attempt.c.operation_id == found.c.id)
        .outerjoin(adjusted, same)
        .where(
            found.c.cost.is_(None),
            found.c.id.in_(select(adjusted.c.operation_id)),
            attempt.c.operation_id >= first,
        )
        .group_by(found.c.id)
        .subquery("apart")
    )


def changed_by(amount: ColumnElement[Any], by: ColumnElement[Any]) -> ColumnElement[Any]:
    """An amount with what it was adjusted by; one that was unknown counts as 0 once it is adjusted."""
    return func.coalesce(amount + by, amount, by)


def _attempts(found: CTE, first: ScalarSelect[Any], wanted: Sequence[str]) -> Select[*tuple[Any, ...]]:
    cached = attempt.c.input_cached
    override = price_version.alias("override")
    factor = func.coalesce(override.c.factor, 1)
    difference = (price_version.c.input_fresh - price_version.c.input_cached) * factor
    return (
        _rows(
            found,
            wanted,
            {
                "cache_hits": _one_if(cached > 0),
                **{name: attempt.c[name] for name in TOKEN_CLASSES},
                # What nobody pays saved nobody anything.
                "cache_saved": case(
                    (attempt.c.billable, func.coalesce(cached * difference * literal_column("0.000001"), 0)), else_=0
                ),
                "cache_saved_unknown": case((difference.is_(None) & attempt.c.billable, cached), else_=0),
            },
        )
        .join(attempt, attempt.c.operation_id == found.c.id)
        .outerjoin(price_version, price_version.c.id == attempt.c.price_version_id)
        .outerjoin(override, override.c.id == attempt.c.price_override_id)
        .where(attempt.c.operation_id >= first)
    )


def _rows(found: CTE, wanted: Sequence[str], measures: Measures) -> Select[*tuple[Any, ...]]:
    """`wanted`, with those `measures` that this kind of row has and nothing for the others."""
    owners = [found.c[name] for name in ("org_id", "team_id", "user_id", "key_id")]
    model = func.coalesce(found.c.model, "").label("model")
    columns = [found.c.started_at.label("at"), *owners, model, found.c.currency, found.c.tags]
    return select(*columns, *(_filled(name, measures.get(name)) for name in wanted)).select_from(found)


def _filled(name: str, measure: ColumnElement[Any] | None) -> ColumnElement[Any]:
    kind = BigInteger if name in COUNTS else Numeric
    nothing = literal_column("0") if name in COUNTS or name in AMOUNTS else null()
    return cast(nothing if measure is None else measure, kind).label(name)


def _one_if(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return cast(condition, Integer)
