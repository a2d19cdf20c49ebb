"""Administrators: who may look after people, money and keys, from where, and with which tokens.

An administrator is somebody with a role. They come in with a token (the API), or through an OIDC provider that knows
them by e-mail address. What was revoked stays, so that the audit log's names keep a meaning.
"""

from datetime import UTC, datetime
from typing import Any, get_args
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, RowMapping, func, or_, select, true, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ids import new_id
from billing.people import MissingError, NewSecret, TakenError, checked_name, key_hash, new_secret
from billing.roles import OWNER, Caller, Role, lower
from billing.tables import admin_token, administrator, app_user, org

TOKEN_PREFIX = "fat-"  # noqa: S105 (what every token begins with)
ADMIN_KEY = "admin-key"
"""Stands for whoever has the gateway's own admin key, where an administrator's id would stand."""
_SHOWN_CHARACTERS = 9


class Administrator(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    email: str | None
    role: Role
    org_id: UUID | None
    org: str | None
    """The only organisation they see; None: all."""
    user_id: UUID | None
    """Who a member is."""
    signs_in: bool
    """Whether an OIDC provider's subject is bound to them, which the first sign-in does."""
    created_at: datetime
    revoked_at: datetime | None


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A token as an operator sees it."""

    id: UUID
    administrator_id: UUID
    administrator: str
    name: str
    prefix: str
    role: Role
    """The most it may do; it never may more than its administrator."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


async def create_administrator(
    conn: AsyncConnection,
    name: str,
    role: Role,
    *,
    email: str | None = None,
    org_id: UUID | None = None,
    user_id: UUID | None = None,
) -> UUID:
    """Somebody who may do what `role` may: everywhere, or in one organisation.

    A member is a user of an organisation, and sees that user's keys and usage. Raises ValueError on an unknown role,
    on an e-mail address that another administrator has, on an owner of one organisation, on a member without a user
    and on a user who is no member.
    """
    if role not in get_args(Role):
        raise ValueError(f"{role!r} is not a role; use one of {', '.join(get_args(Role))}")
    if (role == "member") != (user_id is not None):
        raise ValueError(
            "a member is one user of one organisation: say which (--org and --user); no other role takes a user"
        )
    if user_id is not None:
        query = select(app_user.c.org_id).where(app_user.c.id == user_id)
        found = (await conn.execute(query)).scalar_one_or_none()
        if found is None or org_id not in (None, found):
            raise MissingError(f"there is no user {user_id}" + ("" if org_id is None else f" in organisation {org_id}"))
        org_id = found
    if role == "owner" and org_id is not None:
        raise ValueError("an owner looks after all organisations; make an admin of this one instead")
    if org_id is not None and (await conn.execute(select(org.c.id).where(org.c.id == org_id))).first() is None:
        raise MissingError(f"there is no org {org_id}")
    row = insert(administrator).values(
        id=new_id(),
        name=checked_name(name),
        email=None if email is None else checked_email(email),
        role=role,
        org_id=org_id,
        user_id=user_id,
    )
    made = (await conn.execute(row.on_conflict_do_nothing().returning(administrator.c.id))).scalar_one_or_none()
    if made is None:
        raise TakenError(f"there is an administrator with the address {email!r}; revoke that one first")
    return UUID(str(made))


def checked_email(email: str) -> str:
    """In lower case. Raises ValueError for what is no address."""
    name, _, domain = email.rpartition("@")
    if not name or "." not in domain.strip(".") or not email.isprintable() or " " in email or len(email) > 320:
        raise ValueError(f"{email[:100]!r} is not an e-mail address")
    return lower_address(email)


def lower_address(email: str) -> str:
    """Its ASCII letters in lower case. Unicode has others whose lower case is ASCII: those are other mailboxes."""
    return email.encode().lower().decode()


async def change_role(conn: AsyncConnection, administrator_id: UUID, role: Role) -> None:
    """Let an administrator do what `role` may, from now on. Raises ValueError when they cannot have that role.

    A role that a provider's claim gave becomes theirs without it.
    """
    found = await get_administrator(conn, str(administrator_id))
    if found.revoked_at is not None:
        raise ValueError("this administrator is revoked; create a new one")
    if "member" in (role, found.role) or role not in get_args(Role):
        raise ValueError("a role is changed to owner, admin or billing_reader, and a member's not at all")
    if role == "owner" and found.org_id is not None:
        raise ValueError("an owner looks after all organisations, and this administrator after one")
    await _set(conn, administrator_id, role=role, role_claimed=False)


async def revoke_administrator(conn: AsyncConnection, administrator_id: UUID) -> bool:
    """End an administrator's sessions and tokens, now; False when there is none. A second call keeps the first time."""
    ended = update(administrator).where(administrator.c.id == administrator_id)
    ended = ended.values(revoked_at=func.coalesce(administrator.c.revoked_at, func.now()))
    return (await conn.execute(ended)).rowcount == 1


_LISTED = (
    select(
        *(administrator.c[name] for name in ("id", "name", "email", "role", "org_id", "user_id")),
        *(administrator.c[name] for name in ("created_at", "revoked_at")),
        org.c.name.label("org"),
        administrator.c.subject.is_not(None).label("signs_in"),
    )
    .select_from(administrator.outerjoin(org, org.c.id == administrator.c.org_id))
    .order_by(administrator.c.id)
)


async def list_administrators(
    conn: AsyncConnection, *, after: UUID | None = None, limit: int | None = None
) -> list[Administrator]:
    """Administrators, the revoked too, oldest first; `after` and `limit` cut out a page."""
    query = _LISTED if after is None else _LISTED.where(administrator.c.id > after)
    return [Administrator(**row) for row in (await conn.execute(query.limit(limit))).mappings()]


async def get_administrator(conn: AsyncConnection, which: str) -> Administrator:
    """The administrator of that id or e-mail address (who is not revoked). Raises MissingError when there is none."""
    try:
        wanted: ColumnElement[bool] = administrator.c.id == UUID(which)
    except ValueError:
        wanted = (administrator.c.email == lower_address(which)) & administrator.c.revoked_at.is_(None)
    row = (await conn.execute(_LISTED.where(wanted))).mappings().one_or_none()
    if row is None:
        raise MissingError(f"there is no administrator {which!r}; `farthing admins list` shows all")
    return Administrator(**row)


async def create_token(
    conn: AsyncConnection,
    administrator_id: UUID,
    name: str,
    *,
    role: Role | None = None,
    expires_at: datetime | None = None,
) -> NewSecret:
    """A token for the admin API, shown this once. `role`: the most that it may do, by default all its owner may.

    Raises ValueError when the administrator is revoked, when the role is more than theirs or `member` for somebody
    who is no member, and when the time is past.
    """
    owner = await get_administrator(conn, str(administrator_id))
    if owner.revoked_at is not None:
        raise ValueError("this administrator is revoked; a token could do nothing")
    role = role or owner.role
    if role not in get_args(Role) or lower(role, owner.role) != role or (role == "member") != (owner.role == "member"):
        raise ValueError(f"a token of somebody with the role {owner.role} cannot have the role {role}")
    if expires_at is not None and expires_at <= datetime.now(UTC):
        raise ValueError("the token would have expired already; give a time to come")
    token = new_secret(new_id(), TOKEN_PREFIX, _SHOWN_CHARACTERS)
    await conn.execute(
        insert(admin_token).values(
            id=token.id,
            administrator_id=administrator_id,
            name=checked_name(name),
            prefix=token.prefix,
            hash=key_hash(token.secret),
            role=role,
            expires_at=expires_at,
        )
    )
    return token


async def revoke_token(conn: AsyncConnection, token_id: UUID) -> bool:
    """Refuse a token from now on; False when there is none. A second call keeps the first time."""
    ended = update(admin_token).where(admin_token.c.id == token_id)
    ended = ended.values(revoked_at=func.coalesce(admin_token.c.revoked_at, func.now()))
    return (await conn.execute(ended)).rowcount == 1


_TOKENS = (
    select(
        *(admin_token.c[name] for name in Token.__struct_fields__ if name != "administrator"),
        administrator.c.name.label("administrator"),
    )
    .join(administrator, administrator.c.id == admin_token.c.administrator_id)
    .order_by(admin_token.c.id)
)


async def list_tokens(
    conn: AsyncConnection,
    *,
    administrator_id: UUID | None = None,
    after: UUID | None = None,
    limit: int | None = None,
) -> list[Token]:
    """Tokens, the ended too, oldest first; of one administrator where given."""
    query = (
        _TOKENS.where(true() if administrator_id is None else admin_token.c.administrator_id == administrator_id)
        .where(true() if after is None else admin_token.c.id > after)
        .limit(limit)
    )
    return [Token(**row) for row in (await conn.execute(query)).mappings()]


async def get_token(conn: AsyncConnection, token_id: UUID) -> Token:
    """Raises MissingError when there is none."""
    row = (await conn.execute(_TOKENS.where(admin_token.c.id == token_id))).mappings().one_or_none()
    if row is None:
        raise MissingError(f"there is no token {token_id}")
    return Token(**row)


_CALLER = select(*(administrator.c[name] for name in ("id", "name", "email", "role", "org_id", "user_id"))).where(
    administrator.c.revoked_at.is_(None)
)


async def find_caller(conn: AsyncConnection, person: str) -> Caller | None:
    """Who a session's `person` is: ADMIN_KEY, or an administrator's id. None when they are revoked."""
    if person == ADMIN_KEY:
        return OWNER
    try:
        found = (await conn.execute(_CALLER.where(administrator.c.id == UUID(person)))).mappings().one_or_none()
    except ValueError:
        return None
    return None if found is None else _caller(found)


async def find_token(conn: AsyncConnection, secret: str) -> Caller | None:
    """Whom a token speaks for; None when it never was one, or it or its administrator have ended."""
    query = (
        _CALLER.add_columns(admin_token.c.role.label("token_role"), admin_token.c.prefix)
        .join(admin_token, admin_token.c.administrator_id == administrator.c.id)
        .where(
            admin_token.c.hash == key_hash(secret),
            admin_token.c.revoked_at.is_(None),
            or_(admin_token.c.expires_at.is_(None), admin_token.c.expires_at > func.now()),
        )
    )
    found = (await conn.execute(query)).mappings().one_or_none()
    if found is None:
        return None
    return _caller(found, role=lower(found["role"], found["token_role"]), through=f" token {found['prefix']}")


def _caller(row: RowMapping, role: Role | None = None, through: str = "") -> Caller:
    return Caller(
        actor=f"administrator:{row['id']} {row['email'] or row['name']}{through}",
        name=row["email"] or row["name"],
        role=role or row["role"],
        org_id=row["org_id"],
        user_id=row["user_id"],
        administrator_id=row["id"],
    )


class SignInRefusedError(ValueError):
    """The provider knows this person, and Farthing does not let them in; the message says what to ask for."""


async def sign_in(
    conn: AsyncConnection, issuer: str, subject: str, *, email: str | None, name: str, claimed: Role | None
) -> UUID:
    """The administrator that an OIDC provider's `subject` is. `email`: verified by the provider, else None.

    Who is not bound yet is found by the address and bound. Where the provider's claim gives a role (`claimed`), it is
    theirs from now on, and who is not known at all is made. Who has a role by a claim alone is let in no longer without
    it. Raises SignInRefusedError, also for who was revoked here.
    """
    bound = (administrator.c.issuer == issuer) & (administrator.c.subject == subject)
    rows = (await conn.execute(select(administrator).where(bound).with_for_update())).mappings().all()
    found = next((row for row in rows if row["revoked_at"] is None), None)
    if found is None and email is not None:
        by_email = select(administrator).where(
            administrator.c.email == lower_address(email),
            administrator.c.subject.is_(None),
            administrator.c.revoked_at.is_(None),
        )
        found = (await conn.execute(by_email.with_for_update())).mappings().one_or_none()
        if found is not None:
            await _set(conn, found["id"], issuer=issuer, subject=subject)
    if found is not None:
        if claimed is None and found["role_claimed"]:
            raise SignInRefusedError("The provider gives you no role here any more. Ask an owner to give you one.")
        if claimed is not None and found["role"] not in (claimed, "member") and found["org_id"] is None:
            await _set(conn, found["id"], role=claimed, role_claimed=True)
        return UUID(str(found["id"]))
    if rows or await _was_revoked(conn, email):
        raise SignInRefusedError("You were an administrator here and are no longer. Ask an owner.")
    if claimed is None:
        raise SignInRefusedError("You are not an administrator here. Ask an owner to add your e-mail address.")
    made = await create_administrator(conn, name, claimed, email=email)
    await _set(conn, made, issuer=issuer, subject=subject, role_claimed=True)
    return made


async def _was_revoked(conn: AsyncConnection, email: str | None) -> bool:
    """Whether somebody with this address was revoked, be it before they had ever signed in."""
    if email is None:
        return False
    query = select(administrator.c.id).where(
        administrator.c.email == lower_address(email), administrator.c.revoked_at.is_not(None)
    )
    return (await conn.execute(query.limit(1))).first() is not None


async def _set(conn: AsyncConnection, administrator_id: UUID, **values: Any) -> None:
    await conn.execute(update(administrator).where(administrator.c.id == administrator_id).values(**values))
