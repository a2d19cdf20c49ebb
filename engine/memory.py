"""How much memory the KV pools get, and what the process asks of the C libraries."""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

DEFAULT_SHARE = 0.25
"""Of the memory that is available once the weights are loaded."""
DEFAULT_LIMIT = 4 << 30

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<binary>i?)b?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes in "1073741824", "1GiB", "500MB", "2g"; a unit without the "i" counts in thousands. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number with a unit such as 512MiB or 2GiB")
    base = 1024 if found["binary"] else 1000
    return int(float(found["number"]) * base ** _POWER[found["unit"].lower()])


def show_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def available_memory() -> int:
    """Bytes this process may still use: what the kernel could free up, or less where a control group limits us."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def resident_memory() -> int:
    """Bytes of memory this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def return_freed_memory() -> None:
    """Give the system what this process has freed: glibc keeps hundreds of MiB of what packing weights took."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def peak_memory_since(measure: Callable[[], None]) -> int:
    """Bytes by which `measure` raises this process's memory at most, whatever it gives back. 0 where Linux is not."""
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is in use now
    except OSError:
        return 0
    before = resident_memory()
    measure()
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return max(0, int(peak.split()[1]) * 1024 - before)


def blocks_that_fit(block_bytes: list[int], kv_memory: int | None, reserved: int = 0) -> int:
    """Blocks each model gets when pools of equal length share `kv_memory` bytes (None: a share of what is available).

    `reserved` bytes of what is available are for something else.
    Raises ValueError when not even one block fits.
    """
    if kv_memory is None:
        kv_memory = min(int(max(0, available_memory() - reserved) * DEFAULT_SHARE), DEFAULT_LIMIT)
    blocks = kv_memory // sum(block_bytes)
    if blocks < 1:
        raise ValueError(
            f"{show_size(kv_memory)} of KV memory hold not even one block of 16 tokens: "
            f"give --kv-memory at least {show_size(sum(block_bytes))}"
        )
    return blocks


RUNTIME_SETTINGS = {
    # 2 MiB pages (glibc 2.35 and newer): a token reads all weights, and with 4 KiB pages looking up the addresses of
    # the pages alone costs about a tenth of the time.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # How long a thread of the pool spins before it sleeps. libgomp's 300,000 rounds are milliseconds: where another
    # process has the second core, the spinning thread keeps its partner from running at all.
    "GOMP_SPINCOUNT": "6000",
}


def restart_with_runtime_settings() -> None:
    """Run this process anew, once, with what libc and libgomp read before any code of ours; the process id stays.

    Settings that the environment already has are left alone.
    """
    missing = {name: value for name, value in RUNTIME_SETTINGS.items() if name not in os.environ}
    if sys.platform == "linux" and missing:
        os.environ.update(missing)
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606
