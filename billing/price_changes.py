"""What an operator enters into the price book: what it would change, then the change itself, all of it or nothing."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import prices
from billing.ids import new_id
from billing.prices import KEY, RATES, Price, PriceBook, PriceTerms

Kind = Literal["new", "changed", "ended", "same"]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A version to be entered. Terms without any price end the one before."""

    terms: PriceTerms
    effective_at: datetime | None = None
    """None: from now on. In the past it is a correction: what was charged since is as it was, until it is re-rated."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    """`same`: it is in force already, and entering it would change nothing."""
    terms: PriceTerms
    effective_at: datetime | None
    """None: from now on."""
    until: datetime | None
    """When another version of it, known already, takes its place."""
    before: Price | None
    """What is in force at that moment without it."""

    def differences(self) -> dict[str, tuple[object, object]]:
        """(before, after) of each field that changes."""
        shared = KEY if self.before is not None else (*KEY, "currency")
        names = [name for name in PriceTerms.__struct_fields__ if name not in shared]
        pairs = {name: (getattr(self.before, name, None), getattr(self.terms, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


async def changes(conn: AsyncConnection, entries: Sequence[Entry]) -> list[Change]:
    """What `enter` would do, in the order of time. Raises ValueError as it does."""
    return _changes(await prices.load_all(conn), await prices.billing_currency(conn), entries)


async def enter(conn: AsyncConnection, entries: Sequence[Entry]) -> list[Change]:
    """Enter those that change something; running gateways use them from their moment on.

    Raises ValueError, and enters nothing, where one is in another currency than the book, two are of the same price and
    moment, or a moment has no time zone.
    """
    await prices.lock(conn)
    found = await changes(conn, entries)
    for change in found:
        if change.kind != "same":
            await prices.insert_version(conn, change.terms, change.effective_at, "operator")
    return found


async def amended(
    conn: AsyncConnection, which: PriceTerms, amounts: Mapping[str, Decimal], effective_at: datetime | None
) -> Entry:
    """`which` with other amounts; what is not given stays as it is at that moment, or as `which`, a version, has it.

    No amounts end it. Cache writes cost as fresh input and reasoning as other output, at first and for as long as they
    do, unless given. A factor and parts take each other's place. Raises ValueError for what does not go together.
    """
    if isinstance(which, Price):
        before: PriceTerms | None = which
        effective_at = which.effective_at
    else:
        moment = effective_at or datetime.now(UTC)
        before = PriceBook(await prices.load_all(conn), moment).current(which)
    kept = {name: getattr(before, name, None) for name in (*RATES, "device_hour")}
    if "factor" in amounts or not amounts:
        kept = dict.fromkeys(kept)
    filled: dict[str, Any] = {**kept, **amounts}
    for name, default in (("input_cache_write", "input_fresh"), ("output_reasoning", "output_text")):
        if name not in amounts and kept[name] == kept[default]:
            filled[name] = filled[default]
    names: dict[str, Any] = {name: getattr(which, name) for name in (*KEY, "currency")}
    return Entry(terms=PriceTerms(**names, **filled), effective_at=effective_at)


async def corrected(conn: AsyncConnection, version_id: UUID) -> Price:
    """The version that a correction takes the place of: enter it with the same key and moment. Raises ValueError."""
    found = next((price for price in await prices.load_all(conn) if price.id == version_id), None)
    if found is None:
        raise ValueError(f"there is no price version {version_id}; `farthing prices list --all` shows them")
    return found


def _changes(known: Sequence[Price], currency: str | None, entries: Sequence[Entry]) -> list[Change]:
    now = datetime.now(UTC)
    seen = set()
    for entry in entries:
        terms, moment = entry.terms, entry.effective_at
        if currency is not None and terms.currency != currency and terms.factor is None:
            raise ValueError(f"{name_of(terms)} is in {terms.currency}; this book is in {currency}")
        if moment is not None and moment.tzinfo is None:
            raise ValueError(f"{name_of(terms)}: the moment needs a time zone, like 2026-12-01T00:00:00Z")
        key = (*(getattr(terms, name) for name in KEY), moment)
        if key in seen:
            raise ValueError(f"{name_of(terms)} is there twice for the same moment")
        seen.add(key)
    versions, found = list(known), []
    for entry in sorted(entries, key=lambda entry: entry.effective_at or now):
        change = _change(versions, entry, now)
        found.append(change)
        if change.kind != "same":
            moment = entry.effective_at or now
            versions.append(Price(**msgspec.structs.asdict(entry.terms), id=new_id(), effective_at=moment))
    return found


def _change(versions: Sequence[Price], entry: Entry, now: datetime) -> Change:
    moment = entry.effective_at or now
    before = PriceBook(versions, moment).current(entry.terms)
    if before is None:
        kind: Kind = "same" if entry.terms.unpriced else "new"
    elif prices.terms_of(before) == entry.terms:
        kind = "same"
    else:
        kind = "ended" if entry.terms.unpriced else "changed"
    of_it = [v for v in versions if all(getattr(v, name) == getattr(entry.terms, name) for name in KEY)]
    until = min((version.effective_at for version in of_it if version.effective_at > moment), default=None)
    return Change(kind=kind, terms=entry.terms, effective_at=entry.effective_at, until=until, before=before)


def name_of(terms: PriceTerms) -> str:
    """A price as a person calls it: `sale of small, batch, for org 0193…`."""
    words = f"{terms.book} of {terms.model or ('every model' if terms.book == 'sale' else 'the device')}"
    words += f" on {terms.upstream}" if terms.upstream else ""
    words += f", {terms.tier}" if terms.tier not in ("", "standard") else ""
    return words + (f", for {terms.scope_kind} {terms.scope_id}" if terms.scope_kind else "")
