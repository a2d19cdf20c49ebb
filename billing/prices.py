"""The price book: immutable, versioned rows. A changed price is a new version; history is never edited.

Of the versions of one price the one with the latest `effective_at` holds, of two with the same the later entered: so a
wrong one is corrected by another that begins at the same moment (see `billing.adjustments`).

An org, a team or a key can have a price of its own, or a factor on the list price (1.2: a markup, 0.8: a discount). One
of them applies, the most specific: the key's before the team's before the org's; of these the one for the model before
the one for every model; of these the one for the tier before the one for every tier. Factors are not multiplied.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import cached_property
from typing import Literal, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import Row, func, insert, or_, select, text
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ids import new_id
from billing.notices import notify
from billing.records import TOKEN_CLASSES, refuse_bad_money
from billing.tables import price_version

Book = Literal["sale", "cost"]
Tier = Literal["standard", "batch", "priority"]
"""`batch`: the lines of a batch. `priority`: requests that ask for it, of models that have such a price."""
PriceScope = Literal["", "org", "team", "key"]
Source = Literal["configuration", "operator"]

PRICES_CHANNEL = "farthing_prices"
"""Notices here say that a version was entered."""
RATES = (*TOKEN_CLASSES, "per_request", "per_image", "per_cached_answer")
"""Names of the parts of a price that a factor multiplies."""
KEY = ("book", "model", "upstream", "tier", "scope_kind", "scope_id")
"""What versions of one price have in common."""

_LOCK = 0x6661727468_03  # "farth", 3: one at a time enters prices
_EXACT = Context(prec=400, traps=[Inexact, InvalidOperation])


class Payer(NamedTuple):
    """Whose overrides apply to a call."""

    org_id: UUID
    team_id: UUID | None
    key_id: UUID


class PriceTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What something costs. `sale`: what the user is billed; `cost`: what the operator pays an upstream.

    The five token prices are per million tokens; None means unpriced, 0 means free. Raises ValueError on a negative or
    non-finite amount, and on parts that do not go together.
    """

    book: Book
    model: str
    """Empty: every model, of an override by a factor; or the price of an upstream's device."""
    upstream: str = ""
    """Empty on a sale price: a user pays the same wherever the call ran."""
    tier: Tier | Literal[""] = "standard"
    """Empty: every tier, of an override."""
    scope_kind: PriceScope = ""
    """Whose override it is; empty: the list price."""
    scope_id: str = ""
    currency: str
    input_fresh: Decimal | None = None
    input_cached: Decimal | None = None
    input_cache_write: Decimal | None = None
    output_text: Decimal | None = None
    output_reasoning: Decimal | None = None
    per_request: Decimal | None = None
    """For each answer, on top of its tokens; None: no such part."""
    per_image: Decimal | None = None
    """For each image of the prompt, on top of its tokens; None: no such part."""
    per_cached_answer: Decimal | None = None
    """All that an answer from the response cache is billed; None: nothing."""
    device_hour: Decimal | None = None
    """Of one device: what ran on it costs its device time at this."""
    factor: Decimal | None = None
    """Of an override: times the list price."""

    def __post_init__(self) -> None:
        refuse_bad_money(**{name: getattr(self, name) for name in (*RATES, "device_hour", "factor")})
        problem = next((words for wrong, words in _contradictions(self) if wrong), None)
        if problem is not None:
            raise ValueError(problem)

    @property
    def has_rates(self) -> bool:
        return any(getattr(self, name) is not None for name in RATES)

    @property
    def unpriced(self) -> bool:
        """Whether no price is given at all."""
        return self.device_hour is None and self.factor is None and not self.has_rates


def _contradictions(terms: PriceTerms) -> Iterable[tuple[bool, str]]:
    override = terms.scope_kind != ""
    yield (terms.book == "sale") != (terms.upstream == ""), "a sale price names no upstream, a cost names one"
    yield (
        terms.book == "cost" and terms.tier not in ("standard", "priority"),
        "only a sale price has a batch tier: what an upstream costs is no different for batches",
    )
    yield override != (terms.scope_id != ""), "an override names a scope and its id, a list price neither"
    yield override and terms.book == "cost", "an override is of a sale price: a cost is the same for whoever called"
    yield terms.factor is not None and not override, "a factor is for an override of an org, team or key"
    yield (
        terms.factor is not None and terms.has_rates,
        "an override is a factor on the list price or a price of its own, not both",
    )
    yield terms.tier == "" and not override, "a list price has a tier: standard, batch or priority"
    yield terms.device_hour is not None and terms.book == "sale", "device_hour is a cost, of an upstream"
    yield (
        terms.book == "cost" and terms.per_cached_answer is not None,
        "per_cached_answer is a sale price: an answer from the response cache costs no upstream anything",
    )
    yield (
        terms.tier == "batch" and terms.per_cached_answer is not None,
        "per_cached_answer has no batch tier: lines of a batch are never answered from the response cache",
    )
    yield terms.device_hour is not None and terms.has_rates, "a cost is by device time or by tokens, not both"
    yield (
        terms.model == "" and terms.has_rates,
        "name the model; without one there is only a factor, or the device_hour of an upstream",
    )
    yield terms.model == "" and terms.book == "sale" and not override, "a list price names its model"


class Price(PriceTerms, frozen=True, kw_only=True, dict=True):
    """One row of `price_version`; with `override_id` as that override makes it."""

    id: UUID
    effective_at: datetime
    source: Source = "configuration"
    override_id: UUID | None = None
    """The version whose factor has been multiplied in, or that is the payer's own price."""

    @cached_property
    def dearest_input(self) -> Decimal | None:
        """Of a token of the prompt; None where one of its classes has no price."""
        return _dearest(self.input_fresh, self.input_cached, self.input_cache_write)

    @cached_property
    def dearest_output(self) -> Decimal | None:
        return _dearest(self.output_text, self.output_reasoning)


def _dearest(*rates: Decimal | None) -> Decimal | None:
    known = [rate for rate in rates if rate is not None]
    return max(known) if len(known) == len(rates) else None


class PriceBook:
    """The prices in force at a moment, and how they change after it.

    `prices`: all versions in force then or to come. With `currency`, amounts in another one are left out: they are no
    numbers of what is billed.
    """

    def __init__(self, prices: Iterable[Price], now: datetime | None = None, currency: str | None = None) -> None:
        self.now = now or datetime.now(UTC)
        self._versions = sorted(
            (price for price in prices if currency in (None, price.currency) or price.factor is not None),
            key=lambda price: (price.effective_at, price.id),
        )
        in_force = {_key(price): price for price in self._versions if price.effective_at <= self.now}
        self._prices = {key: price for key, price in in_force.items() if not price.unpriced}
        self._overridden = {(price.scope_kind, price.scope_id) for price in self._prices.values() if price.scope_kind}
        self._overrides_applied: dict[tuple[UUID, UUID], Price | None] = {}

    def at(self, moment: datetime) -> "PriceBook":
        """The same versions at another moment."""
        return PriceBook(self._versions, moment)

    @property
    def next_change(self) -> datetime | None:
        """When the first of the versions to come takes effect."""
        return next((price.effective_at for price in self._versions if price.effective_at > self.now), None)

    def sale(self, model: str, tier: Tier = "standard", payer: Payer | None = None) -> Price | None:
        """What `payer` is billed for `model`, its override applied; None when it is unpriced.

        Without a batch price the standard one holds.
        """
        listed = self._list_price(model, tier)
        if payer is None or not self._overridden:
            return listed
        override = self._override(model, tier, payer)
        return listed if override is None else self._effective(listed, override)

    def cost(self, model: str, upstream: str, tier: Tier = "standard") -> Price | None:
        """What `model` costs on `upstream`, else what its device does; None when nobody said.

        A priority call has a cost of its own there: without one, nobody said.
        """
        named = "priority" if tier == "priority" else "standard"
        return self._prices.get(("cost", model, upstream, named, "", "")) or self.device(upstream)

    def device(self, upstream: str) -> Price | None:
        """What a device of `upstream` costs by the hour."""
        return self._prices.get(("cost", "", upstream, "standard", "", ""))

    def current(self, terms: PriceTerms) -> Price | None:
        """The price in force that a change of `terms` would replace."""
        return self._prices.get(_key(terms))

    def in_force(self) -> list[Price]:
        return list(self._prices.values())

    def _list_price(self, model: str, tier: Tier) -> Price | None:
        found = self._prices.get(("sale", model, "", tier, "", ""))
        return self._list_price(model, "standard") if found is None and tier == "batch" else found

    def _override(self, model: str, tier: Tier, payer: Payer) -> Price | None:
        for kind, identifier in (("key", payer.key_id), ("team", payer.team_id), ("org", payer.org_id)):
            scope = (kind, str(identifier))
            if scope in self._overridden:
                for wanted in ((model, tier), (model, ""), ("", tier), ("", "")):
                    found = self._prices.get(("sale", wanted[0], "", wanted[1], *scope))
                    if found is not None:
                        return found
        return None

    def _effective(self, listed: Price | None, override: Price) -> Price | None:
        key = (listed.id if listed is not None else override.id, override.id)
        if key not in self._overrides_applied:
            self._overrides_applied[key] = effective(listed, override)
        return self._overrides_applied[key]


def effective(listed: Price | None, override: Price | None) -> Price | None:
    """The price that a payer with `override` is billed, as a version to multiply by; None: it is unpriced.

    A factor multiplies each part of the list price, whose id stays; a price of one's own takes its place, id and all.
    """
    if override is None:
        return listed
    if override.factor is None:
        return msgspec.structs.replace(override, override_id=override.id)
    if listed is None:
        return None
    rates = {name: getattr(listed, name) for name in RATES}
    scaled = {name: None if rate is None else _EXACT.multiply(rate, override.factor) for name, rate in rates.items()}
    return msgspec.structs.replace(listed, override_id=override.id, **scaled)


async def load(conn: AsyncConnection, currency: str | None = None) -> PriceBook:
    """The latest version of each price that is in force now, by the database's clock, and all versions to come."""
    columns = price_version.c
    which = [columns[name] for name in KEY]
    now = (await conn.execute(select(func.clock_timestamp()))).scalar_one()
    latest = (
        select(columns.id)
        .ext(distinct_on(*which))
        .where(columns.effective_at <= now)
        .order_by(*which, columns.effective_at.desc(), columns.id.desc())
    )
    wanted = or_(columns.id.in_(latest), columns.effective_at > now)
    rows = await conn.execute(select(price_version).where(wanted))
    return PriceBook(map(price_of, rows), now, currency)


async def load_all(conn: AsyncConnection) -> list[Price]:
    """Every version there has been or will be, in the order in which they were entered."""
    rows = await conn.execute(select(price_version).order_by(price_version.c.id))
    return [price_of(row) for row in rows]


async def find_versions(conn: AsyncConnection, ids: Iterable[UUID]) -> dict[UUID, Price]:
    """Those versions, overrides among them, as they were entered. See `effective`."""
    rows = await conn.execute(select(price_version).where(price_version.c.id.in_(list(ids))))
    return {price.id: price for price in map(price_of, rows)}


def price_of(row: Row[tuple[object, ...]]) -> Price:
    """Of a whole row of `price_version`."""
    return Price(**row._mapping)


async def billing_currency(conn: AsyncConnection) -> str | None:
    """Currency of the newest sale price, which is what gateways bill in; None before there is any price."""
    columns = price_version.c
    newest = select(columns.currency).where(columns.book == "sale").order_by(columns.effective_at.desc()).limit(1)
    currency: str | None = (await conn.execute(newest)).scalar_one_or_none()
    return currency


async def seed(conn: AsyncConnection, wanted: Iterable[PriceTerms]) -> list[PriceTerms]:
    """Enter the configuration's prices, from now on; return those that were new or had changed there.

    Idempotent: what the configuration says as it said it before makes no new version, also where an operator has
    entered another price since: that one holds until the configuration is changed. Terms without any price end the one
    that the configuration had. Prices not in `wanted` stay as they are.
    """
    await lock(conn)
    columns = price_version.c
    which = [columns[name] for name in KEY]
    rows = await conn.execute(
        select(price_version)
        .ext(distinct_on(*which))
        .where(columns.effective_at <= func.clock_timestamp(), columns.source == "configuration")
        .order_by(*which, columns.effective_at.desc(), columns.id.desc())
    )
    before = {_key(price): price for price in map(price_of, rows)}
    changed = []
    for terms in wanted:
        old = before.get(_key(terms))
        if terms.unpriced if old is None or old.unpriced else terms == terms_of(old):
            continue
        await insert_version(conn, terms, None, "configuration")
        changed.append(terms)
    return changed


async def lock(conn: AsyncConnection) -> None:
    """Wait for whoever enters prices now; until the transaction ends, nobody else does."""
    await conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


async def insert_version(
    conn: AsyncConnection, terms: PriceTerms, effective_at: datetime | None, source: Source
) -> None:
    """Enter a version, from now on where no moment is given, and tell the gateways when it commits."""
    # clock_timestamp, not now(): a second change inside one transaction is a later version, not a duplicate
    moment = func.clock_timestamp() if effective_at is None else effective_at
    row = msgspec.structs.asdict(terms) | {"id": new_id(), "effective_at": moment, "source": source}
    await conn.execute(insert(price_version).values(row))
    await notify(conn, PRICES_CHANNEL, "")


def terms_of(price: Price) -> PriceTerms:
    return PriceTerms(**{name: getattr(price, name) for name in PriceTerms.__struct_fields__})


def _key(terms: PriceTerms) -> tuple[str, ...]:
    return (terms.book, terms.model, terms.upstream, terms.tier, terms.scope_kind, terms.scope_id)
