"""One running Farthing for all clients, and what the clients themselves need."""

import asyncio
import hashlib
import os
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.clients.scripted import scripted_upstream
from tests.clients.serving import Farthing
from tests.clients.serving import farthing as running_farthing

HERE = Path(__file__).parent
CACHE = Path("~/.cache/farthing/clients").expanduser()


@pytest.fixture(scope="session")
def farthing(postgres_url: str, template_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farthing]:
    """The gateway in front of the real engine with two small models, and of a scripted upstream."""

    async def create() -> None:
        engine = create_async_engine(postgres_url, isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            await connection.execute(text(f"CREATE DATABASE clients TEMPLATE {template_database}"))
        await engine.dispose()

    asyncio.run(create())
    database_url = postgres_url.replace("/postgres?", "/clients?")
    folder = tmp_path_factory.mktemp("clients")
    with scripted_upstream() as scripted, running_farthing(database_url, scripted, folder) as running:
        yield running


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients take proxies and keys from the environment; here only what a test says counts."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture(scope="session")
def client_python() -> Path:
    """Python with what `python/requirements.txt` names, installed once for each state of that file."""
    requirements = HERE / "python/requirements.txt"
    folder = _cached("python", requirements)
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        command = [
            folder / "bin/python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--requirement",
            requirements,
        ]
        subprocess.run(command, check=True)
        (folder / "complete").touch()
    return folder / "bin/python"


@pytest.fixture(scope="session")
def node_modules(client_python: Path) -> Path:
    """The packages of `node/package-lock.json`, likewise, with the Node that came with the above."""
    folder = _cached("node", HERE / "node/package-lock.json")
    if not (folder / "complete").exists():
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / "node" / name, folder)
        env = {**os.environ, "PATH": f"{client_python.parent}:{os.environ['PATH']}"}
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, env=env, check=True)
        (folder / "complete").touch()
    return folder / "node_modules"


def _cached(name: str, lock: Path) -> Path:
    folder = CACHE / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
