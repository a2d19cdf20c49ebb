"""What is told of an alert, the same to every channel."""

from datetime import datetime
from typing import Literal
from uuid import UUID

import msgspec

Event = Literal["opened", "worse", "resolved", "test"]
WORDS: dict[Event, str] = {"opened": "Alert", "worse": "Alert, worse", "resolved": "Resolved", "test": "Test"}
LONGEST_TITLE = 150
"""In characters: Slack's headers hold no more."""


def one_line(text: str) -> str:
    """Without line breaks and control characters: names come from whoever may choose one, answers from anywhere."""
    return "".join(each if each.isprintable() else " " for each in text)


class Cause(msgspec.Struct, frozen=True):
    """Who made a rise: a tag's value or a key."""

    kind: Literal["tag", "key"]
    name: str
    """name=value of a tag, the name of a key."""
    id: str
    """Of a key; of a tag the same as its name."""
    share: float
    """Of the rise, from 0 to 1."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name} ({self.share:.0%} of the rise)"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    event: Event
    alert_id: UUID | None
    """None of a test."""
    rule: str
    """The rule's kind."""
    scope_kind: str
    scope_id: str
    scope: str
    """As a person calls it."""
    summary: str
    details: dict[str, str | int | float | None] = {}
    causes: tuple[Cause, ...] = ()
    opened_at: datetime
    at: datetime
    """When this was told."""

    @property
    def title(self) -> str:
        """One line."""
        text = one_line(f"{WORDS[self.event]}: {self.rule.replace('_', ' ')}, {self.scope}")
        return text if len(text) <= LONGEST_TITLE else text[: LONGEST_TITLE - 1] + "…"

    @property
    def lines(self) -> list[str]:
        """What follows the title, one fact a line."""
        found = [self.summary]
        if self.causes:
            found.append("Mostly by " + ", ".join(map(str, self.causes)))
        if self.event == "resolved":
            found.append(f"Opened {self.opened_at:%Y-%m-%d %H:%M} UTC, resolved {self.at:%Y-%m-%d %H:%M} UTC")
        elif self.event != "test":
            found.append(f"Since {self.opened_at:%Y-%m-%d %H:%M} UTC")
        return [one_line(each) for each in found]
