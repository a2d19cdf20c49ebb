"""Lists in pages: a cursor names the last thing seen, so what is added meanwhile moves nothing."""

import base64
import binascii
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

import msgspec
from litestar.params import FromQuery, QueryParameter

from gateway.errors import ApiError

T = TypeVar("T")
MOST = 1000
USUAL = 100


class Listing(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    data: list[T]
    next_cursor: str | None
    """Give it as `cursor` for the page that follows; null on the last one."""


class Page(msgspec.Struct, frozen=True):
    after: str | None
    """What identifies the last thing of the page before; None on the first."""
    limit: int

    @property
    def after_id(self) -> UUID | None:
        """Of things with UUIDs. Raises ApiError 400."""
        try:
            return None if self.after is None else UUID(self.after)
        except ValueError:
            raise _bad_cursor() from None

    @property
    def after_number(self) -> int | None:
        """Of things that are numbered. Raises ApiError 400."""
        if self.after is not None and not (self.after.isascii() and self.after.isdecimal() and len(self.after) < 19):
            raise _bad_cursor()
        return None if self.after is None else int(self.after)

    @property
    def after_moment(self) -> tuple[datetime, UUID] | None:
        """Of things in the order of time, of which several may have the same. Raises ApiError 400."""
        if self.after is None:
            return None
        at, _, identifier = self.after.partition(" ")
        try:
            return datetime.fromisoformat(at).astimezone(UTC), UUID(identifier)
        except (ValueError, OverflowError):
            raise _bad_cursor() from None


def at_moment(at: datetime, identifier: UUID) -> str:
    """What identifies a thing for `Page.after_moment`."""
    return f"{at.astimezone(UTC).isoformat()} {identifier}"


def page(
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=MOST, description="Most things on a page.")] = USUAL,
) -> Page:
    """The page that a request asks for. Raises ApiError 400 for a cursor that none of our answers had."""
    if cursor is None:
        return Page(None, limit)
    try:
        return Page(base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode(), limit)
    except (binascii.Error, UnicodeError):
        raise _bad_cursor() from None


def listing(found: Sequence[T], asked: Page, identify: Callable[[T], object]) -> Listing[T]:
    """`found`: what follows `asked.after`, with one more than `asked.limit` where there is another page."""
    shown = list(found[: asked.limit])
    if len(found) <= asked.limit:
        return Listing(data=shown, next_cursor=None)
    last = str(identify(shown[-1]))
    return Listing(data=shown, next_cursor=base64.urlsafe_b64encode(last.encode()).decode())


def cut(everything: Sequence[T], asked: Page, identify: Callable[[T], UUID]) -> Listing[T]:
    """A page of what is short enough to be read as a whole, in the order of its ids."""
    return _cut(everything, asked, identify, asked.after_id)


def cut_by_name(everything: Sequence[T], asked: Page, identify: Callable[[T], str]) -> Listing[T]:
    """The same of what has a name in place of an id, in the order of the names."""
    return _cut(everything, asked, identify, asked.after)


def _cut(everything: Sequence[T], asked: Page, identify: Callable[[T], Any], after: Any) -> Listing[T]:
    rest = sorted((each for each in everything if after is None or identify(each) > after), key=identify)
    return listing(rest[: asked.limit + 1], asked, identify)


def _bad_cursor() -> ApiError:
    return ApiError(400, "invalid_cursor", "`cursor` must be the next_cursor of an earlier answer.", param="cursor")
