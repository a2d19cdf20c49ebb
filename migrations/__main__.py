"""`python -m migrations`: bring the database of FARTHING_DATABASE_URL up to date."""

import os
import sys

from migrations import MigrationError, upgrade

try:
    upgrade(os.environ["FARTHING_DATABASE_URL"])
except KeyError:
    sys.exit("set FARTHING_DATABASE_URL, like postgresql+asyncpg://user:password@host/name")
except MigrationError as error:
    sys.exit(str(error))
