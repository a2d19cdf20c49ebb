"""The `farthing` script at the top of the repository, on a miniature clone: real venv, real pip, no network."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "farthing"
version = "0.1"
dependencies = []

[project.optional-dependencies]
dev = []

[project.scripts]
farthing = "mini:main"
"""

BACKEND = '''\
"""The smallest PEP 660 backend: one wheel whose .pth file points here. It sleeps while a file named `slow` exists."""
import time, zipfile
from pathlib import Path

METADATA = "Metadata-Version: 2.1\\nName: farthing\\nVersion: 0.1\\nProvides-Extra: dev\\n"

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    while Path("slow").exists():
        time.sleep(0.05)
    with Path("builds").open("a") as file:
        file.write("x")
    name = "farthing-0.1-py3-none-any.whl"
    info = "farthing-0.1.dist-info"
    with zipfile.ZipFile(Path(wheel_directory) / name, "w") as wheel:
        wheel.writestr("mini.pth", str(Path.cwd()))
        wheel.writestr(f"{info}/METADATA", METADATA)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\\nfarthing = mini:main\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
'''

MINI = """\
import json, sys
def main():
    print(json.dumps(sys.argv[1:]))
    sys.exit(7 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "a clone"  # with a space: every expansion in the script must be quoted
    folder.mkdir()
    shutil.copy(ROOT / "farthing", folder)
    for name, content in {"pyproject.toml": PYPROJECT, "backend.py": BACKEND, "mini.py": MINI}.items():
        (folder / name).write_text(content)
    return folder


def call(clone: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "farthing", *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def builds(clone: Path) -> int:
    return len((clone / "builds").read_text())


def test_first_call_installs_and_later_ones_only_run(clone: Path) -> None:
    began = time.monotonic()
    first = call(clone, "up", "--port", "1 2")
    installing = time.monotonic() - began
    assert (first.returncode, first.stdout) == (0, '["up", "--port", "1 2"]\n')
    assert "making .venv" in first.stderr and "installing" in first.stderr
    began = time.monotonic()
    second = call(clone, "fail")
    assert time.monotonic() - began < installing / 3
    assert (second.returncode, second.stdout, second.stderr) == (7, '["fail"]\n', "")
    assert builds(clone) == 1
    # A changed pyproject.toml may name other dependencies; `test` needs the dev extra, once.
    with (clone / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    for expected, arguments in ((2, "up"), (2, "up"), (3, "test"), (3, "test"), (3, "up")):
        assert call(clone, arguments).returncode == 0
        assert builds(clone) == expected


def test_an_interrupted_install_is_repaired(clone: Path) -> None:
    (clone / "slow").touch()
    first = subprocess.Popen([clone / "farthing", "up"], stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (clone / ".venv" / ".farthing-unfinished").exists():
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    (clone / "slow").unlink()
    left_by_pip = clone / ".venv" / "half-written"
    left_by_pip.touch()
    second = call(clone, "up")
    assert (second.returncode, second.stdout) == (0, '["up"]\n')
    assert not left_by_pip.exists()  # it began again from an empty .venv


def test_a_failed_install_says_so_and_is_tried_again(clone: Path) -> None:
    good = (clone / "pyproject.toml").read_text()
    (clone / "pyproject.toml").write_text("not toml")
    first = call(clone, "up")
    assert first.returncode == 1 and first.stdout == "" and "tries again" in first.stderr
    (clone / "pyproject.toml").write_text(good)
    second = call(clone, "up")
    assert second.stdout == '["up"]\n' and "making .venv" not in second.stderr


def test_without_python_it_says_what_to_install(clone: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "env", "readlink", "dirname", "cksum", "flock"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    old = tools / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")  # what an older Python answers when asked whether it is 3.11
    old.chmod(0o755)
    result = call(clone, "up", PATH=str(tools))
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed" in result.stderr and "apt-get install" in result.stderr
