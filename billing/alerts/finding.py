"""What a check has found to hold, for one scope."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Literal

import msgspec

from billing.allowances import ScopeKind
from billing.usage_rows import floor

Measure = Literal["billed", "failed", "loss", "fresh_tokens", "unpriced", "slow"]
"""What of usage has risen: money billed, operations failed, cost above what was billed, prompt tokens not cached,
operations whose charge is unknown, answers that took long."""


class Rise(msgspec.Struct, frozen=True, kw_only=True):
    """Asks who made it: the same hours of the days before are what is usual."""

    measure: Measure
    start: datetime
    """Of an hour, where the sums hold the measure."""
    end: datetime
    seconds: float = 0.0
    """From how many on an answer is slow; of that measure only."""
    currency: str | None = None
    also: Mapping[ScopeKind, str] = {}
    """Scopes that an operation must have beside the finding's."""

    def days_before(self, days: int) -> tuple[datetime, datetime]:
        """To the end of an hour: whole hours are summed up already."""
        return self.start - timedelta(days=days), self._whole_end - timedelta(days=days)

    @property
    def passed(self) -> float:
        """Share of those hours that the rise has taken so far."""
        return (self.end - self.start) / (self._whole_end - self.start)

    @property
    def _whole_end(self) -> datetime:
        whole = floor(self.end, "hour")
        return whole if whole == self.end else whole + timedelta(hours=1)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    scope_kind: str
    scope_id: str
    subject: str = ""
    """Tells apart what one rule finds in one scope: a budget's window, a model, a currency."""
    level: int = 0
    holding: bool = False
    """Not enough to open an alert, but enough to keep one open."""
    summary: str
    """A sentence."""
    details: dict[str, str | int | float | None]
    """Amounts as text."""
    rise: Rise | None = None
