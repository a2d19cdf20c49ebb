"""Rollover: what is left of a window adds to the next, exactly, whenever its calls are settled."""

import asyncio
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import lease_cleanup, settlements
from billing.budgets import Budget
from billing.leases import BudgetExhausted
from billing.rollover import Past, carried
from billing.windows import Window, window_bounds
from tests.billing.replicas import a_replica, admit, budget, budgets_of, row, wrong_sums
from tests.billing.test_lease_clocks import shift_clock
from tests.billing.test_windows import ZONES

amounts = st.decimals(0, 20, places=2)


@given(
    st.sampled_from(ZONES),
    st.sampled_from(["hour", "day", "week", "month"]),
    st.datetimes(datetime(2005, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC)),
    st.lists(st.tuples(amounts, st.none() | amounts, st.booleans()), min_size=1, max_size=12),
    st.none() | amounts,
)
def test_it_is_what_window_after_window_leaves(
    name: str, window: Window, begin: datetime, windows: list[tuple[Decimal, Decimal | None, bool]], cap: Decimal | None
) -> None:
    """Against the plain definition, window after window. One without a row was not used, and its limit stayed."""
    start, limit, amount = window_bounds(begin, window, ZoneInfo(name))[0], Decimal(7), Decimal(0)
    past = []
    for number, (used, changed, is_there) in enumerate(windows):
        if is_there or number == 0:
            limit = limit if changed is None else changed
            past.append(Past(start, Decimal(0) if number == 0 else Decimal(-1), changed if number else limit, used))
        else:
            used = Decimal(0)
        amount = max(limit + amount - used, Decimal(0))
        amount = amount if cap is None else min(amount, cap)
        end = window_bounds(start, window, ZoneInfo(name))[1]
        assert end is not None
        start = end
    assert carried(past, start, window, name, cap) == amount


async def at(engine: AsyncEngine, hours: float) -> None:
    """So many hours after the first minute of an hour that is the same for all of a test."""
    await shift_clock(engine, f"{await _to_the_hour(engine) + hours * 3600} seconds")


async def _to_the_hour(engine: AsyncEngine) -> float:
    async with engine.connect() as conn:
        query = text("SELECT extract(epoch FROM date_trunc('hour', now()) + interval '1 hour 1 minute' - now())")
        return float((await conn.execute(query)).scalar_one())


async def rolls(engine: AsyncEngine, amount: str = "10", **terms: Any) -> UUID:
    return await budget(engine, "key", "k", amount, **{"window": "hour", "rollover": True} | terms)


async def spend(engine: AsyncEngine, amount: str, billed: str | None = None, replica: str = "a.1") -> None:
    async with a_replica(engine, replica) as leases:
        hold = await admit(leases, amount, key="k")
        leases.settle(hold, Decimal(billed or amount), 0)
        async with engine.begin() as conn:
            await settlements.settle(conn, [row(hold, billed or amount)])


async def refused(engine: AsyncEngine, amount: str) -> None:
    async with a_replica(engine, "b.1") as leases:
        with pytest.raises(BudgetExhausted):
            await admit(leases, amount, key="k")


async def test_what_is_left_adds_to_the_next_window(engine: AsyncEngine) -> None:
    await at(engine, 0)
    await rolls(engine)
    await spend(engine, "4")
    await at(engine, 1)
    await refused(engine, "16.01")
    await spend(engine, "16")
    await at(engine, 2)
    await refused(engine, "10.01")  # nothing was left
    await at(engine, 4)  # nobody called in hours 2 and 3
    await refused(engine, "30.01")
    await spend(engine, "30")
    assert await wrong_sums(engine) == []


async def test_up_to_the_cap(engine: AsyncEngine) -> None:
    await at(engine, 0)
    await rolls(engine, rollover_cap=Decimal(3))
    await at(engine, 5)
    await refused(engine, "13.01")
    await spend(engine, "13")


async def test_a_call_that_is_settled_late_is_counted_where_it_was_held(engine: AsyncEngine) -> None:
    """Until then all that it holds counts as spent; what it did not need rolls over afterwards, window after window."""
    await at(engine, 0)
    await rolls(engine)
    async with a_replica(engine, "slow.1") as slow:
        late = await admit(slow, "8", key="k")
        await at(engine, 1)
        await refused(engine, "12.01")
        await spend(engine, "12")
        await at(engine, 2)
        await refused(engine, "10.01")
        slow.settle(late, Decimal(3), 0)
        async with engine.begin() as conn:
            await settlements.settle(conn, [row(late, "3")])
    await refused(engine, "15.01")
    await spend(engine, "15")


async def test_an_overspent_window_takes_nothing_from_the_next(engine: AsyncEngine) -> None:
    await at(engine, 0)
    await rolls(engine)
    await spend(engine, "10", "14")
    await at(engine, 1)
    await spend(engine, "10")


async def test_a_window_keeps_its_limit(engine: AsyncEngine) -> None:
    await at(engine, 0)
    first = await rolls(engine)
    await spend(engine, "4")
    await at(engine, 1)
    assert await rolls(engine, "100") == first
    await refused(engine, "106.01")
    await at(engine, 3)  # the hour before was never used, and had 100
    assert await rolls(engine, "1") == first
    await refused(engine, "207.01")
    await spend(engine, "207")


async def test_it_begins_when_it_is_switched_on_and_ends_when_it_is_off(engine: AsyncEngine) -> None:
    await at(engine, 0)
    await rolls(engine, rollover=False)
    await at(engine, 3)
    await rolls(engine)
    await refused(engine, "10.01")
    await at(engine, 4)
    await refused(engine, "20.01")
    await rolls(engine, rollover=False)
    await refused(engine, "10.01")
    await rolls(engine)
    await refused(engine, "10.01")
    await rolls(engine, time_zone="Asia/Kathmandu")  # its hours begin at a quarter
    await refused(engine, "10.01")


async def test_a_clock_that_jumps_back_takes_nothing_from_what_was_carried_on(engine: AsyncEngine) -> None:
    await at(engine, 0)
    await rolls(engine)
    await spend(engine, "1")
    await at(engine, 1)
    await spend(engine, "19")
    await at(engine, 0)
    await refused(engine, "0.01")
    await at(engine, 2)
    await spend(engine, "10")


async def test_two_who_disagree_about_the_hour_never_have_the_rest_twice(engine: AsyncEngine) -> None:
    """One takes from an hour in the moment that another opens the next: on either side of the turn, together 20."""
    for turn in range(6):
        await at(engine, 10 * turn)
        await rolls(engine, rollover=False)  # from here on anew
        await rolls(engine)
        async with a_replica(engine, "a.1") as one, a_replica(engine, "b.1") as two:
            for leases in (one, two):
                leases.release(await admit(leases, "0.01", key="k"))
            seconds = (58.5 + turn / 10) * 60
            await shift_clock(engine, f"{await _to_the_hour(engine) + 36_000 * turn + seconds} seconds")
            held = Decimal(0)

            async def take(leases: Any, most: int) -> Decimal:
                got = Decimal(0)
                for _ in range(most):
                    try:
                        await admit(leases, "1", key="k")
                        got += 1
                    except BudgetExhausted:
                        await asyncio.sleep(0.02)
                return got

            held = sum(await asyncio.gather(take(one, 15), take(two, 15)), Decimal(0))
        assert held <= 20
        async with engine.connect() as conn:
            total = (await conn.execute(text("SELECT sum(settled + leased) FROM budget_window"))).scalar_one()
        assert total <= 20
        async with engine.begin() as conn:
            await conn.execute(text("DELETE FROM budget"))


async def test_the_list_says_what_rolled_over(engine: AsyncEngine) -> None:
    await rolls(engine, window="month", time_zone="Asia/Tokyo", rollover_cap=Decimal(50))
    found: Budget = (await budgets_of(engine))["k"]
    assert (found.rollover, found.rollover_cap, found.rolled_over) == (True, 50, 0)
    async with engine.begin() as conn:
        await conn.execute(text("SET LOCAL TIME ZONE 'Asia/Tokyo'"))  # whose months these are
        await conn.execute(text("UPDATE budget SET rolls_since = rolls_since - interval '1 month'"))
        await conn.execute(text("UPDATE budget_window SET starts_at = starts_at - interval '1 month', settled = 4"))
    assert (await budgets_of(engine))["k"].rolled_over == 6


async def test_bad_rollovers_are_refused_with_a_sentence(engine: AsyncEngine) -> None:
    for terms, sentence in [
        ({"window": "none"}, "no next window for what is left"),
        ({"rollover": False, "rollover_cap": Decimal(1)}, "set the rollover too"),
        ({"rollover_cap": Decimal(-1)}, "rollover cap is -1"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            await rolls(engine, **terms)  # type: ignore[arg-type]


async def test_old_windows_go_and_what_they_brought_stays(engine: AsyncEngine) -> None:
    await rolls(engine, rollover=False)
    await budget(engine, "key", "other", "10", window="hour")
    rolling = await budget(engine, "key", "r", "10", window="hour", rollover=True)
    async with engine.begin() as conn:
        await conn.execute(
            text("UPDATE budget SET rolls_since = date_trunc('hour', now()) - interval '50 days' WHERE scope_id = 'r'")
        )
        await conn.execute(text("DELETE FROM budget_window"))
        await conn.execute(
            text("""
            INSERT INTO budget_window (budget_id, starts_at, settled, limit_amount)
            SELECT id, date_trunc('hour', now()) - make_interval(days => d), 3,
                CASE WHEN d = 50 AND rolls_since IS NOT NULL THEN 10 END
            FROM budget, unnest(ARRAY[50, 40, 36, 2, 1]) AS u (d)
            """)
        )
        await conn.execute(
            text("INSERT INTO replica (name, renewed_at) VALUES ('old.1', now() - interval '8 days'), ('new.1', now())")
        )
    before = (await budgets_of(engine))["r"].rolled_over
    assert before == 50 * 24 * 10 - 5 * 3
    for _ in range(2):
        await lease_cleanup.clean_up(engine)
        async with engine.connect() as conn:
            left = (
                await conn.execute(
                    text("SELECT budget_id = :r, count(*) FROM budget_window GROUP BY 1 ORDER BY 1"), {"r": rolling}
                )
            ).all()
            replicas = (await conn.execute(text("SELECT name FROM replica"))).scalars().all()
        assert [tuple(found) for found in left] == [(False, 4), (True, 2)]
        assert replicas == ["new.1"]
        assert (await budgets_of(engine))["r"].rolled_over == before


@given(st.integers(0, 23), st.integers(0, 400))
def test_hours_are_counted_over_clock_changes(hour: int, days: int) -> None:
    begin = datetime(2026, 1, 1, hour, tzinfo=UTC)
    end = begin + timedelta(days=days)
    assert (
        carried([Past(begin, Decimal(0), Decimal(1), Decimal(0))], end, "hour", "America/New_York", None) == days * 24
    )
