"""The read models against a small ledger whose sums are known by hand."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from billing import operations, people, prices, reports
from billing.ids import smallest_id
from billing.prices import Price, PriceTerms
from billing.records import NO_COLUMNS, AttemptRecord, OperationRecord, TokenClasses
from billing.tables import attempt, operation

NOW = datetime(2026, 11, 29, 14, 30, tzinfo=UTC)
TODAY = NOW.replace(hour=0, minute=0)
WEEK = TODAY - timedelta(days=6)
MONTH = TODAY - timedelta(days=29)


class Ledger:
    """Adds operations with little said about each."""

    def __init__(
        self, connection: AsyncConnection, org_id: UUID, ada: UUID, bo: UUID, key_id: UUID, sale: Price
    ) -> None:
        self.connection, self.org_id, self.ada, self.bo, self.key_id, self.sale = (
            connection,
            org_id,
            ada,
            bo,
            key_id,
            sale,
        )
        self._made = 0

    async def add(self, ago: timedelta, tokens: TokenClasses | None = None, **fields: Any) -> UUID:
        self._made += 1
        at = NOW - ago
        record = OperationRecord(
            **{
                "id": UUID(int=smallest_id(at).int + self._made), "started_at": at, "org_id": self.org_id,
                "team_id": None, "user_id": self.ada, "key_id": self.key_id, "requested_model": "auto",
                "model": "tiny", "stream": False, "status": "ok", "http_status": 200, "total_seconds": 1.0,
                "currency": "USD",
            } | fields
        )  # fmt: skip
        await self.connection.execute(insert(operation).values(row(record, *NO_COLUMNS)))
        if tokens is not None:
            one = AttemptRecord(
                number=1, upstream="engine", model=record.model or "", started_at=at, status=record.status,
                tokens=tokens, usage_source="engine", total_seconds=1.0, price_version_id=self.sale.id,
            )  # fmt: skip
            await self.add_attempt(record.id, one)
        return record.id

    async def add_attempt(self, operation_id: UUID, one: AttemptRecord) -> None:
        values = row(one, "tokens") | msgspec.structs.asdict(one.tokens) | {"operation_id": operation_id}
        await self.connection.execute(insert(attempt).values(values))


def row(record: msgspec.Struct, *without: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(record).items() if name not in without}


@pytest.fixture
async def ledger(database_url: str) -> AsyncIterator[Ledger]:
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        org_id = await people.create_org(connection, "Acme")
        team_id = await people.create_team(connection, org_id, "Search")
        ada = await people.create_user(connection, org_id, "ada", team_id)
        bo = await people.create_user(connection, org_id, "bo")
        key = await people.create_key(connection, org_id, "laptop", user_id=ada)
        terms = PriceTerms(
            book="sale", model="tiny", currency="USD", input_fresh=Decimal("0.05"), input_cached=Decimal("0.01")
        )
        await prices.seed(connection, [terms])
        sale = (await prices.load(connection)).sale("tiny")
        assert sale is not None
        yield Ledger(connection, org_id, ada, bo, key.id, sale)
    await engine.dispose()


async def test_windows_sum_exactly_and_leave_out_what_is_older(ledger: Ledger) -> None:
    await ledger.add(timedelta(hours=1), billed=Decimal("0.000000000000000001"), cost=Decimal("0"))
    await ledger.add(timedelta(hours=2), billed=Decimal("1000000000.1"), cost=Decimal("0.25"))
    await ledger.add(timedelta(days=3), billed=Decimal("2"), cost=Decimal("3"))
    await ledger.add(timedelta(days=20), billed=Decimal("5"), cost=Decimal("1"))
    await ledger.add(timedelta(days=40), billed=Decimal("7"), cost=Decimal("7"))
    [total] = await reports.total_spending(ledger.connection, [TODAY, WEEK, MONTH])
    assert total.currency == "USD"
    assert [window.operations for window in total.windows] == [2, 3, 4]
    assert [window.billed for window in total.windows] == [
        Decimal("1000000000.100000000000000001"),
        Decimal("1000000002.100000000000000001"),
        Decimal("1000000007.100000000000000001"),
    ]
    assert [window.cost for window in total.windows] == [Decimal("0.25"), Decimal("3.25"), Decimal("4.25")]
    assert [window.margin for window in total.windows] == [
        Decimal("999999999.850000000000000001"),
        Decimal("999999998.850000000000000001"),
        Decimal("1000000002.850000000000000001"),
    ]


async def test_the_first_moment_of_a_window_is_in_it(ledger: Ledger) -> None:
    await ledger.add(NOW - TODAY, billed=Decimal(1), cost=Decimal(0))
    await ledger.add(NOW - TODAY + timedelta(microseconds=1), billed=Decimal(2), cost=Decimal(0))
    [total] = await reports.total_spending(ledger.connection, [TODAY])
    assert total.windows[0].billed == 1


async def test_unknown_money_is_counted_and_never_zero(ledger: Ledger) -> None:
    await ledger.add(timedelta(hours=1), billed=Decimal("0.5"), cost=Decimal("0.2"))
    await ledger.add(timedelta(hours=1), billed=Decimal("0.5"), cost=None)
    await ledger.add(timedelta(hours=1), billed=None, cost=None)
    await ledger.add(timedelta(days=2), billed=None, cost=None)
    [total] = await reports.total_spending(ledger.connection, [TODAY])
    today = total.windows[0]
    assert (today.billed, today.billed_unknown) == (Decimal("1.0"), 1)
    assert (today.cost, today.cost_unknown) == (Decimal("0.2"), 2)
    assert today.margin == Decimal("0.3")  # of the one operation that has both
    point = (await reports.spending_over_time(ledger.connection, WEEK, "day"))[0].spending
    assert (point.billed, point.cost, point.margin, point.billed_unknown) == (None, None, None, 1)


async def test_what_was_never_dispatched_cost_nothing_and_is_not_unknown(ledger: Ledger) -> None:
    await ledger.add(timedelta(hours=1), status="refused", http_status=402, model=None)
    await ledger.add(timedelta(hours=1), status="invalid", http_status=400, model=None)
    [total] = await reports.total_spending(ledger.connection, [TODAY])
    today = total.windows[0]
    assert (today.operations, today.refused, today.failed) == (2, 1, 0)
    assert (today.billed, today.cost, today.margin) == (0, 0, 0)
    assert (today.billed_unknown, today.cost_unknown) == (0, 0)
    assert await reports.model_shares(ledger.connection, TODAY) == []


async def test_users_are_listed_by_what_they_were_billed(ledger: Ledger) -> None:
    await ledger.add(timedelta(hours=1), billed=Decimal(1), cost=Decimal(0))
    await ledger.add(timedelta(days=9), user_id=ledger.bo, billed=Decimal(3), cost=None)
    await ledger.add(timedelta(hours=1), user_id=None, billed=Decimal(2), cost=Decimal(0), status="upstream_error")
    users = await reports.user_spending(ledger.connection, [TODAY, WEEK, MONTH])
    assert [(user.user, user.team, user.org) for user in users] == [
        ("bo", None, "Acme"),
        (None, None, "Acme"),
        ("ada", "Search", "Acme"),
    ]
    bo, nobody, ada = (user.windows for user in users)
    assert [window.operations for window in bo] == [0, 0, 1]
    assert (bo[0].billed, bo[2].billed, bo[2].cost, bo[2].cost_unknown) == (0, 3, None, 1)
    assert nobody[0].failed == 1
    assert [window.billed for window in ada] == [1, 1, 1]
    assert len(await reports.user_spending(ledger.connection, [MONTH], limit=2)) == 2


async def test_currencies_are_never_added_up(ledger: Ledger) -> None:
    await ledger.add(timedelta(hours=1), billed=Decimal(1), currency="EUR")
    await ledger.add(timedelta(hours=1), billed=Decimal(2))
    await ledger.add(timedelta(hours=1), billed=Decimal(4))
    totals = await reports.total_spending(ledger.connection, [TODAY])
    assert [(each.currency, each.windows[0].billed) for each in totals] == [("USD", 6), ("EUR", 1)]
    assert len(await reports.user_spending(ledger.connection, [TODAY])) == 2


async def test_time_is_cut_at_utc_borders(ledger: Ledger) -> None:
    await ledger.add(NOW - TODAY, TokenClasses(input_fresh=1), billed=Decimal(1))
    await ledger.add(NOW - TODAY + timedelta(seconds=1), TokenClasses(input_fresh=2), billed=Decimal(2))
    await ledger.add(timedelta(minutes=1), TokenClasses(input_fresh=4), billed=Decimal(4))
    days = await reports.spending_over_time(ledger.connection, WEEK, "day")
    assert [(point.at, point.spending.billed) for point in days] == [(TODAY - timedelta(days=1), 2), (TODAY, 5)]
    hours = await reports.tokens_over_time(ledger.connection, TODAY, "hour")
    assert [(point.at.hour, point.tokens.input_fresh) for point in hours] == [(0, 1), (14, 4)]


async def test_tokens_are_summed_by_class_and_model(ledger: Ledger) -> None:
    every = TokenClasses(input_fresh=1, input_cached=2, input_cache_write=3, output_text=4, output_reasoning=5)
    await ledger.add(timedelta(hours=1), every)
    await ledger.add(timedelta(hours=2), every)
    await ledger.add(timedelta(hours=2), TokenClasses(output_text=7), model="big")
    points = await reports.tokens_over_time(ledger.connection, WEEK, "day")
    assert [(point.model, point.tokens) for point in points] == [
        ("big", TokenClasses(output_text=7)),
        (
            "tiny",
            TokenClasses(input_fresh=2, input_cached=4, input_cache_write=6, output_text=8, output_reasoning=10),
        ),
    ]


async def test_models_share_operations_and_routed_ones_are_counted(ledger: Ledger) -> None:
    await ledger.add(timedelta(hours=1), billed=Decimal(1))
    await ledger.add(timedelta(hours=1), billed=Decimal(1), requested_model="tiny")
    await ledger.add(timedelta(hours=1), billed=Decimal(9), model="big")
    shares = await reports.model_shares(ledger.connection, TODAY)
    assert [(share.model, share.spending.operations, share.routed, share.spending.billed) for share in shares] == [
        ("tiny", 2, 1, 2),
        ("big", 1, 1, 9),
    ]


async def test_the_cache_saves_the_difference_of_the_prices_used(ledger: Ledger) -> None:
    await ledger.add(timedelta(hours=1), TokenClasses(input_cached=1_000_000))
    await ledger.add(timedelta(hours=1), TokenClasses(input_cached=3))
    unpriced = await ledger.add(timedelta(hours=1))
    await ledger.add_attempt(
        unpriced,
        AttemptRecord(
            number=1, upstream="x", model="x", started_at=NOW, status="ok", usage_source="upstream", total_seconds=1,
            tokens=TokenClasses(input_cached=70),
        ),
    )  # fmt: skip
    for price in (None, ledger.sale.id):  # nobody pays for these
        await ledger.add_attempt(
            unpriced,
            AttemptRecord(
                number=2 if price is None else 3, upstream="x", model="x", started_at=NOW, status="ok", total_seconds=1,
                usage_source="upstream", tokens=TokenClasses(input_cached=9), price_version_id=price, billable=False,
            ),
        )  # fmt: skip
    savings = {each.currency: each for each in await reports.cache_savings(ledger.connection, TODAY)}
    assert savings["USD"].amount == Decimal("0.04000012")
    assert savings["USD"].unpriced_tokens == 70


async def test_the_latest_come_first_with_the_tokens_of_all_attempts(ledger: Ledger) -> None:
    old = await ledger.add(timedelta(days=400), TokenClasses(input_fresh=1))
    new = await ledger.add(timedelta(minutes=1), TokenClasses(input_fresh=10, output_text=2), billed=Decimal("0.1"))
    bare = await ledger.add(timedelta(minutes=2), user_id=None, status="refused", http_status=402)
    await ledger.add_attempt(
        new,
        AttemptRecord(
            number=2, upstream="b", model="tiny", started_at=NOW, status="ok", usage_source="engine", total_seconds=1,
            tokens=TokenClasses(input_fresh=5),
        ),
    )  # fmt: skip
    latest = await operations.latest_operations(ledger.connection)
    assert [each.id for each in latest] == [new, bare, old]
    assert latest[0].tokens == TokenClasses(input_fresh=15, output_text=2)
    assert (latest[0].user, latest[0].key_name, latest[0].billed) == ("ada", "laptop", Decimal("0.1"))
    assert latest[1].tokens == TokenClasses() and latest[1].user is None and latest[1].billed is None
    assert [each.id for each in await operations.latest_operations(ledger.connection, limit=1)] == [new]


async def test_pages_of_operations_lose_none_that_started_together(ledger: Ledger) -> None:
    for minutes in (1, 2, 2, 2, 3, 9):
        await ledger.add(timedelta(minutes=minutes))
    other = await ledger.add(timedelta(minutes=4), user_id=None)
    every = [each.id for each in await operations.latest_operations(ledger.connection)]
    for n, cursor in enumerate(every):
        before = await operations.operations_before(ledger.connection, cursor, 2)
        after = await operations.operations_after(ledger.connection, cursor, 2)
        assert before is not None and after is not None
        assert [each.id for each in before.rows] == every[n + 1 : n + 3]
        assert (before.newer, before.older) == (True, n + 3 < len(every))
        assert [each.id for each in after.rows] == every[max(n - 2, 0) : n]
        assert (after.newer, after.older) == (n > 2, True)
    within = reports.Within(user_id=ledger.ada)
    first = await operations.operations_before(ledger.connection, every[0], 99, within=within)
    assert first is not None and [each.id for each in first.rows] == [each for each in every[1:] if each != other]
    assert await operations.operations_before(ledger.connection, other, 99, within=within) is None, "not theirs"


async def test_one_operation_has_every_field_its_attempts_and_their_prices(ledger: Ledger) -> None:
    tokens = TokenClasses(input_fresh=10, output_text=2)
    found_id = await ledger.add(
        timedelta(minutes=1), tokens, tags={"app": "editor"}, route_reasons=["short"], route_score=0.25, error="boom"
    )
    found = await operations.find_operation(ledger.connection, found_id)
    assert found is not None
    assert (found.org, found.team, found.user, found.key_name) == ("Acme", None, "ada", "laptop")
    assert found.key_prefix is not None and found.key_prefix.startswith("fk-")
    record = found.record
    assert (record.tags, record.route_reasons, record.route_score) == ({"app": "editor"}, ["short"], 0.25)
    assert (record.error, record.billed, record.cost) == ("boom", None, None)
    [one] = record.attempts
    assert one.tokens == tokens and one.price_version_id == ledger.sale.id
    assert found.prices == {ledger.sale.id: ledger.sale}
    assert await operations.find_operation(ledger.connection, UUID(int=1)) is None
