"""The engines that Farthing's is compared with, how each is started, and what is missing here.

`python -m benchmarks.peers` says what is installed below $PEERS (~/.cache/peers); `python -m benchmarks.peers install
[llama.cpp] [vllm] [litellm] [portkey]` installs what is missing from the package index. transformers is one of this
project's own development dependencies; the gateways are in gateway_peers.py.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import gateway_peers, peer_models
from benchmarks.peer_install import INSTALLERS, llama_server, venv_python, vllm_version
from benchmarks.servers import System

SLOTS, CONTEXT = 32, 2048
"""Requests that llama.cpp works on at once, and what each may hold in tokens."""
KV_TOKENS = SLOTS * CONTEXT
"""Tokens that every system's KV cache has room for, vLLM's somewhat more (it takes whole GiB)."""
FAMILIES = ("llama.cpp", "vllm", "transformers")
PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
"""Libraries that vLLM's own documentation has loaded first on a CPU, where they are here."""


def cores() -> int:
    return len(os.sched_getaffinity(0))


def found(model: str, path: Path, wanted: Sequence[str]) -> tuple[list[System], list[str]]:
    """Peers for `model` whose family or name is in `wanted`, and a line for each wanted one that is not here."""
    systems: list[System] = []
    missing: list[str] = []
    for family in FAMILIES:
        if not any(name.startswith(family) for name in wanted):
            continue
        if problem := lacking(family):
            missing.append(problem)
            continue
        makers = {"llama.cpp": llama_cpp, "vllm": vllm, "transformers": transformers}
        systems += [s for s in makers[family](model, path) if family in wanted or s.name in wanted]
    known = set(FAMILIES) | {system.name for system in systems}
    missing += [f"{name}: no such peer" for name in wanted if name not in known and name not in INSTALLERS]
    return systems, missing


def lacking(family: str) -> str:
    """Why a family cannot run here; empty when it can."""
    here = {
        "llama.cpp": llama_server().is_file(),
        "vllm": bool(vllm_version()),
        "transformers": importlib.util.find_spec("transformers") is not None,
    }
    if here[family]:
        return ""
    how = f"python -m benchmarks.peers install {family}" if family in INSTALLERS else "pip install -e .[dev]"
    return f"{family}: not installed ({how})"


def llama_cpp(model: str, path: Path) -> list[System]:
    """llama.cpp's server: the file as it is, 4 and 8 bits; without flash attention (mostly faster on CPUs) and with."""
    systems = []
    for quant, file in peer_models.quantised(model, path).items():
        command = [str(llama_server()), "-m", str(file), "-a", model, "--host", "127.0.0.1", "--port", "{port}"]
        command += ["-t", str(cores()), "-tb", str(cores()), "-c", str(KV_TOKENS), "-np", str(SLOTS)]
        command += ["--no-kv-unified", "--no-ui"]
        bits = 8 if quant == "q8_0" else 4
        systems.append(System(f"llama.cpp {quant}", "llama.cpp", [*command, "-fa", "off"], model, weight_bits=bits))
        systems.append(System(f"llama.cpp {quant} fa", "llama.cpp", command, model, weight_bits=bits))
    return systems


def vllm(model: str, path: Path) -> list[System]:
    python = venv_python()
    command = [str(python.with_name("vllm")), "serve", str(peer_models.folder(model, path))]
    command += ["--served-model-name", model, "--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16"]
    command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "64"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    places = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), python.parent.parent / "lib")
    preload = [str(place / name) for name in PRELOADED for place in places if (place / name).is_file()]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(-(-KV_TOKENS * peer_models.kv_bytes(path) // 2**30)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preload),
    }
    return [System("vllm bf16", "vllm", command, model, env, slow_start=True)]


def transformers(model: str, path: Path) -> list[System]:
    command = [sys.executable, "-m", "benchmarks.transformers_server", str(peer_models.folder(model, path)), "{port}"]
    return [System("transformers bf16", "transformers", command, model, {"HF_HUB_OFFLINE": "1"})]


def farthing(model: str, path: Path, dtypes: Sequence[str]) -> tuple[list[System], list[str]]:
    """One system for each of `dtypes`; `int8+kv8` is int8 with KV in int8. What the engine lacks is named instead."""
    from engine.__main__ import DTypeName

    systems, missing = [], []
    for dtype in dtypes:
        weights, _, kv = dtype.partition("+")
        if weights not in set(DTypeName):
            missing.append(f"farthing {dtype}: the engine has no --dtype {weights}")
            continue
        if kv not in ("", "kv8"):
            missing.append(f"farthing {dtype}: the KV cache is as it comes or kv8")
            continue
        memory = KV_TOKENS * peer_models.kv_bytes(path) // (2 if kv else 1)
        command = [sys.executable, "-m", "engine", "serve", model, "--port", "{port}", "--dtype", weights]
        command += ["--kv-memory", str(memory), *(["--kv-dtype", "int8"] if kv else [])]
        bits = {"int4": 4, "int8": 8, "float32": 32}.get(weights, 16)
        systems.append(System(f"farthing {dtype}", "farthing", command, model, weight_bits=bits))
    return systems, missing


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "install":
        wanted = arguments[1:] or tuple(INSTALLERS)
        if unknown := [name for name in wanted if name not in INSTALLERS]:
            print(f"unknown: {', '.join(unknown)}; there are {', '.join(INSTALLERS)}", file=sys.stderr)
            return 2
        for name in wanted:
            INSTALLERS[name]()
    elif arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for peer in (*FAMILIES, *gateway_peers.PEERS):
        missing = gateway_peers.lacking(peer) if peer in gateway_peers.PEERS else lacking(peer)
        print(missing or f"{peer}: installed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
