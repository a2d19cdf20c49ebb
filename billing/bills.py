"""An upstream's bill, read from the CSV that it exports: per day and model the tokens and the money it speaks of.

Formats are told apart by their header. Known are, as they looked in 2026:

* Anthropic's Console, Usage: `usage_date_utc`, `model_version`, `usage_input_tokens_no_cache`, `…_cache_write_5m`,
  `…_cache_write_1h`, `…_cache_read`, `usage_output_tokens`.
* Anthropic's Console, Cost: `usage_date_utc`, `model` (a display name), `cost_usd`.
* OpenAI's platform, completions usage: `start_time` (Unix seconds), `model`, `input_tokens` (cached ones included),
  `input_cached_tokens`, `output_tokens`.
* OpenAI's platform, costs: `start_time`, `amount_value`, `amount_currency`, `line_item` (the model before a comma).

Any other CSV is read by the names of its columns, given as `FIELD -> column`.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

import msgspec

COUNTS = ("prompt_tokens", "input_fresh", "input_cached", "input_cache_write", "completion_tokens")
FIELDS = ("day", "model", *COUNTS, "cost", "currency")
"""What a column may hold. `prompt_tokens` is all of the input, cached or not."""


class BillLine(msgspec.Struct, frozen=True, kw_only=True):
    """One row. A count or cost that the format does not speak of is None."""

    day: date
    model: str
    counts: Mapping[str, int]
    cost: Decimal | None
    currency: str | None


class _Layout(NamedTuple):
    name: str
    columns: Mapping[str, tuple[str, ...]]
    """Field -> columns, whose numbers are added up."""
    currency: str | None = None


_LAYOUTS = (
    _Layout(
        "Anthropic usage",
        {
            "day": ("usage_date_utc",),
            "model": ("model_version",),
            "input_fresh": ("usage_input_tokens_no_cache",),
            "input_cached": ("usage_input_tokens_cache_read",),
            "input_cache_write": ("usage_input_tokens_cache_write_5m", "usage_input_tokens_cache_write_1h"),
            "completion_tokens": ("usage_output_tokens",),
        },
    ),
    _Layout("Anthropic cost", {"day": ("usage_date_utc",), "model": ("model",), "cost": ("cost_usd",)}, currency="USD"),
    _Layout(
        "OpenAI usage",
        {
            "day": ("start_time",),
            "model": ("model",),
            "prompt_tokens": ("input_tokens",),
            "input_cached": ("input_cached_tokens",),
            "completion_tokens": ("output_tokens",),
        },
    ),
    _Layout(
        "OpenAI costs",
        {
            "day": ("start_time",),
            "model": ("line_item",),
            "cost": ("amount_value",),
            "currency": ("amount_currency",),
        },
    ),
)


def read_bill(text: str, columns: Mapping[str, str] | None = None) -> list[BillLine]:
    """The rows of a bill's CSV; with `columns` (field of FIELDS -> name of a column) of any layout.

    Raises ValueError, with the number of the line, on what cannot be read; nothing is left out in silence.
    """
    try:
        return _read(text.removeprefix("\ufeff"), columns)
    except csv.Error as error:
        raise ValueError(f"the bill is no CSV: {error}") from None


def _read(text: str, columns: Mapping[str, str] | None) -> list[BillLine]:
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    names = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = names
    layout = _named(columns, names) if columns else _known(names)
    found = []
    for row in reader:
        try:
            found.append(_line(row, layout))
        except ValueError as error:
            raise ValueError(f"line {reader.line_num} of the bill: {error}") from None
    if not found:
        raise ValueError("the bill has no rows")
    return found


def _known(names: list[str]) -> _Layout:
    for layout in _LAYOUTS:
        if {name for columns in layout.columns.values() for name in columns} <= set(names):
            return layout
    raise ValueError(
        f"the columns of the bill ({', '.join(names[:8])}{', …' if len(names) > 8 else ''}) are of no known export; "
        "say which are which, like --columns day=Date,model=Model,cost=Amount"
    )


def _named(columns: Mapping[str, str], names: list[str]) -> _Layout:
    for field, name in columns.items():
        if field not in FIELDS:
            raise ValueError(f"{field!r} is no field of a bill; use {', '.join(FIELDS)}")
        if name not in names:
            raise ValueError(f"the bill has no column {name!r}; it has {', '.join(names)}")
    if not {"day", "model"} <= set(columns):
        raise ValueError("say which columns are the day and the model")
    if not {*COUNTS, "cost"} & set(columns):
        raise ValueError(f"say which columns to compare: {', '.join((*COUNTS, 'cost'))}")
    return _Layout("named columns", {field: (name,) for field, name in columns.items()})


def _line(row: Mapping[str, str | None], layout: _Layout) -> BillLine:
    def text(field: str) -> str:
        return (row[layout.columns[field][0]] or "").strip()

    counts = {}
    for field in COUNTS:
        if field in layout.columns:
            total = sum((_number(row[name], name) for name in layout.columns[field]), Decimal(0))
            if total != total.to_integral_value():
                raise ValueError(f"{field} is {total}, not a whole number")
            counts[field] = int(total)
    cost = _number(row[layout.columns["cost"][0]], "cost") if "cost" in layout.columns else None
    model = text("model")
    return BillLine(
        day=_day(text("day")),
        model=model.partition(",")[0].strip() if layout.name == "OpenAI costs" else model,
        counts=counts,
        cost=cost,
        currency=(text("currency").upper() or None) if "currency" in layout.columns else layout.currency,
    )


def _number(text: str | None, name: str) -> Decimal:
    """Empty is 0; thousands may be grouped with commas; a currency sign may stand before it."""
    plain = (text or "").strip().lstrip("$€£¥ ")
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", plain):
        plain = plain.replace(",", "")
    try:
        number = Decimal(plain or "0")
    except InvalidOperation:
        raise ValueError(f"{name} is {text!r}, not a number") from None
    if not number.is_finite():
        raise ValueError(f"{name} is {text!r}, not a number")
    return number


def _day(text: str) -> date:
    try:
        if re.fullmatch(r"\d{9,11}", text):
            return datetime.fromtimestamp(int(text), UTC).date()
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"the day is {text!r}; it can be read as 2026-11-30, a time in ISO 8601 or Unix seconds"
        ) from None
    return moment.astimezone(UTC).date() if moment.tzinfo else moment.date()


def slack(lines: Iterator[Decimal]) -> Decimal:
    """How far a sum of amounts can be off because each was rounded to the decimals that it shows."""
    total = Decimal(0)
    for amount in lines:
        exponent = amount.as_tuple().exponent
        assert isinstance(exponent, int), "amounts of a bill are finite"
        total += Decimal(5).scaleb(exponent - 1)
    return total
