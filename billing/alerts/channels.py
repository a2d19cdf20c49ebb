"""Channels: where alerts are sent. The database keeps where a URL and a secret are to be read, never what they are."""

import os
import re
from collections.abc import Sequence
from datetime import datetime
from email.errors import MessageError
from email.headerregistry import Address
from pathlib import Path
from typing import Literal, get_args

import msgspec
from sqlalchemy import RowMapping, delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.tables import alert_channel, alert_rule

ChannelKind = Literal["webhook", "slack", "feishu", "dingtalk", "wecom", "email"]
SIGNED = ("webhook", "feishu", "dingtalk")
"""Kinds that sign with a secret; the address of the others is their secret."""
LARGEST_FILE = 8192
"""In bytes, of one that holds an address or a secret."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:/.+")
_MAILBOX = re.compile(r"[^\s@<>,\"]+@[^\s@<>,\"]+")


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: ChannelKind
    address: str
    """`env:NAME` or `file:/PATH`: where every gateway finds the URL."""
    secret: str | None
    """Likewise, of the signing secret."""
    sender: str | None
    """Of e-mail, as are the recipients."""
    recipients: tuple[str, ...] | None
    created_at: datetime


async def set_channel(
    conn: AsyncConnection,
    name: str,
    kind: str,
    address: str,
    *,
    secret: str | None = None,
    sender: str | None = None,
    recipients: Sequence[str] = (),
) -> None:
    """Make a channel, or change the one of that name. `address` and `secret` are references, not the things themselves.

    The address of e-mail is smtps://USER:PASSWORD@HOST:465, smtp://… (with STARTTLS) or smtp+plain://… (without).
    Raises ValueError on an unknown kind, a bad name, what is no reference, and parts that do not go together.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a channel's name; use up to 63 letters, digits, dots, - and _")
    if kind not in get_args(ChannelKind):
        raise ValueError(f"{kind!r} is not a kind of channel; use one of {', '.join(get_args(ChannelKind))}")
    for what, reference in (("address", address), ("secret", secret)):
        if reference is not None and not _REFERENCE.fullmatch(reference):
            raise ValueError(
                f"the {what} must say where it is read: env:NAME for an environment variable of the gateways, or "
                "file:/PATH; it is not kept in the database itself"
            )
    if secret is not None and kind not in SIGNED:
        raise ValueError(f"a channel of kind {kind} is not signed; only {', '.join(SIGNED)} take a secret")
    if (kind == "email") != bool(recipients) or (kind == "email") != (sender is not None):
        raise ValueError("e-mail needs a sender and at least one recipient, the other kinds take neither")
    for mailbox in (*recipients, *([] if sender is None else [sender])):
        _refuse_bad_mailbox(mailbox)
    terms = {
        "kind": kind,
        "address": address,
        "secret": secret,
        "sender": sender,
        "recipients": list(recipients) or None,
    }
    row = insert(alert_channel).values(name=name, **terms)
    await conn.execute(row.on_conflict_do_update(index_elements=["name"], set_=terms))


def _refuse_bad_mailbox(mailbox: str) -> None:
    """Raises ValueError for what no mail's header can have."""
    try:
        fits = _MAILBOX.fullmatch(mailbox) is not None and Address(addr_spec=mailbox).addr_spec == mailbox
    except (ValueError, MessageError):
        fits = False
    if not fits:
        raise ValueError(f"{mailbox!r} is not an e-mail address")


async def list_channels(conn: AsyncConnection) -> list[Channel]:
    """All, by name."""
    rows = await conn.execute(select(alert_channel).order_by(alert_channel.c.name))
    return [channel_of(row) for row in rows.mappings()]


async def find_channel(conn: AsyncConnection, name: str) -> Channel | None:
    row = (await conn.execute(select(alert_channel).where(alert_channel.c.name == name))).mappings().one_or_none()
    return None if row is None else channel_of(row)


async def remove_channel(conn: AsyncConnection, name: str) -> bool:
    """Forget a channel with what still waits to be sent to it; False when there is none.

    Raises ValueError while a rule names it.
    """
    naming = select(alert_rule.c.id).where(alert_rule.c.channels.any_() == name).limit(1)
    rule = (await conn.execute(naming)).scalar_one_or_none()
    if rule is not None:
        raise ValueError(f"the rule {rule} sends to {name!r}; change or remove that rule first")
    gone = delete(alert_channel).where(alert_channel.c.name == name).returning(alert_channel.c.name)
    return (await conn.execute(gone)).scalar_one_or_none() is not None


def resolve(reference: str) -> str:
    """What a reference names, in this process. Blocking. Raises ValueError with a sentence that does not show it."""
    source, _, name = reference.partition(":")
    if source == "env":
        value = os.environ.get(name, "").strip()
        if not value:
            raise ValueError(f"the environment variable {name} is not set in this gateway")
        return value
    try:
        content = _content(Path(name))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the file {name} cannot be read by this gateway: {getattr(error, 'strerror', None) or error}"
        ) from None
    if len(content) > LARGEST_FILE:
        raise ValueError(f"the file {name} is larger than {LARGEST_FILE} bytes")
    try:
        value = content.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise ValueError(f"the file {name} is not UTF-8 text") from None
    if not value:
        raise ValueError(f"the file {name} is empty")
    return value


def _content(path: Path) -> bytes:
    """Raises OSError, and ValueError for what is no ordinary file: a pipe or a terminal could block for ever."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no ordinary file")
    with path.open("rb") as file:
        return file.read(LARGEST_FILE + 1)


def channel_of(row: RowMapping) -> Channel:
    """Of a row of the table."""
    recipients = row["recipients"]
    return Channel(**{**row, "recipients": None if recipients is None else tuple(recipients)})
