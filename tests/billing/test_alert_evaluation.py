"""Alerts from beginning to end on a real database: opened once, brought up to date, told, resolved."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import people, prices
from billing.alerts.channels import set_channel
from billing.alerts.checks.health import health_report
from billing.alerts.evaluation import Evaluation
from billing.alerts.history import Alert, find_alert, list_alerts
from billing.alerts.rules import remove_rule, set_rule
from billing.alerts.silences import silence
from billing.budgets import list_budgets, set_budget
from billing.housekeeping import run_alone
from billing.ids import smallest_id
from billing.prices import PriceTerms
from billing.records import TokenClasses
from billing.rollups import refresh
from billing.spool import Spool
from billing.tables import alert_delivery, alert_rule, budget_window, device_hour, replica_health, usage_hour
from billing.tables.usage import MEASURES
from tests.billing.samples import an_attempt, an_operation
from tests.billing.stored import store

NOW = datetime(2026, 11, 26, 14, 30, tzinfo=UTC)  # a Thursday
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


class World:
    """A database without rules, with an org, a user and two keys; and what happens there."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.evaluation = Evaluation()
        self.made = 0
        self.org = self.user = self.chat = self.search = UUID(int=0)

    async def prepare(self) -> None:
        async with self.engine.begin() as conn:
            await conn.execute(delete(alert_rule))
            self.org = await people.create_org(conn, "Acme")
            self.user = await people.create_user(conn, self.org, "ada")
            self.chat = (await people.create_key(conn, self.org, "chat", user_id=self.user)).id
            self.search = (await people.create_key(conn, self.org, "search", user_id=self.user)).id
            await set_channel(conn, "ops", "webhook", "env:NOT_SENT")

    async def rule(self, kind: str, *scope: str, **parameters: Any) -> UUID:
        async with self.engine.begin() as conn:
            return await set_rule(conn, kind, *scope, parameters=parameters)

    async def spend(
        self, at: datetime, *, key: UUID | None = None, feature: str = "chat", count: int = 1,
        tokens: TokenClasses | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        async with self.engine.begin() as conn:
            for _ in range(count):
                self.made += 1
                record = an_operation(
                    **{
                        "id": UUID(int=smallest_id(at).int + self.made), "started_at": at, "org_id": self.org,
                        "user_id": self.user, "key_id": key or self.chat, "model": "tiny", "cost": Decimal(0),
                        "tags": {"feature": feature, "env": "prod"}, "billed": Decimal(1),
                        "attempts": [an_attempt(started_at=at, tokens=tokens)] if tokens else [],
                    }
                    | fields
                )  # fmt: skip
                await store(conn, record)

    async def past(self, weeks: int, hourly: str = "4") -> None:
        """So much spent in each whole hour of the weeks before, by both keys together."""
        first = NOW.replace(minute=0) - weeks * 7 * DAY
        nothing: dict[str, Any] = dict.fromkeys(MEASURES, 0)
        rows = [
            nothing
            | {"bucket": first + n * HOUR, "org_id": self.org, "user_id": self.user, "key_id": key, "model": "tiny"}
            | {"currency": "USD", "operations": 1, "billed": Decimal(hourly) / 2}
            for n in range(weeks * 168)
            for key in (self.chat, self.search)
        ]
        async with self.engine.begin() as conn:
            await conn.execute(insert(usage_hour), rows)

    async def evaluate(self, now: datetime = NOW) -> list[Alert]:
        """All open alerts, after one more evaluation."""
        await refresh(self.engine)
        await self.evaluation.run_at(self.engine, now)
        async with self.engine.begin() as conn:
            return await list_alerts(conn, open_only=True)

    async def told(self) -> list[str]:
        async with self.engine.begin() as conn:
            query = select(alert_delivery.c.message["event"].astext).order_by(alert_delivery.c.id)
            return list((await conn.execute(query)).scalars())


@pytest.fixture
async def world(engine: AsyncEngine) -> AsyncIterator[World]:
    made = World(engine)
    await made.prepare()
    yield made


def caused(alert: Alert) -> dict[str, float]:
    return {cause.name: round(cause.share, 2) for cause in alert.causes}


async def use_up(conn: AsyncConnection, budget: UUID, settled: str) -> None:
    await conn.execute(
        update(budget_window).where(budget_window.c.budget_id == budget).values(settled=Decimal(settled))
    )


async def make_budget(world: World, window: Any = "month", limit: str = "100") -> UUID:
    async with world.engine.begin() as conn:
        budget = await set_budget(conn, "user", world.user, window, Decimal(limit), currency="USD")
        [found] = await list_budgets(conn)
        await conn.execute(insert(budget_window).values(budget_id=budget, starts_at=found.starts_at, settled=0))
    return budget


async def test_a_budget_is_told_at_each_of_its_shares_and_resolves_with_its_window(world: World) -> None:
    now = datetime.now(UTC)
    budget = await make_budget(world)
    await world.rule("budget_share", clear_minutes=0)
    assert await world.evaluate(now) == []
    for settled, level, events in [
        ("49.99", None, 0), ("50", 0, 1), ("62", 0, 1), ("80", 1, 2), ("100.5", 2, 3), ("120", 2, 3),
    ]:  # fmt: skip
        async with world.engine.begin() as conn:
            await use_up(conn, budget, settled)
        alerts = await world.evaluate(now)
        assert [each.level for each in alerts] == ([] if level is None else [level])
        assert len(await world.told()) == events
    [alert] = alerts
    assert alert.scope == "user ada" and alert.details["settled"] == "120"
    assert "120% of the month budget is used up: 120.00 USD of 100.00 USD" in alert.summary
    async with world.engine.begin() as conn:
        await use_up(conn, budget, "1")
    assert await world.evaluate(now) == []
    assert await world.told() == ["opened", "worse", "worse", "resolved"]


async def test_a_budget_that_will_not_last(world: World) -> None:
    budget = await make_budget(world, "day", "24")
    await world.rule("budget_projection", "user", "*")
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    async with world.engine.begin() as conn:
        await use_up(conn, budget, "9")
    assert await world.evaluate(midnight + HOUR) == [], "an hour says little of a day"
    assert await world.evaluate(midnight + 10 * HOUR) == []
    [alert] = await world.evaluate(midnight + 6 * HOUR)
    assert Decimal(alert.details["projected"]) == pytest.approx(Decimal(36))
    assert alert.details["over_at"].startswith(f"{midnight + 16 * HOUR:%Y-%m-%dT%H:%M}")
    assert [each.id for each in await world.evaluate(midnight + timedelta(hours=9.2))] == [alert.id], "97%: it holds"


async def test_the_cause_of_a_budget_of_several_scopes_is_in_all_of_them(world: World) -> None:
    async with world.engine.begin() as conn:
        also: Any = {"model": "large", "tag": "env=prod"}
        budget = await set_budget(conn, "user", world.user, "none", Decimal(10), currency="USD", also=also)
        [found] = await list_budgets(conn)
        window = {"budget_id": budget, "starts_at": found.starts_at, "settled": Decimal(9)}
        await conn.execute(insert(budget_window).values(window))
    await world.rule("budget_share")
    await world.spend(NOW - 20 * MINUTE, count=9, model="large", feature="batch")
    await world.spend(NOW - 20 * MINUTE, count=30, feature="search", key=world.search)
    elsewhere = {"env": "test", "feature": "search"}
    await world.spend(NOW - 20 * MINUTE, count=30, model="large", key=world.search, tags=elsewhere)
    [alert] = await world.evaluate()
    assert {(cause.name, cause.share) for cause in alert.causes} == {("chat", 1), ("feature=batch", 1)}


async def test_a_spike_is_found_while_it_runs_and_its_cause_is_named(world: World) -> None:
    await world.past(weeks=3)
    await world.rule("spike", minimum=1)
    for days in (1, 2, 7):
        at = NOW - days * DAY - 10 * MINUTE
        await world.spend(at, count=2, feature="chat")
        await world.spend(at, count=2, feature="search", key=world.search)
    await world.spend(NOW - 45 * MINUTE, count=4)
    assert await world.evaluate(NOW - 30 * MINUTE) == []
    await world.spend(NOW - 20 * MINUTE, count=9, feature="search", key=world.search)
    for number in range(9):  # tags that come before `feature` in a list of names
        await world.spend(NOW - 20 * MINUTE, billed=Decimal(0), tags={f"a{number}": "x", "feature": "chat"})
    [alert] = await world.evaluate()
    assert (alert.scope, alert.subject) == ("everything", "USD")
    assert "13.00 USD spent in the hour up to 14:30 UTC" in alert.summary
    assert {(cause.kind, cause.name) for cause in alert.causes[:2]} == {("tag", "feature=search"), ("key", "search")}
    assert all(cause.share > 0.7 for cause in alert.causes[:2])
    assert "env=prod" not in [cause.name for cause in alert.causes[:2]], "what everything carries explains nothing"
    assert [each.id for each in await world.evaluate(NOW + MINUTE)] == [alert.id]
    assert await world.told() == ["opened"]


async def test_a_spike_resolves_when_it_has_been_clear_for_an_hour_and_comes_back_as_another(world: World) -> None:
    await world.past(weeks=3)
    await world.rule("spike", minimum=1)
    await world.spend(NOW - 20 * MINUTE, count=20)
    [alert] = await world.evaluate()
    for minutes in (50, 80, 109):  # from 50 on it is clear
        assert [each.id for each in await world.evaluate(NOW + minutes * MINUTE)] == [alert.id]
    assert await world.evaluate(NOW + 111 * MINUTE) == []
    await world.spend(NOW + 3 * HOUR, count=30)
    [again] = await world.evaluate(NOW + 3 * HOUR + 5 * MINUTE)
    assert again.id != alert.id
    assert await world.told() == ["opened", "resolved", "opened"]


async def test_a_small_spike_and_a_young_scope_are_no_alerts(world: World) -> None:
    await world.past(weeks=2)
    rule = await world.rule("spike", "key", "*", minimum=30, warm_up_days=13)
    await world.spend(NOW - 20 * MINUTE, count=20)
    assert await world.evaluate() == []
    await world.rule("spike", "key", "*", minimum=1, warm_up_days=15)
    assert await world.evaluate() == [], "there are two weeks of history"
    assert await world.rule("spike", "key", "*", minimum=1, warm_up_days=13) == rule
    [alert] = await world.evaluate()
    assert alert.scope.startswith("key chat (fk-") and alert.scope_id == str(world.chat)


async def test_an_unpriced_model_is_named_until_it_has_a_price(world: World) -> None:
    await world.rule("unpriced_model", clear_minutes=0)
    await world.spend(NOW - 5 * MINUTE, billed=None, model="gratis", count=3, key=world.search, feature="search")
    await world.spend(NOW - 5 * MINUTE, billed=None, model="gratis")
    await world.spend(NOW - 5 * MINUTE, billed=None, model="tiny", count=9)
    async with world.engine.begin() as conn:
        await prices.seed(conn, [PriceTerms(book="sale", model="tiny", currency="USD", input_fresh=Decimal(1))])
    [alert] = await world.evaluate()
    assert alert.subject == "gratis" and "4 operations" in alert.summary
    assert caused(alert) == {"env=prod": 1, "search": 0.75, "feature=search": 0.75}
    async with world.engine.begin() as conn:
        await prices.seed(conn, [PriceTerms(book="sale", model="gratis", currency="USD", input_fresh=Decimal(0))])
    assert await world.evaluate() == []


async def test_errors(world: World) -> None:
    await world.rule("error_rate", share=0.25)
    await world.spend(NOW - 5 * MINUTE, count=16)
    await world.spend(NOW - 5 * MINUTE, count=30, status="refused", http_status=402, billed=None)
    await world.spend(NOW - 5 * MINUTE, count=4, status="upstream_error", billed=Decimal(0), key=world.search)
    assert await world.evaluate() == [], "4 of 20 are not a quarter"
    await world.spend(NOW - 5 * MINUTE, count=2, status="upstream_error", billed=Decimal(0), key=world.search)
    [alert] = await world.evaluate()
    assert (alert.details["failed"], alert.details["operations"]) == (6, 22)
    assert alert.causes[0].name == "search" and alert.causes[0].share == 1
    await world.spend(NOW - 4 * MINUTE, count=4)
    assert [each.id for each in await world.evaluate()] == [alert.id], "23% keep open what 25% open"


async def test_a_cause_is_looked_for_in_the_tags_of_the_scope_whatever_others_have(world: World) -> None:
    async with world.engine.begin() as conn:
        other = await people.create_org(conn, "Umbrella")
        key = (await people.create_key(conn, other, "server")).id
    foreign = {f"a{number}": "x" for number in range(9)}
    await world.spend(NOW - 5 * MINUTE, count=30, org_id=other, user_id=None, key=key, tags=foreign)
    await world.spend(NOW - 5 * MINUTE, count=20, status="upstream_error", billed=Decimal(0), feature="search")
    for scope in (("org", "*"), ("user", "*"), ("tag", "env=*")):
        await world.rule("error_rate", *scope)
    alerts = await world.evaluate()
    assert sorted(alert.scope for alert in alerts) == ["org Acme", "tag env=prod", "user ada"]
    assert all(caused(alert)["feature=search"] == 1 for alert in alerts)


async def test_a_cache_that_is_not_hit_any_more(world: World) -> None:
    await world.rule("cache_hit_rate", "model", "tiny", minimum_tokens=1000)
    hit, missed = TokenClasses(input_fresh=200, input_cached=800), TokenClasses(input_fresh=900, input_cached=100)
    await world.spend(NOW - 2 * DAY, tokens=hit, count=3)
    await world.spend(NOW - 10 * MINUTE, tokens=hit, count=2)
    assert await world.evaluate() == []
    await world.spend(NOW - 5 * MINUTE, tokens=missed, count=6, key=world.search, feature="search")
    [alert] = await world.evaluate()
    assert caused(alert) == {"search": 0.93, "feature=search": 0.93, "env=prod": 1}
    assert alert.details["usual_rate"] == pytest.approx(0.8)
    assert alert.details["rate"] == pytest.approx(2200 / 8000)


async def test_a_margin_below_zero(world: World) -> None:
    await world.rule("margin", "user", "*", hours=6)
    await world.spend(NOW - 2 * HOUR, billed=Decimal(1), cost=Decimal("0.5"))
    await world.spend(NOW - 2 * HOUR, billed=None, cost=Decimal(50))
    await world.spend(NOW - 7 * HOUR, billed=Decimal(1), cost=Decimal(50))
    assert await world.evaluate() == [], "an unknown charge is no loss"
    await world.spend(NOW - HOUR, billed=Decimal(1), cost=Decimal("3.25"), key=world.search)
    [alert] = await world.evaluate()
    assert alert.details["margin"] == "-1.75" and alert.scope == "user ada"
    assert "1.75 USD more was paid than billed" in alert.summary
    assert alert.causes[0].name in ("search", "feature=chat")


async def test_slow_answers(world: World) -> None:
    await world.rule("latency", "tag", "feature=*", seconds=2, minutes=10)
    await world.spend(NOW - 5 * MINUTE, count=30, total_seconds=1.0)
    await world.spend(NOW - 5 * MINUTE, count=30, total_seconds=1.0, feature="search")
    await world.spend(NOW - 20 * MINUTE, count=30, total_seconds=9.0)
    assert await world.evaluate() == []
    await world.spend(NOW - 5 * MINUTE, count=2, total_seconds=9.0, feature="search", key=world.search)
    await world.spend(NOW - 5 * MINUTE, count=2, total_seconds=9.0, status="upstream_error", feature="search")
    [alert] = await world.evaluate()
    assert caused(alert) == {"search": 1, "env=prod": 1}, "the scope itself is no cause; what failed is no slow answer"
    assert alert.scope == "tag feature=search" and alert.details["p95_seconds"] > 2


async def test_a_spool_that_grows(world: World, tmp_path: Any) -> None:
    await world.rule("spool", operations=10, minutes=5)
    rows = [{"replica": "a.1", "at": NOW - n * MINUTE, "spooled": 40 - n, "free_bytes": 1} for n in range(7)]
    rows += [{"replica": "b.1", "at": NOW - n * MINUTE, "spooled": 40 + n, "free_bytes": 1} for n in range(7)]
    rows += [{"replica": "c.1", "at": NOW - n * MINUTE, "spooled": 40 * (n != 2), "free_bytes": 1} for n in range(7)]
    rows += [{"replica": "d.1", "at": NOW - n * MINUTE, "spooled": 90, "free_bytes": 1} for n in range(2, 9)]
    async with world.engine.begin() as conn:
        await conn.execute(insert(replica_health), rows)
    [alert] = await world.evaluate()  # b gets less, c was empty, d does not report any more
    assert alert.subject == "a.1" and "40 operations wait" in alert.summary


async def test_each_process_says_how_deep_its_spool_is(world: World, tmp_path: Any) -> None:
    spool = Spool(tmp_path)
    await spool.append(an_operation())
    job = health_report(spool)
    assert await run_alone(world.engine, job) and await run_alone(world.engine, job)
    async with world.engine.begin() as conn:
        rows = (await conn.execute(select(replica_health))).all()
    assert [(row.replica, row.spooled) for row in rows] == [(spool.replica, 1)] * 2
    await spool.close()


async def test_an_engine_that_idles(world: World) -> None:
    await world.rule("engine_idle", share="0.5")
    row: dict[str, Any] = {"upstream": "engine", "currency": "USD", "wall_seconds": 3600, "busy_seconds": 900}
    priced = {"idle_seconds": 2700, "busy_cost": Decimal(1), "idle_cost": Decimal(3)}
    unpriced: Mapping[str, Any] = {"idle_seconds": 2700, "busy_cost": None, "idle_cost": None}
    async with world.engine.begin() as conn:
        await conn.execute(insert(device_hour).values(row | {"starts_at": NOW - 2 * HOUR} | priced))
        await conn.execute(insert(device_hour).values(row | {"starts_at": NOW - 3 * HOUR} | unpriced))
    [alert] = await world.evaluate()
    assert alert.subject == "engine USD" and "75% of what the device of engine cost" in alert.summary


async def test_a_silence_holds_back_an_opening_until_it_is_over(world: World) -> None:
    rule = await world.rule("error_rate", clear_minutes=0)
    await world.spend(NOW - 5 * MINUTE, count=30, status="upstream_error", billed=Decimal(0))
    async with world.engine.begin() as conn:
        await silence(conn, datetime.now(UTC) + DAY, rule_id=rule)
    [alert] = await world.evaluate()
    assert await world.told() == [] and not alert.told
    later = datetime.now(UTC) + 2 * DAY
    await world.spend(later - MINUTE, count=30, status="upstream_error", billed=Decimal(0))
    [alert] = await world.evaluate(later)
    assert await world.told() == ["opened"] and alert.told
    async with world.engine.begin() as conn:
        found = await find_alert(conn, alert.id)
    assert found is not None and [each.event for each in found.deliveries] == ["opened"]


async def test_what_a_removed_rule_has_opened_resolves(world: World) -> None:
    rule = await world.rule("error_rate")
    await world.spend(NOW - 5 * MINUTE, count=30, status="upstream_error", billed=Decimal(0))
    assert len(await world.evaluate()) == 1
    async with world.engine.begin() as conn:
        assert await remove_rule(conn, rule)
    assert await world.evaluate() == []
    assert await world.told() == ["opened", "resolved"]


async def test_a_rule_that_cannot_be_evaluated_holds_up_no_other(world: World) -> None:
    await world.rule("error_rate")
    await world.rule("margin")
    await world.spend(NOW - 5 * MINUTE, count=30, status="upstream_error", billed=Decimal(0), cost=Decimal(1))

    async def broken(*_: Any) -> AsyncIterator[Any]:
        raise RuntimeError("a bug")
        yield

    world.evaluation._checks["error_rate"] = broken
    [alert] = await world.evaluate()
    assert alert.kind == "margin"


async def test_two_replicas_open_one_alert(world: World) -> None:
    """They take turns, but one may be slow and lose its lock: the index has the last word."""
    await world.rule("error_rate")
    await world.spend(NOW - 5 * MINUTE, count=30, status="upstream_error", billed=Decimal(0))
    await refresh(world.engine)
    await asyncio.gather(*(Evaluation().run_at(world.engine, NOW) for _ in range(4)))
    assert len(await world.evaluate()) == 1
    assert await world.told() == ["opened"]
