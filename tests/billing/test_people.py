"""Organisations, teams, users and keys in a real PostgreSQL."""

import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import people
from billing.ids import new_id


async def test_a_key_speaks_for_its_user_and_the_users_team(conn: AsyncConnection) -> None:
    org = await people.create_org(conn, "acme")
    team = await people.create_team(conn, org, "search")
    user = await people.create_user(conn, org, "ada", team)
    expires = datetime.now(UTC) + timedelta(days=1)
    key = await people.create_key(conn, org, "laptop", user_id=user, expires_at=expires)
    assert await people.find_key(conn, key.secret) == people.Principal(
        key_id=key.id, org_id=org, team_id=team, user_id=user, name="laptop", expires_at=expires, revoked_at=None
    )
    assert await people.find_org(conn, "acme") == org
    assert await people.find_org(conn, "other") is None
    assert await people.find_user(conn, org, "ada") == user


async def test_the_keys_own_team_wins_over_its_users(conn: AsyncConnection) -> None:
    org = await people.create_org(conn, "acme")
    user = await people.create_user(conn, org, "ada", await people.create_team(conn, org, "search"))
    ads = await people.create_team(conn, org, "ads")
    key = await people.create_key(conn, org, "ads key", team_id=ads, user_id=user)
    found = await people.find_key(conn, key.secret)
    assert found is not None
    assert found.team_id == ads


async def test_only_the_hash_and_eight_characters_are_stored(conn: AsyncConnection) -> None:
    org = await people.create_org(conn, "acme")
    key = await people.create_key(conn, org, "laptop")
    assert key.secret.startswith("fk-")
    assert len(key.secret) == len("fk-") + 43  # 32 bytes in unpadded base64
    assert key.prefix == key.secret[:8]
    row = (await conn.execute(text("SELECT * FROM api_key"))).mappings().one()
    assert row["hash"] == hashlib.sha256(key.secret.encode()).digest()
    assert key.secret not in repr(dict(row))
    assert key.secret[8:] not in repr(dict(row))
    assert key.secret[8:] not in f"{key!r} {key}"


@pytest.mark.parametrize("secret", ["", "fk-", "fk-" + "A" * 43, "ключ\x00", "\ud800", "x" * 100_000])
async def test_a_wrong_key_is_nobodys(conn: AsyncConnection, secret: str) -> None:
    await people.create_key(conn, await people.create_org(conn, "acme"), "laptop")
    assert await people.find_key(conn, secret) is None


async def test_a_revoked_key_is_found_with_the_time_of_its_first_revocation(conn: AsyncConnection) -> None:
    org = await people.create_org(conn, "acme")
    key = await people.create_key(conn, org, "laptop")
    assert await people.revoke_key(conn, key.id)
    first = await people.find_key(conn, key.secret)
    assert await people.revoke_key(conn, key.id)
    assert await people.find_key(conn, key.secret) == first
    assert first is not None
    assert first.revoked_at is not None
    assert not await people.revoke_key(conn, new_id())


async def test_lists_show_prefixes_by_organisation(conn: AsyncConnection) -> None:
    acme, other = await people.create_org(conn, "acme"), await people.create_org(conn, "other")
    one, two = await people.create_key(conn, acme, "one"), await people.create_key(conn, other, "two")
    assert [(key.key_id, key.prefix) for key in await people.list_keys(conn, acme)] == [(one.id, one.prefix)]
    assert [key.key_id for key in await people.list_keys(conn)] == [one.id, two.id]


async def test_bad_names_and_strangers_are_refused_and_the_transaction_goes_on(conn: AsyncConnection) -> None:
    acme, other = await people.create_org(conn, "acme"), await people.create_org(conn, "other")
    user = await people.create_user(conn, other, "eve")
    with pytest.raises(people.PeopleError, match="org name 'acme' is taken"):
        await people.create_org(conn, "acme")
    with pytest.raises(people.PeopleError, match="user name 'eve' is taken"):
        await people.create_user(conn, other, "eve")
    for name in (" ", "", "a\x00b"):
        with pytest.raises(people.PeopleError, match="a name needs"):
            await people.create_team(conn, acme, name)
    with pytest.raises(people.PeopleError, match=f"no user {user} in organisation {acme}"):
        await people.create_key(conn, acme, "stolen", user_id=user)
    with pytest.raises(people.PeopleError, match="there is no org"):
        await people.create_user(conn, new_id(), "nobody")
    assert await people.list_keys(conn) == []
