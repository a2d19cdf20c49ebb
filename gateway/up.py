"""`farthing up`: everything on one machine, from an empty folder to the first answer."""

import asyncio
import hashlib
import http.client
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from sqlalchemy import URL

from billing.audit import act_as
from gateway import datadir
from gateway.banner import banner
from gateway.connect import asyncpg_url, libpq_url, transaction
from gateway.first_key import working_key
from gateway.postgres import EmbeddedPostgres
from gateway.processes import PythonChild
from gateway.supervisor import StopRequested, Supervisor
from gateway.upfile import UpFile

DEFAULT_ROLES = {"small": "qwen2.5-coder-0.5b", "large": "qwen2.5-coder-1.5b"}
DEMO_ROLES = {"small": "smollm2-135m", "large": "qwen2.5-coder-0.5b"}
ENGINE_PATIENCE = 10.0
GATEWAY_PATIENCE = 45.0
"""Seconds a stopping gateway gets; its own `limits.grace_seconds` for open answers should be less."""

_console = Console(stderr=True, highlight=False)  # progress goes to stderr, what scripts may want to stdout


class UpError(RuntimeError):
    """`farthing up` cannot go on; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line of `farthing up`. None means not given: the configuration or the default decides."""

    data_dir: Path
    port: int
    small: str | None
    large: str | None
    demo: bool
    database_url: str | None
    dtype: str | None
    engine: bool


def up(options: Options) -> None:
    """Run until a stop signal, then stop everything.

    Raises UpError, DataDirError, DatabaseUnavailableError, PostgresFailedError or PartDiedError, each with a sentence
    for the person at the terminal; whatever had been started is stopped by then.
    """
    supervisor = Supervisor(say)
    with datadir.locked(options.data_dir):
        check_port(options.port)
        try:
            with supervisor.running():
                bring_up(supervisor, options)
                supervisor.watch()
        except StopRequested:
            say("stopped")


def bring_up(supervisor: Supervisor, options: Options) -> None:
    """Start every part and print the banner once they answer."""
    config_path, config = datadir.configuration(options.data_dir)
    roles = chosen_roles(options, config)
    if options.engine:
        for model in dict.fromkeys(roles.values()):
            pull(model)
    served = {role: served_name(model) for role, model in roles.items()}
    add_missing_models(served, config, config_path)
    url = start_database(supervisor, options)
    environment = {f"FARTHING_ROLES__{role.upper()}": model for role, model in served.items()}
    engine_port = free_port()
    engine_url = f"http://127.0.0.1:{engine_port}/v1" if options.engine else ""
    if options.engine:
        start_engine(supervisor, options, list(dict.fromkeys(roles.values())), engine_port)
        environment["FARTHING_UPSTREAMS__ENGINE__BASE_URL"] = engine_url
    with step("database: migrations"):
        migrate(url)
    state = new_state(options, url, engine_url)
    if options.engine:
        with step(f"engine: loading {' and '.join(dict.fromkeys(served.values()))}"):
            supervisor.wait_until(lambda: answers(engine_port, "/health"))
    environment |= {
        "FARTHING_DATABASE_URL": url.render_as_string(hide_password=False),
        "FARTHING_ADMIN_KEY_HASH": hashlib.sha256(state.admin_key.encode()).hexdigest(),
        "FARTHING_DATA_DIR": str(options.data_dir.resolve()),
    }
    start_gateway(supervisor, options, config_path, environment)
    # Upstreams that are not ours may well come later than we do.
    health = "/health/ready" if options.engine else "/health/live"
    with step(f"gateway: waiting for http://127.0.0.1:{options.port}{health}"):
        supervisor.wait_until(lambda: answers(options.port, health))
    try:
        state.write(options.data_dir)
    except OSError as error:
        raise UpError(f"cannot write {options.data_dir / 'up.json'}: {error.strerror}") from error
    print(banner(state, served["small"], served["large"]), flush=True)


def start_engine(supervisor: Supervisor, options: Options, models: list[str], port: int) -> None:
    arguments = ["engine", "serve", *models, "--host", "127.0.0.1", "--port", str(port)]
    if options.dtype is not None:
        arguments += ["--dtype", options.dtype]
    log = datadir.log_file(options.data_dir, "engine")
    supervisor.start(PythonChild("engine", log, arguments, {}, ENGINE_PATIENCE))


def start_gateway(supervisor: Supervisor, options: Options, config: Path, environment: dict[str, str]) -> None:
    arguments = ["gateway", "--config", str(config), "--host", "127.0.0.1", "--port", str(options.port)]
    log = datadir.log_file(options.data_dir, "gateway")
    supervisor.start(PythonChild("gateway", log, arguments, environment, GATEWAY_PATIENCE))


def new_state(options: Options, url: URL, engine_url: str) -> UpFile:
    """What up.json will say: addresses of this run, keys of the last one if they still work."""
    before = UpFile.read(options.data_dir)
    root = f"http://127.0.0.1:{options.port}"
    return UpFile(
        base_url=f"{root}/v1",
        api_key=asyncio.run(_working_key(url, before.api_key if before else None)),
        admin_key=before.admin_key if before else f"fa-{secrets.token_urlsafe(32)}",
        dashboard_url=f"{root}/dashboard",
        database_url=libpq_url(url),
        engine_url=engine_url,
    )


def chosen_roles(options: Options, config: dict[str, Any]) -> dict[str, str]:
    """The model of each role: the option if given, else the demo's, else the configuration's, else the default."""
    base = DEMO_ROLES if options.demo else {**DEFAULT_ROLES, **config.get("roles", {})}
    given = {"small": options.small, "large": options.large}
    return {role: given[role] or base[role] for role in DEFAULT_ROLES}


def served_name(model: str) -> str:
    """What the engine calls a model: its name in the catalogue, or of a path the last part without `.gguf`."""
    path = Path(model)
    if not path.exists():
        return model
    return path.stem if path.is_file() else path.resolve().name


def add_missing_models(served: dict[str, str], config: dict[str, Any], config_path: Path) -> None:
    """Every model needs its entry in farthing.toml, which says where it runs and what it costs.

    A model without one is added without a price, so it is served and its charge is unknown rather than zero. Raises
    DataDirError when the file cannot be added to.
    """
    missing = [model for model in dict.fromkeys(served.values()) if model not in config.get("models", {})]
    for model in missing:
        datadir.add_model(config_path, config, model)
        say(f"{model} has no price yet: it was added to {config_path}, where you can set one")


def pull(model: str) -> None:
    """Fetch a model of the catalogue, with the engine's own progress bar; a path is used as it is."""
    if Path(model).exists():
        return
    command = [sys.executable, "-P", "-m", "engine", "models", "pull", model]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode != 0:
        raise UpError(
            f"the model {model!r} could not be had (the reason stands above); `farthing models list` shows all"
        )


def start_database(supervisor: Supervisor, options: Options) -> URL:
    """Start the embedded PostgreSQL, or check that the given one answers."""
    if options.database_url is not None:
        url = asyncpg_url(options.database_url)
        asyncio.run(_check(url))
        return url
    log = datadir.log_file(options.data_dir, "postgres")
    server = EmbeddedPostgres(options.data_dir / "postgres", log=log)
    with step("database: starting PostgreSQL"):
        supervisor.start(server)
    return asyncpg_url(server.url)


async def _check(url: URL) -> None:
    async with transaction(url):
        pass


async def _working_key(url: URL, known: str | None) -> str:
    async with transaction(url) as connection:
        await act_as(connection, "farthing up")
        return await working_key(connection, known)


def migrate(url: URL) -> None:
    """Bring the schema up to date, in a process of its own (the gateway knows nothing of migrations)."""
    environment = {**os.environ, "FARTHING_DATABASE_URL": url.render_as_string(hide_password=False)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "migrations"], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-15:])
        raise UpError(f"the database could not be brought up to date:\n{tail}")


def check_port(port: int) -> None:
    """Raise UpError when `port` on the loopback address is taken: better now than after a minute of loading."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UpError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(port: int, path: str) -> bool:
    """Whether `GET path` on the loopback address says 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def say(text: str) -> None:
    _console.print(f"farthing: {text}", markup=False, soft_wrap=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Show what is being waited for: a spinner at a terminal, a line in a log."""
    if _console.is_terminal:
        with _console.status(text):
            yield
    else:
        say(text)
        yield
