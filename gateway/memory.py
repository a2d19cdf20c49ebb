"""This process's memory once all that it needs is loaded: seldom searched for garbage, and on huge pages."""

import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

YOUNG_OBJECTS = 20_000
HUGE_PAGE = 2 * 1024 * 1024
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
"""Of Linux, see madvise(2); it knows the second from version 6.1 on."""
_HEAP = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ 00:00 0 *(?:\[heap\])?\n")


def collect_seldom() -> None:
    """Let the garbage collector look at new objects alone, and after many of them: requests leave next to no cycles,
    and what is loaded by now stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def use_huge_pages() -> None:
    """Have the heap as it is now on pages of 2 MiB, where the kernel has them to give.

    A request touches a little of everything that is loaded, on more pages of 4 KiB than a processor remembers the
    places of. What is mapped but hardly used, such as threads' stacks, stays as it is: it would become memory.
    """
    try:
        heap, madvise = list(_heap(Path("/proc/self/smaps"))), ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # another system
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, end, resident in heap:
        first, last = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if last > first and resident * 2 >= end - begin:
            madvise(first, last - first, MADV_HUGEPAGE)
            madvise(first, last - first, MADV_COLLAPSE)  # now; else, and if it cannot, in the kernel's own time


def _heap(smaps: Path) -> Iterator[tuple[int, int, int]]:
    """Begin, end and resident bytes of each private mapping of no file."""
    begin = end = 0
    with smaps.open(errors="replace") as lines:  # the names of files may be anything
        for line in lines:
            if found := _HEAP.fullmatch(line):
                begin, end = int(found[1], 16), int(found[2], 16)
            elif "-" in line.partition(" ")[0]:
                end = 0
            elif end and line.startswith("Rss:"):
                yield begin, end, int(line.split()[1]) * 1024
