"""A process that appends operations to a spool for ever and prints the id of each once it is acknowledged.

Run as `python spool_writer.py FOLDER`; the test kills it.
"""

import asyncio
import sys
from pathlib import Path

from billing.spool import Spool
from tests.billing.samples import an_operation


async def write(spool: Spool) -> None:
    while True:
        record = an_operation()
        await spool.append(record)
        sys.stdout.write(f"{record.id}\n")
        sys.stdout.flush()


async def main() -> None:
    spool = Spool(Path(sys.argv[1]))
    await asyncio.gather(*(write(spool) for _ in range(8)))


asyncio.run(main())
