"""Clients that have an environment of their own: frameworks in Python, SDKs in JavaScript, the README's examples."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.serving import Farthing

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]  # a first run installs them
HERE = Path(__file__).parent


def run(command: list[str | Path], folder: Path, farthing: Farthing, bin: Path) -> str:
    """What `command` prints, with the programs in `bin` before all others."""
    env = farthing.environment
    env |= {"PATH": f"{bin}:{env['PATH']}", "LLM_USER_PATH": str(folder / "llm"), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_frameworks_in_python(client_python: Path, tmp_path: Path, farthing: Farthing) -> None:
    shutil.copy(HERE / "python/frameworks.py", tmp_path)
    run([client_python, "-m", "pytest", "-q", "frameworks.py"], tmp_path, farthing, client_python.parent)


@pytest.mark.parametrize("name", sorted(path.name for path in (HERE / "node").glob("*.test.mjs")))
def test_sdks_in_javascript(
    name: str, client_python: Path, node_modules: Path, tmp_path: Path, farthing: Farthing
) -> None:
    shutil.copy(HERE / "node" / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(node_modules)
    run(["node", "--test", name], tmp_path, farthing, client_python.parent)
