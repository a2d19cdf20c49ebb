"""Starts the engine as a process: loads models, decides how much memory their caches get, serves until a signal."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn

from engine.batch import BLOCK_TOKENS
from engine.front import Front
from engine.hosted import HostedModel
from engine.loader import ModelFileError
from engine.memory import blocks_that_fit, resident_memory, return_freed_memory, show_size
from engine.runner import DType, KvType, load
from engine.sampling_peak import sampling_peak
from engine.scheduler import MAX_RUNNING
from engine.server import create_app
from engine.tokenizer import load_tokenizer

log = logging.getLogger("engine")

GRACE = 5
"""Seconds that running requests have to finish after a signal; then they are aborted and answered."""

SWITCH_INTERVAL = 2e-4
"""Seconds that the step loop waits for the interpreter while the event loop has it; Python's own 5 ms are a step."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    models: dict[str, Path]
    dtype: DType
    kv_dtype: KvType | None
    kv_memory: int | None
    """Bytes for the KV of all models together; None takes a share of what is free."""
    threads: int | None
    max_batch_tokens: int
    tenant_floor: float
    """Part of the KV cache (0 to 1) of which each tenant keeps an even share, whatever the others ask for."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port in use is found out before anything is loaded. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def load_models(options: ServeOptions) -> list[HostedModel]:
    """Load every model and share the KV memory out among them. Raises ModelFileError, TokenizerError or ValueError."""
    loaded = {
        name: (load(path, options.dtype, options.threads, kv=options.kv_dtype), load_tokenizer(path))
        for name, path in options.models.items()
    }
    return_freed_memory()
    rows = min(MAX_RUNNING, options.max_batch_tokens)
    peaks = {name: sampling_peak(runner.config.vocab_size, rows) for name, (runner, _) in loaded.items()}
    block_bytes = [runner.block_bytes for runner, _ in loaded.values()]
    blocks = blocks_that_fit(block_bytes, options.kv_memory, max(peaks.values()))
    return [
        HostedModel(name, runner, tokenizer, blocks, options.max_batch_tokens, options.tenant_floor, peaks[name])
        for name, (runner, tokenizer) in loaded.items()
    ]


def describe(options: ServeOptions, models: list[HostedModel], address: str) -> str:
    """What was decided, in a few lines."""
    lines = [f"Farthing engine at {address}/v1"]
    plain_kv = "float32" if options.dtype == "float32" else "bfloat16"
    for model in models:
        config, pool = model.runner.config, model.blocks.num_blocks * model.runner.block_bytes
        lines += [
            f"  model    {model.name}: {config.architecture}, {config.num_layers} layers, {options.dtype} weights, "
            f"context {model.max_context:,} tokens",
            f"  blocks   {model.blocks.num_blocks:,} of {BLOCK_TOKENS} tokens = {model.pool_tokens:,} tokens of KV "
            f"cache in {options.kv_dtype or plain_kv}, {show_size(pool)}",
            f"  cost     {model.cost}",
        ]
    sampling = show_size(max(model.sampling_peak for model in models))
    lines.append(
        f"  memory   {show_size(resident_memory())} now; the KV cache takes its share as it fills, sampling at most "
        f"{sampling}"
    )
    requests = len(models[0].scheduler.table)
    lines.append(
        f"  threads  {torch.get_num_threads()}; a step computes up to {options.max_batch_tokens} tokens of {requests} "
        "requests"
    )
    return "\n".join(lines)


def serve(options: ServeOptions, listener: socket.socket) -> str | None:
    """Serve on `listener` until SIGTERM or SIGINT. Returns why it could not, or None after a graceful end."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    return asyncio.run(_serve(options, listener))


async def _serve(options: ServeOptions, listener: socket.socket) -> str | None:
    front = Front()
    config = uvicorn.Config(
        create_app(front), log_level="warning", access_log=False, timeout_graceful_shutdown=2 * GRACE, backlog=2048
    )
    server = _Server(config, front)
    # uvicorn's own handler, so that a signal before it starts counts too. It raises the signal again once it is done:
    # by then this changes nothing, and the process leaves with status 0.
    signal.signal(signal.SIGTERM, server.handle_exit)
    signal.signal(signal.SIGINT, server.handle_exit)
    loop = asyncio.get_running_loop()
    problem: str | None = None

    def opened(models: list[HostedModel]) -> None:
        host, port = listener.getsockname()[:2]
        print(describe(options, models, f"http://{f'[{host}]' if ':' in host else host}:{port}"), flush=True)
        front.open(models)

    def failed(message: str) -> None:
        nonlocal problem
        problem = message
        server.should_exit = True

    def work() -> None:
        try:
            models = load_models(options)
        except (ModelFileError, ValueError, OSError, MemoryError) as error:
            loop.call_soon_threadsafe(failed, str(error) or type(error).__name__)
        except Exception as error:
            log.exception("Loading failed")
            loop.call_soon_threadsafe(failed, f"Loading failed: {error}")
        else:
            loop.call_soon_threadsafe(opened, models)

    # A thread of its own, not the loop's executor: a signal while it loads must not wait for it.
    loader = threading.Thread(target=work, name="engine-load", daemon=True)
    loader.start()
    await server.serve(sockets=[listener])
    if loader.is_alive():
        # It is inside torch: the interpreter's own end would unwind its stack through C++ code and abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return problem


class _Server(uvicorn.Server):
    """Answers what is still running after the grace period instead of cutting its connection."""

    def __init__(self, config: uvicorn.Config, front: Front) -> None:
        super().__init__(config)
        self._front = front

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._front.is_stopping = True
        asyncio.get_running_loop().call_later(GRACE, self._front.abort_all)
        await super().shutdown(sockets)
