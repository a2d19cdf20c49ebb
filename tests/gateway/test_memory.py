"""The heap on huge pages, looked at in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.memory import _heap

SMAPS = """\
55a0c0000000-55a0c1a00000 rw-p 00000000 00:00 0                          [heap]
Size:              26624 kB
Rss:               25000 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac sd
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                  12 kB
7f0001000000-7f0001400000 r-xp 00001000 fe:00 1234                       /usr/lib/libc.so.6
Size:               4096 kB
Rss:                4000 kB
7f0002000000-7f0002400000 rw-p 00001000 fe:00 1234                       /usr/lib/libc.so.6
Rss:                4000 kB
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
Rss:                  40 kB
"""

PROGRAM = """
from gateway.memory import use_huge_pages
kept = [[number] for number in range(500_000)]
def pages():
    return [int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")][0]
before = pages()
use_huge_pages()
print(before, pages(), sum(number for [number] in kept))
"""


def test_the_heap_is_what_is_private_and_of_no_file(tmp_path: Path) -> None:
    (tmp_path / "smaps").write_bytes(SMAPS.encode() + b"7f0003000000-7f0003400000 r-xp 0 fe:00 1 /home/jos\xe9/x.so\n")
    assert list(_heap(tmp_path / "smaps")) == [
        (0x55A0C0000000, 0x55A0C1A00000, 25_000 * 1024),
        (0x7F0000000000, 0x7F0000800000, 12 * 1024),
    ]


def test_what_is_on_the_heap_moves_to_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or re.search(r"\[(madvise|always)\]", setting.read_text()) is None:
        pytest.skip("this kernel gives no huge pages")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after, total = map(int, done.stdout.split())
    assert total == sum(range(500_000))
    assert after - before >= 20 * 1024, "kB"
