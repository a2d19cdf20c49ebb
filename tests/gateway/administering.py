"""The admin API by itself on a real database, a small organisation, and somebody with each role."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import administrators, people
from billing.roles import Role
from dashboards.web import COOKIE, Sessions, Throttle
from gateway.admin.access import Gate
from gateway.admin.app import create_admin
from gateway.live import Live
from gateway.settings import Settings
from tests.gateway.running import configuration

ADMIN_KEY = "fa-the-right-key"
KEY_HASH = hashlib.sha256(ADMIN_KEY.encode())
ORIGIN = "http://farthing.test"


@dataclass
class House:
    """Organisation `org` with everything in it, `other_org` beside it, and a token of each kind of administrator."""

    engine: AsyncEngine
    app: Litestar
    sessions: Sessions
    org: UUID
    other_org: UUID
    team: UUID
    user: UUID
    other_user: UUID
    key: UUID
    other_key: UUID
    tokens: dict[str, str]
    ids: dict[str, UUID]
    """The administrators behind the tokens."""

    def client(self, who: str | None = "owner", **headers: str) -> httpx.AsyncClient:
        """Somebody who calls the API: by the name of a token, or nobody."""
        if who is not None:
            headers["authorization"] = f"Bearer {self.tokens[who]}"
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url=ORIGIN, headers=headers)


async def a_house(engine: AsyncEngine, database_url: str, folder: Path) -> House:
    tokens, ids = {"key": ADMIN_KEY}, {}
    async with engine.begin() as conn:
        org, other_org = await people.create_org(conn, "acme"), await people.create_org(conn, "umbrella")
        team = await people.create_team(conn, org, "search")
        user = await people.create_user(conn, org, "ada", team)
        other_user = await people.create_user(conn, org, "bob", team)
        key = await people.create_key(conn, org, "laptop", user_id=user)
        other_key = await people.create_key(conn, other_org, "server")
        kinds: dict[str, tuple[Role, dict[str, Any]]] = {
            "owner": ("owner", {}),
            "admin": ("admin", {}),
            "org admin": ("admin", {"org_id": org}),
            "reader": ("billing_reader", {}),
            "org reader": ("billing_reader", {"org_id": org}),
            "member": ("member", {"user_id": user}),
        }
        for name, (role, reach) in kinds.items():
            ids[name] = await administrators.create_administrator(conn, name, role, **reach)
            tokens[name] = (await administrators.create_token(conn, ids[name], "test")).secret
    settings = configuration("http://127.0.0.1:1", database_url, folder) | {"admin_key_hash": KEY_HASH.hexdigest()}
    sessions = Sessions(KEY_HASH.digest())
    gate = Gate(engine, Live(Settings(**settings)), COOKIE, sessions.read, Throttle(allowed=5, seconds=60))
    app = create_admin(engine, KEY_HASH.digest(), gate)
    return House(engine, app, sessions, org, other_org, team, user, other_user, key.id, other_key.id, tokens, ids)
