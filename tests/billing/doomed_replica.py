"""A process that lives as a gateway does (admit, serve, spool, copy) until the test kills it.

Run as `python -m tests.billing.doomed_replica URL FOLDER`. It prints the id of each operation once it is spooled,
and `refused` for each that a budget refused.
"""

import asyncio
import random
import sys
from decimal import Decimal
from pathlib import Path

from sqlalchemy.ext.asyncio import create_async_engine

from billing.leases import BudgetExhausted, Budgets
from billing.ledger import Ledger
from billing.spool import Spool
from tests.billing.samples import an_operation


async def serve(budgets: Budgets, spool: Spool) -> None:
    while True:
        hold = Decimal(random.randrange(1, 100)) / 1000
        record = an_operation(billed=hold * random.randrange(0, 101) / 100)
        try:
            await budgets.admit(record.id, {"org": "o", "key": random.choice("ab")}, hold)
        except BudgetExhausted:
            say("refused")
            await asyncio.sleep(0.01)
            continue
        await asyncio.sleep(random.uniform(0, 0.005))
        if random.random() < 0.1:
            await budgets.release(record.id)
        else:
            await spool.append(record)
            say(str(record.id))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main() -> None:
    engine = create_async_engine(sys.argv[1])
    spool = Spool(Path(sys.argv[2]))
    budgets = Budgets(engine, spool.replica, "USD")
    await asyncio.gather(Ledger(engine, spool).run(), *(serve(budgets, spool) for _ in range(6)))


if __name__ == "__main__":
    asyncio.run(main())
