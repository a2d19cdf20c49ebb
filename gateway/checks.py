"""`farthing test`: the linters, the type checker and pytest, over a clone."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEV_MODULES = ("mypy", "playwright", "pytest", "ruff", "openai")


def run_all(pytest_arguments: list[str]) -> int:
    """Run everything; the first exit code that is not 0, else 0."""
    if not (ROOT / "tests" / "conftest.py").exists():
        return _say("`farthing test` runs in a clone of the repository, and this is an installed package")
    missing = [module for module in DEV_MODULES if importlib.util.find_spec(module) is None]
    if missing:
        return _say(f"{', '.join(missing)} missing here: `./farthing test` installs what tests need")
    if not have_chromium():
        return 1
    commands = [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["pytest", *pytest_arguments],
    ]
    for command in commands:
        print(f"farthing: {' '.join(command)}", file=sys.stderr, flush=True)
        code = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode
        if code != 0:
            return _say(f"{command[0]} failed", code)
    return 0


def have_chromium() -> bool:
    """Whether the browser tests find Chromium, after installing it where we may (root, on Debian's family)."""
    if shutil.which("chromium"):
        return True
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        _say("the browser tests need Chromium at /usr/bin/chromium: install it (Debian: apt-get install chromium)")
        return False
    _say("installing Chromium for the browser tests")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium"],
    ):
        if subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode != 0:
            _say(f"`{' '.join(command)}` failed")
            return False
    return True


def _say(text: str, code: int = 1) -> int:
    print(f"farthing: {text}", file=sys.stderr, flush=True)
    return code
