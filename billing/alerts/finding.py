"""What a check has found to hold, for one scope."""

from datetime import datetime, timedelta
from typing import Literal

import msgspec

Measure = Literal["billed", "failed", "loss", "fresh_tokens"]
"""What of usage has risen: money billed, operations failed, cost above what was billed, prompt tokens not cached."""


class Rise(msgspec.Struct, frozen=True, kw_only=True):
    """Asks who made it: the same span of the days before is what is usual."""

    measure: Measure
    start: datetime
    end: datetime
    currency: str | None = None

    def days_before(self, days: int) -> tuple[datetime, datetime]:
        return self.start - timedelta(days=days), self.end - timedelta(days=days)


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
