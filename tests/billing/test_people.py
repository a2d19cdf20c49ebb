"""Organisations, teams, users and keys in a real PostgreSQL."""

import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import people
from billing.ids import new_id
from billing.restrictions import RestrictionError, Restrictions, networks


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
    query = text("SELECT * FROM api_key JOIN key_secret ON key_id = id")
    row = (await conn.execute(query)).mappings().one()
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


async def test_lists_show_prefixes_of_every_organisation(conn: AsyncConnection) -> None:
    acme, other = await people.create_org(conn, "acme"), await people.create_org(conn, "other")
    one, two = await people.create_key(conn, acme, "one"), await people.create_key(conn, other, "two")
    assert [(key.key_id, key.prefix) for key in await people.list_keys(conn)] == [(k.id, k.prefix) for k in (one, two)]


async def test_restrictions_are_kept_and_replaced(conn: AsyncConnection) -> None:
    org = await people.create_org(conn, "acme")
    narrow = Restrictions(
        models=frozenset({"auto", "tiny"}),
        routes=frozenset({"messages"}),
        networks=networks(["10.0.0.0/8", "2001:db8::1"]),
        tags={"scenario": "chat"},
        may_attribute=True,
    )
    key = await people.create_key(conn, org, "k", restrictions=narrow)
    other = await people.create_key(conn, org, "k")

    async def restrictions(secret: str) -> Restrictions:
        found = await people.find_key(conn, secret)
        assert found is not None
        return Restrictions(**{name: getattr(found, name) for name in Restrictions.__struct_fields__})

    assert await restrictions(key.secret) == narrow
    wider = Restrictions(routes=frozenset({"files", "batches"}))
    assert await people.restrict_key(conn, key.id, wider)
    assert await restrictions(key.secret) == wider
    assert await restrictions(other.secret) == people.UNRESTRICTED
    with pytest.raises(RestrictionError, match="no route 'x'"):
        await people.restrict_key(conn, key.id, Restrictions(routes=frozenset({"x"})))
    assert await restrictions(key.secret) == wider
    assert not await people.restrict_key(conn, new_id(), wider)


async def test_secrets_are_rotated_one_after_the_other(conn: AsyncConnection) -> None:
    org = await people.create_org(conn, "acme")
    first = await people.create_key(conn, org, "k")
    second = await people.rotate_key(conn, first.id, timedelta(hours=1))
    third = await people.rotate_key(conn, first.id, timedelta(hours=24))
    assert second is not None and third is not None
    found = await people.find_keys(conn, [people.key_hash(key.secret) for key in (first, second, third)])
    ends = [found[people.key_hash(key.secret)].replaced_at for key in (first, second, third)]
    assert ends[0] is not None and ends[1] is not None and ends[2] is None
    assert ends[1] - ends[0] == timedelta(hours=23), "a later rotation lengthens nothing"
    assert {principal.key_id for principal in found.values()} == {first.id}
    info = await people.get_key(conn, third.prefix)
    assert (info.key_id, info.replaces_until) == (first.id, ends[1])
    assert await people.rotate_key(conn, first.id, timedelta(0)) is not None
    old = await people.find_key(conn, third.secret)
    assert old is not None and old.ended() == "replaced"
    assert await people.rotate_key(conn, new_id(), timedelta(0)) is None
    await people.revoke_key(conn, first.id)
    with pytest.raises(people.PeopleError, match="revoked; make a new one"):
        await people.rotate_key(conn, first.id, timedelta(0))
    assert (await people.get_key(conn, str(first.id))).prefix != third.prefix


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
