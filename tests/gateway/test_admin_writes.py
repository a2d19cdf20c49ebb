"""Writes: done once however often they are sent; noted with what was before and after; refused with a sentence."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import create_async_engine

from billing import people
from billing.tables import audit_log, idempotent_write, org
from gateway.admin.writing import forget_old_writes
from tests.gateway.administering import House, a_house


@pytest.fixture
async def house(database_url: str, tmp_path: Path):
    engine = create_async_engine(database_url, pool_size=30)
    yield await a_house(engine, database_url, tmp_path)
    await engine.dispose()


async def orgs_called(house: House, name: str) -> int:
    async with house.engine.connect() as conn:
        return (await conn.execute(select(func.count()).select_from(org).where(org.c.name == name))).scalar_one()


async def test_twenty_equal_writes_at_once_are_one(house: House) -> None:
    key = {"idempotency-key": str(uuid.uuid4())}
    body = {"org_id": str(house.org), "name": "once"}
    async with house.client("admin", **key) as client:
        answers = await asyncio.gather(*(client.post("/keys", json=body) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].json()["key"].startswith("fk-")
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    async with house.engine.connect() as conn:
        assert [key.name for key in await people.list_keys(conn, org_id=house.org)] == ["laptop", "once"]
        found = await people.find_key(conn, answers[0].json()["key"])
    assert found is not None and found.name == "once"


async def test_the_kept_answer_does_not_show_the_key_it_made(house: House) -> None:
    async with house.client("admin", **{"idempotency-key": "k"}) as client:
        secret = (await client.post("/keys", json={"org_id": str(house.org), "name": "n"})).json()["key"]
    async with house.engine.connect() as conn:
        [row] = (await conn.execute(select(idempotent_write))).all()
        everything = (await conn.execute(text("SELECT t::text FROM idempotent_write t"))).scalars().all()
    assert secret.encode() not in row.answer and secret.encode().hex() not in "".join(everything)


async def test_a_key_is_for_one_request_and_one_caller(house: House) -> None:
    async with house.client("admin", **{"idempotency-key": "k"}) as client:
        assert (await client.post("/orgs", json={"name": "one"})).status_code == 201
        other = await client.post("/orgs", json={"name": "two"})
        assert other.status_code == 422 and other.json()["error"]["code"] == "idempotency_key_reused"
        elsewhere = await client.post("/teams", json={"name": "one"})
        assert elsewhere.status_code in (400, 422)
    async with house.client("owner", **{"idempotency-key": "k"}) as client:
        assert (await client.post("/orgs", json={"name": "two"})).status_code == 201
    assert await orgs_called(house, "two") == 1


async def test_what_was_refused_can_be_sent_again(house: House) -> None:
    async with house.client("admin", **{"idempotency-key": "k"}) as client:
        assert (await client.post("/orgs", json={"name": "acme"})).status_code == 409
        async with house.engine.begin() as conn:
            await conn.execute(update(org).where(org.c.id == house.org).values(name="renamed"))
        assert (await client.post("/orgs", json={"name": "acme"})).status_code == 201


async def test_an_answer_that_was_kept_under_another_admin_key_is_lost_not_done_again(house: House) -> None:
    async with house.client("admin", **{"idempotency-key": "k"}) as client:
        assert (await client.post("/orgs", json={"name": "one"})).status_code == 201
        async with house.engine.begin() as conn:
            await conn.execute(update(idempotent_write).values(answer=b"of another key" * 4))
        again = await client.post("/orgs", json={"name": "one"})
    assert again.status_code == 409 and again.json()["error"]["code"] == "answer_lost"
    assert await orgs_called(house, "one") == 1


async def test_a_key_is_forgotten_after_a_day(house: House) -> None:
    async with house.client("admin", **{"idempotency-key": "k"}) as client:
        assert (await client.post("/orgs", json={"name": "one"})).status_code == 201
        async with house.engine.begin() as conn:
            await conn.execute(update(idempotent_write).values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
        assert (await client.post("/orgs", json={"name": "two"})).status_code == 201
    async with house.engine.begin() as conn:
        await conn.execute(update(idempotent_write).values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    await forget_old_writes(house.engine)
    async with house.engine.connect() as conn:
        assert (await conn.execute(select(idempotent_write))).all() == []


async def changes(house: House, noun: str) -> list[tuple[str, dict[str, Any] | None, dict[str, Any] | None]]:
    query = select(audit_log).where(
        audit_log.c.noun == noun, audit_log.c.actor.like("administrator:%admin token fat-%")
    )
    async with house.engine.connect() as conn:
        return [(row.action, row.before, row.after) for row in await conn.execute(query.order_by(audit_log.c.id))]


async def test_each_noun_is_noted_before_and_after(house: House) -> None:
    scope = {"scope_kind": "org", "scope_id": str(house.org)}
    async with house.client("admin") as client:
        made: dict[str, str] = {}
        team = str(house.team)
        for noun, path, body, change in (
            ("org", "/orgs", {"name": "new"}, {"name": "newer"}),
            ("team", "/teams", {"org_id": str(house.org), "name": "new"}, {"name": "newer"}),
            (
                "user",
                "/users",
                {"org_id": str(house.org), "name": "new"},
                {"name": "newer", "team_id": team},
            ),
            ("key", "/keys", {"org_id": str(house.org), "name": "new"}, {"models": ["tiny"], "tags": {"app": "x"}}),
        ):
            made[noun] = (await client.post(path, json=body)).json()["id"]
            answer = await client.patch(f"{path}/{made[noun]}", json=change)
            assert answer.status_code == 200, answer.text
            (create, none, first), *changed = await changes(house, noun)
            (action, before, _), (_, _, after) = changed[0], changed[-1]
            assert (create, none, action) == ("create", None, "change")
            assert first == before and before is not None and after is not None
            for name, value in change.items():
                assert before[name] != value and after[name] == value
        await client.post(f"/keys/{made['key']}/rotate", json={"overlap_hours": 1})
        await client.post(f"/keys/{made['key']}/revoke")
        *_, rotated, revoked = await changes(house, "key")
        assert rotated[1]["prefix"] != rotated[2]["prefix"] and revoked[2]["revoked_at"]  # type: ignore[index]
        for amount in ("1", "2"):
            terms = scope | {"window": "month", "limit_amount": amount, "currency": "USD"}
            budget = (await client.put("/budgets", json=terms)).json()
            limit = (await client.put("/limits", json=scope | {"kind": "requests", "limit": int(amount)})).json()
        assert (await client.delete(f"/budgets/{budget['id']}")).status_code == 204
        assert (await client.delete(f"/limits/{limit['id']}")).status_code == 204
        assert [action for action, *_ in await changes(house, "budget")] == [
            *("create", "create", "change", "change"),
            *("remove", "remove"),
        ]
    async with house.client("owner") as client:
        listed = (await client.get("/audit", params={"noun": "key", "noun_id": made["key"]})).json()["data"]
        assert [entry["action"] for entry in listed] == ["change"] * 3 + ["create"]
        person = (await client.post("/administrators", json={"name": "Eve", "role": "admin"})).json()
        token = (await client.post("/tokens", json={"administrator_id": person["id"], "name": "t"})).json()
        assert (await client.get("/audit?noun=token")).json()["data"][0]["after"]["prefix"] == token["prefix"]
        whole = (await client.get("/audit?limit=1000")).text
        assert token["token"] not in whole and people.key_hash(token["token"]).hex() not in whole


async def test_alerts_are_set_up_tested_and_silenced(house: House) -> None:
    async with house.client("admin") as client:
        channel = {"kind": "webhook", "address": "env:HOOK", "secret": "env:HOOK_SECRET"}
        assert (await client.put("/alert-channels/ops", json=channel)).json()["name"] == "ops"
        leaked = await client.put("/alert-channels/ops", json=channel | {"address": "https://hook.test/token"})
        assert leaked.status_code == 400 and "hook.test" not in leaked.text
        rule = (await client.put("/alert-rules", json={"kind": "budget_share", "channels": ["ops"]})).json()
        assert rule["scope_kind"] == "all" and rule["parameters"]["shares"], rule
        changed = (await client.put("/alert-rules", json={"kind": "budget_share", "enabled": False})).json()
        assert changed["id"] == rule["id"] and not changed["enabled"]
        delivery = (await client.post("/alert-channels/ops/test")).json()
        assert (await client.get(f"/alert-deliveries/{delivery['id']}")).json()["status"] == "waiting"
        until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        silence = (await client.post("/silences", json={"until": until, "reason": "deploy"})).json()
        assert [each["id"] for each in (await client.get("/silences")).json()["data"]] == [silence["id"]]
        assert (await client.get("/alerts?open_only=true")).json() == {"data": [], "next_cursor": None}
        for path in (f"/silences/{silence['id']}", f"/alert-rules/{rule['id']}", "/alert-channels/ops"):
            assert (await client.delete(path)).status_code == 204
            assert (await client.delete(path)).status_code == 404
        for noun in ("alert rule", "alert channel", "silence"):
            actions = [each["action"] for each in (await client.get("/audit", params={"noun": noun})).json()["data"]]
            assert actions[0] == "remove" and len(actions) > 1, (noun, actions)


BAD = [
    ("POST", "/orgs", {"name": "acme"}, 409, "taken"),
    ("POST", "/orgs", {"name": " "}, 400, "visible character"),
    ("POST", "/orgs", {"name": "a\x00b"}, 400, "NUL"),
    ("POST", "/orgs", {"name": "a\r\nBcc: b"}, 400, "line break"),
    ("POST", "/orgs", {"name": "a\u202eb"}, 400, "control character"),
    ("POST", "/orgs", {"name": "x" * 201}, 400, "at most 200"),
    (
        "POST",
        "/invoices",
        {"org_id": str(uuid.uuid4()), "month": "2026-01", "issuer": "a\n" * 21},
        400,
        "at most 20 lines",
    ),
    ("POST", "/orgs", {"name": 1}, 400, "Expected `str`, got `int`"),
    ("POST", "/orgs", {"name": "x", "color": "red"}, 400, "color"),
    ("POST", "/orgs", {}, 400, "name"),
    ("POST", "/orgs", None, 400, ""),
    ("GET", "/nothing", None, 404, ""),
    ("PUT", "/orgs", {}, 405, ""),
    ("GET", "/orgs/not-a-uuid", None, 404, ""),
    ("GET", f"/orgs/{uuid.uuid4()}", None, 404, "There is no org"),
    ("GET", "/orgs?limit=0", None, 400, "limit"),
    ("GET", "/orgs?cursor=%F0", None, 400, "next_cursor"),
    ("GET", "/orgs?cursor=bm90IGFuIGlk", None, 400, "next_cursor"),
    ("POST", "/teams", {"org_id": str(uuid.uuid4()), "name": "x"}, 404, "There is no org"),
    ("PUT", "/limits", {"scope_kind": "model", "scope_id": "x", "kind": "requests", "limit": -1}, 400, "0 or more"),
    ("POST", "/administrators", {"name": "x", "role": "king"}, 400, "role"),
    ("POST", "/administrators", {"name": "x", "role": "admin", "email": "x"}, 400, "not an e-mail address"),
]


UNREAD = [
    ("GET", "/keys?orgid=", "orgid", "org_id"),
    ("GET", "/usage?start=2026-11-01T00:00:00Z&end=2026-11-02T00:00:00Z&by=model&user={id}", "user", "user_id"),
    ("GET", "/keys?org_id={id}&org_id={id}", "org_id", "once"),
    ("POST", "/orgs?dry_run=true", "dry_run", "none"),
    ("GET", "/me?limit=1", "limit", "none"),
]


async def test_a_query_parameter_is_read_or_refused(house: House) -> None:
    async with house.client("owner") as client:
        for method, path, name, words in UNREAD:
            answer = await client.request(method, path.format(id=house.org), json={"name": "unread"})
            assert answer.status_code == 400, (path, answer.text)
            error = answer.json()["error"]
            assert error["param"] == name and words in error["message"], error
        assert await orgs_called(house, "unread") == 0
        both = await client.get("/usage?start=2026-11-01T00:00:00Z&end=2026-11-02T00:00:00Z&by=model&by=user")
        assert both.status_code == 200, "what may be repeated still is"


async def test_bad_input_is_told_in_one_shape(house: House) -> None:
    async with house.client("owner") as client:
        for method, path, body, status, words in BAD:
            answer = await client.request(method, path, json=body)
            assert answer.status_code == status, (path, body, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert words in error["message"] and "Traceback" not in error["message"], error


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would see the rows of all that came before
)
@given(limit=st.integers(1, 7), before=st.integers(0, 9), during=st.lists(st.integers(0, 2), max_size=6))
async def test_pages_show_everything_once_while_rows_are_added(
    house: House, limit: int, before: int, during: list[int]
) -> None:
    run = uuid.uuid4().hex
    async with house.engine.begin() as conn:
        there = [await people.create_org(conn, f"{run}-{i}") for i in range(before)]
    seen: list[str] = []
    cursor: str | None = ""
    added = iter(during)
    async with house.client("owner") as client:
        while cursor is not None:
            params = {"limit": limit} | ({"cursor": cursor} if cursor else {})
            page = (await client.get("/orgs", params=params)).json()
            assert 0 < len(page["data"]) <= limit
            seen += [each["id"] for each in page["data"]]
            cursor = page["next_cursor"]
            async with house.engine.begin() as conn:
                for i in range(next(added, 0)):
                    await people.create_org(conn, f"{run}-later-{len(seen)}-{i}")
    assert len(seen) == len(set(seen)) and {str(each) for each in there} <= set(seen)


async def test_the_description_is_whole_and_names_no_host(house: House) -> None:
    async with house.client(None) as client:
        described = (await client.get("/openapi.json")).json()
    assert described["openapi"].startswith("3.") and described["servers"] == [{"url": "/admin/v1"}]
    schemas = described["components"]["schemas"]
    assert "://" not in str(schemas)
    operation = described["paths"]["/keys"]["post"]
    assert operation["security"] if "security" in operation else described["security"]
    for path, operations in described["paths"].items():
        for method, each in operations.items():
            names = {parameter["name"].lower() for parameter in each.get("parameters", [])}
            assert ("idempotency-key" in names) == (method != "get"), (method, path)
            refused = each["responses"]["400"]["content"]["application/json"]["schema"]
            assert refused == {"$ref": "#/components/schemas/ErrorBody"}, (method, path)
