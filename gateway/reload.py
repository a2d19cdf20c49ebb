"""Reloading the configuration: on SIGHUP, and when its file or a key's file changes. The old one stays until a new one
is right.
"""

import asyncio
import contextlib
import signal
from pathlib import Path

import structlog

from gateway import hangups
from gateway.errors import ApiError
from gateway.live import Live
from gateway.prices import Prices
from gateway.settings import Settings
from gateway.settings_file import load

LOOK_SECONDS = 1.0
RETRY_SECONDS = 2.0
FIXED_LIMITS = ("header_seconds", "keep_alive_seconds", "grace_seconds")
"""Which the server, or another part, takes over once at the start."""

STAYS = "configuration not reloaded; the one before stays in force"

log = structlog.get_logger()


class Reload:
    """`path`: the file that `live` was read from. What comes from the environment stays as it is."""

    def __init__(self, path: Path, live: Live, prices: Prices) -> None:
        self._path = path
        self._live = live
        self._prices = prices
        self._asked = asyncio.Event()

    async def run(self) -> None:
        """Look for changes, for ever."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, RuntimeError):  # no signals off the main thread
            loop.add_signal_handler(signal.SIGHUP, self._asked.set)
            hangups.let_through()
        seen = await asyncio.to_thread(self._stamp)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._asked.wait(), LOOK_SECONDS)
                stamp = await asyncio.to_thread(self._stamp)
                if self._asked.is_set() or stamp != seen:
                    self._asked.clear()
                    seen = stamp
                    await self.reload()
        finally:
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGHUP)

    async def reload(self) -> bool:
        """Read the file and make it the configuration in force; False, with the reasons logged, when it is wrong."""
        try:
            settings = await asyncio.to_thread(load, self._path)
            refuse_fixed(self._live.settings, settings)
            await self._price(settings)
            self._live.apply(settings)
        except ValueError as error:
            log.error(STAYS, reasons=str(error).splitlines())
            return False
        except Exception as error:  # whatever it is, the next change is looked for
            log.exception(STAYS, reason=repr(error))
            return False
        log.info("configuration reloaded", path=str(self._path), models=sorted(settings.models))
        return True

    async def _price(self, settings: Settings) -> None:
        """Its prices come first: a model must not be served for a moment without its price. Waits for the database."""
        while True:
            try:
                await self._prices.apply(settings)
            except ApiError as error:
                log.warning("a changed configuration waits for the database", reason=error.message)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        """Changes when one of the files does, also by being replaced, removed or made."""
        keys = (upstream.api_key_file for upstream in self._live.settings.upstreams.values())
        return [_stamp_of(path) for path in (self._path, *(key for key in keys if key is not None))]


def refuse_fixed(old: Settings, new: Settings) -> None:
    """Raise ValueError naming what has changed and cannot while the process runs."""
    changed = ["currency"] if old.currency != new.currency else []
    changed += [f"limits.{name}" for name in FIXED_LIMITS if getattr(old.limits, name) != getattr(new.limits, name)]
    if changed:
        raise ValueError(f"{' and '.join(changed)} cannot change in a running gateway: restart it for that")


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
