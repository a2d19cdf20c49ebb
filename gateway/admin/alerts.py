"""`/alerts` and what makes and sends them: `/alert-rules`, `/alert-channels`, `/silences`."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from litestar import Response, delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts import channels, history, outbox, rules, silences
from billing.alerts.channels import Channel, ChannelKind
from billing.alerts.history import Alert, AlertDetail
from billing.alerts.outbox import Delivery
from billing.alerts.silences import Silence
from billing.people import MissingError
from gateway.admin.access import needs
from gateway.admin.moments import moment
from gateway.admin.paging import Listing, Page, at_moment, cut, cut_by_name, listing
from gateway.admin.writing import Admin, Writer
from gateway.scope_names import refuse_role


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    kind: str
    scope_kind: str
    scope_id: str
    parameters: dict[str, Any]
    channels: list[str] | None
    """null: every channel there is."""
    enabled: bool
    created_at: datetime


class RuleTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str
    scope_kind: str = "all"
    scope_id: str = ""
    """`*`: each of its kind."""
    parameters: dict[str, Any] = {}
    """Those that are not as usual."""
    channels: list[str] | None = None
    enabled: bool = True


class ChannelTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: ChannelKind
    address: str
    """Where gateways find it: env:NAME or file:/PATH, never the URL itself."""
    secret: str | None = None
    """Likewise, of the signing secret."""
    sender: str | None = None
    recipients: list[str] = []


class NewSilence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    until: datetime
    rule_id: UUID | None = None
    scope_kind: str | None = None
    scope_id: str | None = None
    reason: str = ""


@get("/alerts", opt=needs("read", everywhere=True))
async def list_alerts(
    admin: NamedDependency[Admin], page: NamedDependency[Page], open_only: FromQuery[bool] = False
) -> Listing[Alert]:
    """Alerts, newest first."""
    async with admin.read() as conn:
        found = await history.list_alerts(conn, open_only=open_only, after=page.after_moment, limit=page.limit + 1)
    return listing(found, page, lambda alert: at_moment(alert.opened_at, alert.id))


@get("/alerts/{alert_id:uuid}", opt=needs("read", everywhere=True))
async def get_alert(admin: NamedDependency[Admin], alert_id: FromPath[UUID]) -> AlertDetail:
    """One alert with what was told of it."""
    async with admin.read() as conn:
        found = await history.find_alert(conn, alert_id)
    if found is None:
        raise MissingError(f"there is no alert {alert_id}")
    return found


@get("/alert-rules", opt=needs("read", everywhere=True))
async def list_rules(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Rule]:
    """Rules, oldest first."""
    async with admin.read() as conn:
        return cut([_rule(each) for each in await rules.list_rules(conn)], page, lambda rule: rule.id)


@put("/alert-rules", opt=needs("manage", everywhere=True))
async def set_rule(writer: NamedDependency[Writer], data: JSONBody[RuleTerms]) -> Response[Rule]:
    """Make the scope's rule of this kind, or put these terms in place of those it has."""

    refuse_role(data.scope_kind, data.scope_id)

    async def work(conn: AsyncConnection) -> Rule:
        made = await rules.set_rule(
            conn,
            data.kind,
            data.scope_kind,
            data.scope_id,
            data.parameters,
            channels=data.channels,
            enabled=data.enabled,
        )
        return next(_rule(each) for each in await rules.list_rules(conn) if each.id == made)

    return await writer.write(work)


@delete("/alert-rules/{rule_id:uuid}", opt=needs("manage", everywhere=True), status_code=204)
async def remove_rule(writer: NamedDependency[Writer], rule_id: FromPath[UUID]) -> Response[None]:
    """Forget a rule and its silences; what it has opened resolves."""

    async def work(conn: AsyncConnection) -> None:
        if not await rules.remove_rule(conn, rule_id):
            raise MissingError(f"there is no rule {rule_id}")

    return await writer.write(work)


@get("/alert-channels", opt=needs("read", everywhere=True))
async def list_channels(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Channel]:
    """Channels, by name."""
    async with admin.read() as conn:
        return cut_by_name(await channels.list_channels(conn), page, lambda channel: channel.name)


@put("/alert-channels/{name:str}", opt=needs("manage", everywhere=True))
async def set_channel(
    writer: NamedDependency[Writer], name: FromPath[str], data: JSONBody[ChannelTerms]
) -> Response[Channel]:
    """Make a channel, or change the one of that name."""

    async def work(conn: AsyncConnection) -> Channel:
        await channels.set_channel(
            conn,
            name,
            data.kind,
            data.address,
            secret=data.secret,
            sender=data.sender,
            recipients=data.recipients,
        )
        return await _channel(conn, name)

    return await writer.write(work)


@delete("/alert-channels/{name:str}", opt=needs("manage", everywhere=True), status_code=204)
async def remove_channel(writer: NamedDependency[Writer], name: FromPath[str]) -> Response[None]:
    """Forget a channel with what still waits to be sent to it."""

    async def work(conn: AsyncConnection) -> None:
        if not await channels.remove_channel(conn, name):
            raise MissingError(f"there is no channel {name!r}")

    return await writer.write(work)


@post("/alert-channels/{name:str}/test", opt=needs("manage", everywhere=True), status_code=202)
async def send_test(writer: NamedDependency[Writer], name: FromPath[str]) -> Response[Delivery]:
    """Have a gateway send a test message; ask `/alert-deliveries/{id}` what became of it."""

    async def work(conn: AsyncConnection) -> Delivery:
        await _channel(conn, name)
        return await _delivery(conn, await outbox.send_test(conn, name))

    return await writer.write(work)


@get("/alert-deliveries/{delivery_id:uuid}", opt=needs("read", everywhere=True))
async def get_delivery(admin: NamedDependency[Admin], delivery_id: FromPath[UUID]) -> Delivery:
    """What became of a message."""
    async with admin.read() as conn:
        return await _delivery(conn, delivery_id)


@get("/silences", opt=needs("read", everywhere=True))
async def list_silences(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Silence]:
    """Silences, those that are over too, oldest first."""
    async with admin.read() as conn:
        return cut(await silences.list_silences(conn), page, lambda silence: silence.id)


@post("/silences", opt=needs("manage", everywhere=True))
async def create_silence(writer: NamedDependency[Writer], data: JSONBody[NewSilence]) -> Response[Silence]:
    """Tell nobody until then; without a rule or a scope it is about all of them."""
    moment(data.until)

    async def work(conn: AsyncConnection) -> Silence:
        made = await silences.silence(
            conn,
            data.until,
            rule_id=data.rule_id,
            scope_kind=data.scope_kind,
            scope_id=data.scope_id,
            reason=data.reason,
        )
        return next(each for each in await silences.list_silences(conn) if each.id == made)

    return await writer.write(work)


@delete("/silences/{silence_id:uuid}", opt=needs("manage", everywhere=True), status_code=204)
async def end_silence(writer: NamedDependency[Writer], silence_id: FromPath[UUID]) -> Response[None]:
    async def work(conn: AsyncConnection) -> None:
        if not await silences.end_silence(conn, silence_id):
            raise MissingError(f"there is no silence {silence_id}")

    return await writer.write(work)


ROUTES = [
    *(list_alerts, get_alert),
    *(list_rules, set_rule, remove_rule),
    *(list_channels, set_channel, remove_channel, send_test, get_delivery),
    *(list_silences, create_silence, end_silence),
]


def _rule(found: rules.Rule) -> Rule:
    return Rule(
        id=found.id,
        kind=found.kind,
        scope_kind=found.scope.kind,
        scope_id=found.scope.id,
        parameters=msgspec.structs.asdict(found.parameters),
        channels=None if found.channels is None else list(found.channels),
        enabled=found.enabled,
        created_at=found.created_at,
    )


async def _channel(conn: AsyncConnection, name: str) -> Channel:
    found = await channels.find_channel(conn, name)
    if found is None:
        raise MissingError(f"there is no channel {name!r}")
    return found


async def _delivery(conn: AsyncConnection, delivery_id: UUID) -> Delivery:
    found = await outbox.find_delivery(conn, delivery_id)
    if found is None:
        raise MissingError(f"there is no delivery {delivery_id}")
    return found
