"""Operations as a gateway makes them: admitted, spooled, settled, while the ledger copies what is spooled."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import coroutine
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import copying
from billing.allowances import ScopeKind
from billing.budgets import set_budget
from billing.ids import new_id
from billing.leases import Leases, Need
from billing.ledger import Ledger
from billing.notices import Notices
from billing.partitions import make_ahead
from billing.records import NO_COLUMNS, AttemptRecord, OperationRecord, TokenClasses
from billing.spool import Spool
from billing.tables import attempt, operation

RATE = 2000
WRITERS = 64
ROWS = 20_000
BATCH = 500
ORG, KEY = new_id(), new_id()
NEED = Need(Decimal("0.01"), 1000)
BILLED = Decimal("0.0042")

T = TypeVar("T")
Figures = dict[str, tuple[list[float], str]]


class OnLoop:
    """Adds up the time that coroutines take of the event loop, without what they wait."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @coroutine
    def run(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        sent: Any = None
        while True:
            began = time.perf_counter()
            try:
                waited = work.send(sent)
            except StopIteration as end:
                self.seconds += time.perf_counter() - began
                return end.value  # type: ignore[no-any-return]
            self.seconds += time.perf_counter() - began
            sent = yield waited


class Load:
    """One process's billing on the database of `engine`, under a budget that never ends."""

    def __init__(self, engine: AsyncEngine, folder: Path) -> None:
        self._engine = engine
        self._spool = Spool(folder)
        notices = Notices(engine)
        self._leases = Leases(engine, self._spool.replica, "USD", notices)
        self._parts = (notices, self._leases, Ledger(engine, self._spool))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await make_ahead(self._engine)
        async with self._engine.begin() as conn:
            await set_budget(conn, "key", str(KEY), "month", Decimal(10**9), currency="USD")
        tasks = [asyncio.create_task(part.run()) for part in self._parts]
        await asyncio.sleep(1.0)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._leases.close()
            await self._spool.close()

    async def as_many_as_go(self, seconds: float) -> Figures:
        """Several writers, each with its next operation as soon as the last one is on disk."""
        before = await self._stored()
        began = time.perf_counter()
        done = 0

        async def write() -> None:
            nonlocal done
            while time.perf_counter() - began < seconds:
                await self._one()
                done += 1

        await asyncio.gather(*(write() for _ in range(WRITERS)))
        spooled = done / (time.perf_counter() - began)
        behind = self._spool.depth
        await self._drained()
        stored = (await self._stored() - before) / (time.perf_counter() - began)
        return {
            "operations on disk": ([spooled], "/s"),
            "operations into PostgreSQL": ([stored], "/s"),
            "waiting at the end": ([float(behind)], ""),
        }

    async def paced(self, seconds: float) -> Figures:
        """RATE operations a second, whatever becomes of those before."""
        shares: list[float] = []
        waits: list[float] = []
        late: list[float] = []

        async def one() -> None:
            began, loop = time.perf_counter(), OnLoop()
            await loop.run(self._one())
            shares.append(loop.seconds * 1000)
            waits.append((time.perf_counter() - began) * 1000)

        began = time.perf_counter()
        tasks = set()
        for number in range(int(seconds * RATE)):
            due = began + number / RATE
            if (pause := due - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            late.append((time.perf_counter() - due) * 1000)
            task = asyncio.create_task(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        behind = self._spool.depth
        await self._drained()
        return {
            "hot path p50": ([statistics.median(shares)], "ms"),
            "hot path p99": ([_p99(shares)], "ms"),
            "until on disk p50": ([statistics.median(waits)], "ms"),
            "until on disk p99": ([_p99(waits)], "ms"),
            "event loop late p99": ([_p99(late)], "ms"),
            "waiting at the end": ([float(behind)], ""),
        }

    async def _one(self) -> None:
        identifier = new_id()
        scopes: Mapping[ScopeKind, Sequence[str]] = {"key": [str(KEY)]}
        hold = self._leases.admit_at_hand(identifier, scopes, NEED)
        if hold is None:
            hold = await self._leases.admit_waiting(identifier, scopes, NEED)
        record = a_record(hold.operation_id, replica=hold.replica, charges=hold.charges)
        await self._spool.append(record)
        self._leases.settle(hold, BILLED, 700)

    async def _drained(self) -> None:
        while self._spool.depth:  # noqa: ASYNC110 - the ledger empties it
            await asyncio.sleep(0.005)

    async def _stored(self) -> int:
        async with self._engine.connect() as conn:
            return int((await conn.execute(select(func.count()).select_from(operation))).scalar_one())


async def copy_and_insert(engine: AsyncEngine) -> Figures:
    """Operations with one attempt each, into the same partitions, as the ledger does it and as INSERT does."""
    copied = await _timed(engine, _copy)
    inserted = await _timed(engine, _insert)
    return {
        "COPY": ([2 * copied], "rows/s"),
        "INSERT": ([2 * inserted], "rows/s"),
        "COPY over INSERT": ([copied / inserted], ""),
    }


async def _timed(engine: AsyncEngine, write: Any) -> float:
    records = [a_record(new_id()) for _ in range(ROWS)]
    began = time.perf_counter()
    for start in range(0, ROWS, BATCH):
        async with engine.begin() as conn:
            await write(conn, records[start : start + BATCH])
    return ROWS / (time.perf_counter() - began)


async def _copy(conn: Any, records: Sequence[OperationRecord]) -> None:
    there = await copying.known(conn, [record.id for record in records])
    await copying.copy(conn, [record for record in records if record.id not in there])


async def _insert(conn: Any, records: Sequence[OperationRecord]) -> None:
    await conn.execute(insert(operation), [_row(record, *NO_COLUMNS) for record in records])
    attempts = [
        _row(each, "tokens") | msgspec.structs.asdict(each.tokens) | {"operation_id": record.id}
        for record in records
        for each in record.attempts
    ]
    await conn.execute(insert(attempt), attempts)


def _row(record: msgspec.Struct, *without: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(record).items() if name not in without}


def a_record(identifier: UUID, **changes: Any) -> OperationRecord:
    now = datetime.now(UTC)
    one = AttemptRecord(
        number=1,
        upstream="engine",
        model="small-model",
        started_at=now,
        status="ok",
        http_status=200,
        tokens=TokenClasses(input_fresh=300, input_cached=256, output_text=144),
        usage_source="engine",
        prefill_device_seconds=0.1,
        decode_device_seconds=0.4,
        ttft_seconds=0.12,
        total_seconds=0.6,
        price_version_id=KEY,
        billed=BILLED,
        cost=Decimal("0.001"),
    )
    fields: dict[str, Any] = {
        "id": identifier,
        "started_at": now,
        "org_id": ORG,
        "team_id": None,
        "user_id": None,
        "key_id": KEY,
        "tags": {"feature": "search"},
        "requested_model": "auto",
        "model": "small-model",
        "route_reasons": ["short prompt"],
        "route_score": 0.2,
        "stream": True,
        "status": "ok",
        "http_status": 200,
        "finish_reason": "stop",
        "ttft_seconds": 0.12,
        "total_seconds": 0.6,
        "billed": BILLED,
        "cost": Decimal("0.001"),
        "currency": "USD",
        "attempts": [one],
    }
    return OperationRecord(**fields | changes)


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]
