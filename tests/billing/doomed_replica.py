"""A process that lives as a gateway does (admit, serve, spool, copy) until the test kills it.

Run as `python -m tests.billing.doomed_replica URL FOLDER`. It prints the id of each operation once it is spooled,
`refused` for each that a budget refused, and `recovered` when it has copied and freed what the process before left.
"""

import asyncio
import random
import sys
from decimal import Decimal
from pathlib import Path

from sqlalchemy.ext.asyncio import create_async_engine

from billing.leases import BudgetExhausted, Leases
from billing.ledger import Ledger
from billing.notices import Notices
from billing.spool import Spool
from tests.billing.replicas import admit, row


class Recovering(Ledger):
    async def recover(self) -> int:
        freed = await super().recover()
        say("recovered")
        return freed


async def serve(leases: Leases, spool: Spool) -> None:
    while True:
        worst = Decimal(random.randrange(1, 100)) / 1000
        billed = worst * random.randrange(0, 101) / 100
        try:
            hold = await admit(leases, str(worst), org="o", key=random.choice("ab"), user="w")
        except BudgetExhausted:
            say("refused")
            await asyncio.sleep(0.01)
            continue
        await asyncio.sleep(random.uniform(0, 0.005))
        if random.random() < 0.1:
            leases.release(hold)
        else:
            await spool.append(row(hold, str(billed)))
            say(str(hold.operation_id))
            leases.settle(hold, billed, 0)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main() -> None:
    engine = create_async_engine(sys.argv[1])
    spool = Spool(Path(sys.argv[2]))
    notices = Notices(engine)
    leases = Leases(engine, spool.replica, "USD", notices)
    parts = (notices.run(), leases.run(), Recovering(engine, spool).run())
    await asyncio.gather(*parts, *(serve(leases, spool) for _ in range(6)))


if __name__ == "__main__":
    asyncio.run(main())
