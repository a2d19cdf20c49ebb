"""A process that admits so many calls at once when it is told to, and says how many it got.

Run as `python -m tests.billing.last_call URL REPLICA CALLS [SECONDS]`: it says `ready`, waits for a line, says a
number, and leaves, with its leases, on the next line. Its wall clock is wrong by SECONDS.
"""

import asyncio
import sys
import time
from datetime import datetime, timedelta, tzinfo
from typing import Self

from sqlalchemy.ext.asyncio import create_async_engine

from billing.leases import BudgetExhausted, Hold
from tests.billing.doomed_replica import say
from tests.billing.replicas import a_replica, admit


def set_clock_wrong(by: float) -> None:
    """Whoever in billing asks this process for the time gets another."""
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "billing"]
    right, right_ns = time.time, time.time_ns

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(seconds=by)

    time.time = lambda: right() + by
    time.time_ns = lambda: right_ns() + int(by * 10**9)
    for module in ours:
        if getattr(module, "datetime", None) is datetime:
            module.datetime = Wrong  # type: ignore[attr-defined]
    assert any(getattr(module, "datetime", None) is Wrong for module in ours)


async def main() -> None:
    url, replica, calls, *wrong = sys.argv[1:]
    if wrong:
        set_clock_wrong(float(wrong[0]))
    engine = create_async_engine(url)
    async with a_replica(engine, replica) as leases:
        say("ready")
        await asyncio.to_thread(sys.stdin.readline)
        wanted = (admit(leases, "0.01", key="k") for _ in range(int(calls)))
        results = await asyncio.gather(*wanted, return_exceptions=True)
        assert all(isinstance(result, Hold | BudgetExhausted) for result in results), results
        say(str(sum(isinstance(result, Hold) for result in results)))
        await asyncio.to_thread(sys.stdin.readline)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
