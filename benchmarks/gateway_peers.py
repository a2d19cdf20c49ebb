"""The gateways that are measured, how each is started and asked: Farthing with everything on, its peers with little.

LiteLLM's proxy runs one worker without a database, logs or callbacks; Portkey's gateway is one Node process. Neither
checks a key or counts money here. Farthing does: one key, hard budgets on its organisation, team, user and itself, and
every operation a row in PostgreSQL.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peer_install
from benchmarks.servers import System
from gateway.postgres import embedded_postgres

PEERS = ("litellm", "portkey")
PLENTY = "1000000"
"""A budget that no benchmark uses up."""
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Gateway:
    """One gateway: `rates` are the requests a second at which its delay is measured; `opens` whether thousands of open
    streams are."""

    system: System
    headers: Mapping[str, str]
    rates: Sequence[int] = (10, 50)
    opens: bool = True
    database: Path | None = None
    """Farthing's: where PostgreSQL keeps its files."""
    durable: Path | None = None
    """Farthing's: on which disk an answer's row is before the answer goes out."""


def upstream() -> System:
    return System("bare upstream", "upstream", [sys.executable, "-m", "benchmarks.gateway_upstream", "{port}"], "fake")


def lacking(peer: str) -> str:
    """Why a peer cannot run here; empty when it can."""
    if peer not in PEERS:
        return f"{peer}: no such peer"
    found = {"litellm": peer_install.litellm_version, "portkey": peer_install.portkey_version}[peer]()
    return "" if found else f"{peer}: not installed (python -m benchmarks.peers install {peer})"


def litellm(url: str, folder: Path, core: int) -> Gateway:
    """Settings that its documentation gives for production, and no key: checking one made it slower."""
    config = folder / "litellm.json"
    parameters = {"model": "openai/fake", "api_base": f"{url}/v1", "api_key": "none"}
    settings = {"telemetry": False, "num_retries": 0, "request_timeout": 60}
    models = [{"model_name": "fake", "litellm_params": parameters}]
    config.write_text(json.dumps({"model_list": models, "litellm_settings": settings}))  # JSON is YAML
    command = [str(peer_install.litellm()), "--config", str(config), "--host", "127.0.0.1"]
    command += ["--port", "{port}", "--num_workers", "1", "--telemetry", "False"]
    env = {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOG": "ERROR",
        "DISABLE_AIOHTTP_TRUST_ENV": "True",
    }
    system = System("litellm", "litellm", pinned(core, command), "fake", env, health="/health/liveliness")
    return Gateway(system, {}, rates=(10,), opens=False)


def portkey(url: str, core: int) -> Gateway:
    command = ["node", "--import", str(HERE / "portkey_streams.mjs"), str(peer_install.portkey())]
    command += ["--port={port}", "--headless"]
    env = {"NODE_ENV": "production", "TRUSTED_CUSTOM_HOSTS": "127.0.0.1,localhost"}
    system = System("portkey", "portkey", pinned(core, command), "fake", env, health="/")
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"{url}/v1", "authorization": "Bearer none"}
    return Gateway(system, headers)


@contextlib.contextmanager
def farthing(url: str, folder: Path, core: int) -> Iterator[Gateway]:
    """Farthing with a PostgreSQL of its own, which runs as long as the block, as `farthing up` runs it."""
    config = folder / "farthing.toml"
    config.write_text(_configuration(url))
    with embedded_postgres(folder / "postgres") as database:
        env = {
            "FARTHING_DATABASE_URL": database,
            "FARTHING_ADMIN_KEY_HASH": hashlib.sha256(b"benchmark").hexdigest(),
            "FARTHING_DATA_DIR": str(folder),
        }
        _command(env, "migrate")
        people = ["--team", "search", "--user", "ada"]
        [key] = json.loads(_command(env, "keys", "create", "benchmark", *people, "--json"))
        for scope in (["org", "default"], ["team", "search"], ["user", "ada"], ["key", key["id"]]):
            _command(env, "budgets", "set", *scope, PLENTY, "--currency", "USD")
        command = [sys.executable, "-P", "-m", "gateway", "--config", str(config), "--port", "{port}"]
        system = System("farthing", "farthing", pinned(core, command), "fake", env, health="/health/ready")
        yield Gateway(system, {"authorization": f"Bearer {key['key']}"}, database=folder / "postgres", durable=folder)


def _configuration(url: str) -> str:
    price = '{ input_fresh = "0.50", input_cached = "0.05", output_text = "1.50" }'
    return f"""
[roles]
small = "fake"
large = "fake"
[upstreams.fake]
kind = "openai"
base_url = "{url}/v1"
[models.fake]
upstreams = [{{ upstream = "fake", cost = {price} }}]
context = 8192
price = {price}
"""


def pinned(core: int, command: Sequence[str]) -> list[str]:
    return ["taskset", "-c", str(core), *command]


def _command(env: Mapping[str, str], *arguments: str) -> Any:
    command = [str(Path(sys.executable).with_name("farthing")), *arguments]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"farthing {' '.join(arguments)}: {done.stderr}")
    return done.stdout
