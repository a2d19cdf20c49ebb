"""CSV that a spreadsheet can open: RFC 4180, UTF-8, and no cell of somebody else's that it would run as a formula."""

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal

_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n")  # the wide ones too

Cell = str | int | Decimal | datetime | None | bool | float


def csv_bytes(rows: Iterable[Sequence[Cell]]) -> bytes:
    """Lines for `rows`. Numbers keep every digit; NULL is empty; times are ISO 8601 in UTC."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue().encode()


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, str):
        return harmless(value)
    return repr(value) if isinstance(value, float) else str(value)


def harmless(text: str) -> str:
    """With an apostrophe before what a spreadsheet would take for a formula (OWASP's advice on CSV injection)."""
    return f"'{text}" if text.startswith(_FORMULA) else text
