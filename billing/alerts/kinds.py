"""What a rule can watch, and the parameters of each kind with their defaults."""

from collections.abc import Mapping
from decimal import Decimal
from math import isnan

import msgspec


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What all kinds have. Raises ValueError, with a sentence, on a value that makes no sense."""

    clear_minutes: int = 10
    """An alert resolves when its condition has been gone for so long."""

    def __post_init__(self) -> None:
        _between("clear_minutes", self.clear_minutes, 0, 7 * 24 * 60)


class BudgetShare(Parameters, frozen=True, kw_only=True):
    """A budget's window has used up a share of its limit. One alert a budget, told again at each further share."""

    shares: tuple[Decimal, ...] = (Decimal("0.5"), Decimal("0.8"), Decimal(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shares or list(self.shares) != sorted(set(self.shares)):
            raise ValueError("shares must be one or more different shares, smallest first, like 0.5,0.8,1")
        for share in self.shares:
            _between("each of shares", share, Decimal("0.01"), 10)


class BudgetProjection(Parameters, frozen=True, kw_only=True):
    """Going on as it has since its window began, a budget is over before the window ends."""

    after_share: float = 0.1
    """Of the window, which must have passed: before, an hour's work looks like a month's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("after_share", self.after_share, 0.01, 0.99)


class Spike(Parameters, frozen=True, kw_only=True):
    """Much more is spent in an hour than at the same time of the day or week before."""

    clear_minutes: int = 60
    score: float = 2.9
    """Deviations above the usual from which on it is a spike."""
    minimum: Decimal = Decimal(1)
    """What must be spent above the usual within an hour, in currency units."""
    warm_up_days: int = 14
    """No alert before a scope has so many days of history."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("score", self.score, 1, 100)
        _between("minimum", self.minimum, 0, Decimal(10**15))
        _between("warm_up_days", self.warm_up_days, 2, 56)


class CacheHitRate(Parameters, frozen=True, kw_only=True):
    """Of the prompt tokens of an hour a much smaller share came from a cache than in the seven days before."""

    fall: float = 0.5
    """Share of the usual hit rate that is gone."""
    minimum_tokens: int = 100_000
    """Prompt tokens in the hour, below which the rate says little."""
    minimum_rate: float = 0.1
    """A usual rate below it has nothing to lose."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("fall", self.fall, 0.05, 1)
        _between("minimum_tokens", self.minimum_tokens, 1, 10**15)
        _between("minimum_rate", self.minimum_rate, 0.01, 1)


class UnpricedModel(Parameters, frozen=True, kw_only=True):
    """A model answered and has no price: what it was used for is billed as unknown."""

    clear_minutes: int = 60


class ErrorRate(Parameters, frozen=True, kw_only=True):
    """Too many operations of an hour failed at the upstream."""

    share: float = 0.1
    minimum_operations: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("share", self.share, 0.0001, 1)
        _between("minimum_operations", self.minimum_operations, 1, 10**12)


class Latency(Parameters, frozen=True, kw_only=True):
    """The slowest 5% of answers take longer than they may, from the request to the answer's end."""

    seconds: float = 60.0
    minutes: int = 15
    """How far back is looked."""
    minimum_operations: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("seconds", self.seconds, 0.001, 86_400)
        _between("minutes", self.minutes, 1, 60)
        _between("minimum_operations", self.minimum_operations, 1, 10**12)


class Margin(Parameters, frozen=True, kw_only=True):
    """Over some hours more was paid than billed."""

    clear_minutes: int = 60
    hours: int = 24
    minimum: Decimal = Decimal("0.01")
    """Least loss, in currency units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("hours", self.hours, 1, 24 * 31)
        _between("minimum", self.minimum, 0, Decimal(10**15))


class SpoolDepth(Parameters, frozen=True, kw_only=True):
    """A gateway process has operations on its disk that the database does not take; of scope all only."""

    operations: int = 1000
    minutes: int = 5
    """For how long there must have been so many, without getting fewer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("operations", self.operations, 1, 10**12)
        _between("minutes", self.minutes, 1, 60)


class EngineIdle(Parameters, frozen=True, kw_only=True):
    """Too large a share of what an engine's device costs was paid for waiting; of scope all only."""

    clear_minutes: int = 60
    share: Decimal = Decimal("0.8")
    hours: int = 24
    minimum: Decimal = Decimal(1)
    """Least idle cost in these hours, in currency units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _between("share", self.share, Decimal("0.01"), 1)
        _between("hours", self.hours, 1, 24 * 31)
        _between("minimum", self.minimum, 0, Decimal(10**15))


KINDS: dict[str, type[Parameters]] = {
    "budget_share": BudgetShare,
    "budget_projection": BudgetProjection,
    "spike": Spike,
    "cache_hit_rate": CacheHitRate,
    "unpriced_model": UnpricedModel,
    "error_rate": ErrorRate,
    "latency": Latency,
    "margin": Margin,
    "spool": SpoolDepth,
    "engine_idle": EngineIdle,
}
"""By the name that a rule's kind has."""

NO_SCOPE = ("spool", "engine_idle")
"""Kinds that are about Farthing itself: their scope is all."""


def read_parameters(kind: str, given: Mapping[str, object]) -> Parameters:
    """The parameters of a rule: those given, and the defaults of the rest. Numbers may be text, as from a shell.

    Raises ValueError, with a sentence, on an unknown kind or name and on a value out of range.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of rule; there are {', '.join(KINDS)}")
    known = KINDS[kind].__struct_fields__
    for name in given:
        if name not in known:
            raise ValueError(f"a rule {kind} has no parameter {name!r}; there are {', '.join(known)}")
    lists = {name: value.split(",") for name, value in given.items() if name == "shares" and isinstance(value, str)}
    try:
        return msgspec.convert({**given, **lists}, KINDS[kind], strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"rule {kind}: {error}") from None


def changed_parameters(parameters: Parameters) -> dict[str, object]:
    """Those that are not the default, as JSON has them."""
    plain: dict[str, object] = msgspec.to_builtins(parameters)
    return plain


def _between(name: str, value: float | Decimal, least: float | Decimal, most: float | Decimal) -> None:
    if isnan(value) or not least <= value <= most:
        raise ValueError(f"{name} is {value}: it must be from {least} to {most}")
