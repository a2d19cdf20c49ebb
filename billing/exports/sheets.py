"""Rows into the bytes of a CSV or Parquet file, a few thousand rows at a time: millions need no memory.

CSV holds a decimal as text with every digit. Parquet holds it as decimal128 where 38 digits are enough for all of a
column, else as decimal256 (76 digits); a digit that would not fit is an error, never rounded away.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from billing.charge import EXACT
from billing.csv_text import csv_bytes

if TYPE_CHECKING:
    import pyarrow as pa

Format = Literal["csv", "parquet"]
Kind = Literal["text", "integer", "decimal", "seconds", "time", "flag"]
Row = tuple[Any, ...]

CSV_ROWS = 2_000
PARQUET_ROWS = 20_000
"""In one row group."""


class Column(NamedTuple):
    name: str
    kind: Kind = "text"


class Digits(NamedTuple):
    """The most that any value of a column has: before the point, and after it."""

    whole: int = 1
    after: int = 0

    def with_value(self, value: Decimal | None) -> "Digits":
        if value is None:
            return self
        exponent = EXACT.normalize(value).as_tuple().exponent
        assert isinstance(exponent, int), "an amount is finite"
        return Digits(max(self.whole, value.adjusted() + 1), max(self.after, -exponent))

    def type(self) -> "pa.DataType":
        """The smaller of Parquet's decimals that holds every value. Raises ValueError where neither does."""
        import pyarrow as pa

        after = max(self.after, 6)
        if self.whole + after <= 38:
            return pa.decimal128(38, after)
        if self.whole + after <= 76:
            return pa.decimal256(76, after)
        raise ValueError(f"an amount has {self.whole + after} digits, and Parquet holds 76: export it as CSV")


async def sheet(
    rows: Callable[[], AsyncIterator[Row]],
    columns: Sequence[Column],
    format: Format,
    digits: Sequence[Digits] | None = None,
    lacks: object = None,
) -> AsyncIterator[bytes]:
    """The file's bytes, in pieces. Raises ValueError as `Digits.type` does, and on an unknown format.

    `rows` is called once, and for Parquet once more before, to count digits, where `digits` (one for each column) does
    not say them. `lacks`: what is said of it in a Parquet file's metadata, as `farthing.lacks`; a CSV has no place.
    """
    if format == "csv":
        pieces = _csv(rows(), columns)
    elif format == "parquet":
        pieces = _parquet(rows(), columns, digits or await _count_digits(rows(), columns), lacks)
    else:
        raise ValueError(f"{format!r} is no format of an export; use csv or parquet")
    async for piece in pieces:
        yield piece


async def _csv(rows: AsyncIterator[Row], columns: Sequence[Column]) -> AsyncIterator[bytes]:
    yield csv_bytes([[column.name for column in columns]])
    async for batch in _batches(rows, CSV_ROWS):
        yield csv_bytes(batch)


async def _parquet(
    rows: AsyncIterator[Row], columns: Sequence[Column], digits: Sequence[Digits], lacks: object
) -> AsyncIterator[bytes]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError("Parquet needs pyarrow: `pip install pyarrow` beside Farthing, or export as CSV") from None
    kinds = {
        "text": pa.string(),
        "integer": pa.int64(),
        "seconds": pa.float64(),
        "time": pa.timestamp("us", tz="UTC"),
        "flag": pa.bool_(),
    }
    types = [
        each.type() if column.kind == "decimal" else kinds[column.kind]
        for column, each in zip(columns, digits, strict=True)
    ]
    schema = pa.schema([pa.field(column.name, kind) for column, kind in zip(columns, types, strict=True)])
    if lacks is not None:
        schema = schema.with_metadata({"farthing.lacks": str(lacks)})
    sink = _Sink()
    with pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema, compression="zstd") as writer:
        async for batch in _batches(rows, PARQUET_ROWS):
            values = zip(*batch, strict=True)
            try:
                arrays = [pa.array(list(column), kind) for column, kind in zip(values, types, strict=True)]
            except pa.ArrowInvalid as error:
                raise ValueError(
                    f"rows that landed meanwhile have more digits ({error}): run the export again"
                ) from None
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            yield sink.taken()
    yield sink.taken()


async def _count_digits(rows: AsyncIterator[Row], columns: Sequence[Column]) -> list[Digits]:
    found = [Digits()] * len(columns)
    counted = [i for i, column in enumerate(columns) if column.kind == "decimal"]
    async for row in rows:
        for i in counted:
            found[i] = found[i].with_value(row[i])
    return found


async def _batches(rows: AsyncIterator[Row], size: int) -> AsyncIterator[list[Row]]:
    batch: list[Row] = []
    async for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


class _Sink:
    """A file that is only ever written to, and forgets what has been taken out of it."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._position = 0

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """What was written is still there to be taken."""

    def taken(self) -> bytes:
        taken, self._pieces = b"".join(self._pieces), []
        return taken
