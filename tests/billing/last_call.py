"""A process that admits so many calls at once when it is told to, and says how many it got.

Run as `python -m tests.billing.last_call URL REPLICA CALLS`: it says `ready`, waits for a line, says a number, and
leaves, with its leases, on the next line.
"""

import asyncio
import sys

from sqlalchemy.ext.asyncio import create_async_engine

from billing.leases import BudgetExhausted, Hold
from tests.billing.doomed_replica import say
from tests.billing.replicas import a_replica, admit


async def main() -> None:
    url, replica, calls = sys.argv[1:]
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
