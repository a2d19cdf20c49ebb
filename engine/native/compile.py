"""Compiles the decoder. Imports nothing but the standard library: the wheel's build runs it too.

`python engine/native/compile.py` builds it ahead of time beside its source, as an image does.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "decoder.cpp"
SECONDS = 300

FLAGS = ("-O3", "-std=c++20", "-fno-math-errno", "-ffp-contract=off", "-pthread", "-fPIC", "-shared")
"""Without contraction: whether a product and a sum are rounded once or twice must not depend on what is inlined."""

INSTRUCTIONS = ("-mavx2", "-mfma", "-mf16c", *(f"-mavx512{name}" for name in ("f", "bw", "dq", "vl", "vnni")))
"""Named one by one, not -march=native: the library may be built on one machine for another."""


def flags(bf16: bool) -> list[str]:
    """Of the compiler, for CPUs that have AVX512-VNNI, and AVX512-BF16 too or not."""
    return [*FLAGS, *INSTRUCTIONS, *(["-mavx512bf16"] if bf16 else [])]


def file_name(bf16: bool) -> str:
    """Names the sources' contents and how they are compiled, so that neither can be out of date."""
    parts = [*(path.read_text() for path in [*sorted(FOLDER.glob("*.h")), SOURCE]), *flags(bf16)]
    return f"decoder-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


def user_cache() -> Path:
    """Where the user's programs keep what they can make again. Raises FileNotFoundError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farthing"
    except RuntimeError as error:
        raise FileNotFoundError("the user has no home folder (name a folder in XDG_CACHE_HOME)") from error


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def build(folder: Path, bf16: bool) -> Path:
    """The library in `folder`, compiled unless it is there. Takes a quarter of a minute.

    Raises FileNotFoundError without a compiler, or what compiling raised.
    """
    target = folder / file_name(bf16)
    if not target.exists():
        found = compiler()
        if found is None:
            raise FileNotFoundError("there is no C++ compiler (install g++, or name one in CXX)")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            command = [*found.split(), *flags(bf16), str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
            made.replace(target)
    return target


if __name__ == "__main__":
    for bf16 in (False, True):
        print(build(FOLDER, bf16))
