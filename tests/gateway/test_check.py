"""`farthing check` as a user runs it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.upfile import UpFile
from tests.gateway.scripted import Scripted

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "farthing.example.toml"


def check(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FARTHING_")}
    command = [str(Path(sys.executable).with_name("farthing")), "check", str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_it_explains_what_a_configuration_means() -> None:
    done = check(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert "small: qwen2.5-coder-0.5b" in done.stdout
    assert "upstream engine: engine at http://127.0.0.1:8001/v1, no key" in done.stdout
    assert "  billed input 0.05, cached 0.01, cache write 0.05, output 0.20, reasoning 0.20" in done.stdout
    assert "  runs on engine, costs 0.20 an hour of its device" in done.stdout
    assert done.stderr == ""


def test_two_configurations_apart_by_one_comma(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    text = EXAMPLE.read_text(encoding="utf-8")
    good.write_text(text, encoding="utf-8")
    bad.write_text(text.replace('"0.05", input_cached', '"0.05" input_cached', 1), encoding="utf-8")
    assert check(good).returncode == 0
    done = check(bad)
    assert done.returncode == 1
    first, line, caret = done.stderr.splitlines()
    number = text[: text.index('"0.05", input_cached')].count("\n") + 1
    assert first.startswith(f"{bad}:{number}:32: this is not valid TOML")
    assert line[caret.index("^") :].startswith('input_cached = "0.01"')


def test_the_nearest_setting_is_named(tmp_path: Path) -> None:
    path = tmp_path / "farthing.toml"
    path.write_text(EXAMPLE.read_text(encoding="utf-8").replace("\nthreshold", "\ntreshold", 1), encoding="utf-8")
    done = check(path)
    assert done.returncode == 1
    assert ":1: router.treshold is not a setting; did you mean `threshold`?" in done.stderr


def test_what_may_not_be_meant_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "farthing.toml"
    path.write_text(
        """
        roles = { small = "m", large = "m" }
        upstreams.a = { kind = "openrouter", api_key_env = "PATH" }
        upstreams.b = { kind = "ollama" }
        upstreams.c = { kind = "ollama" }
        models.m.upstreams = [{ upstream = "a", upstream_model = "x/y", weight = 2, max_concurrent = 3 }, "b"]
        models.m.fallbacks = ["n"]
        models.m.response_cache = { seconds = 90, shared_by = "team" }
        models.n = { upstreams = ["b"], price = { input_fresh = "1" }, max_output = 4096 }
        """
    )
    done = check(path)
    assert done.returncode == 0, done.stderr
    assert "  runs on a as x/y, weight 2, at most 3 at a time, reports its cost itself" in done.stdout
    assert "  asked again at most 2 times, then n may answer" in done.stdout
    assert "  its answers are given again for 90 seconds, within the same team" in done.stdout
    assert "note: no model uses the upstream 'c'" in done.stderr
    assert "note: 'm' has no price: its charge is unknown, and a hard budget refuses it" in done.stderr
    assert "note: 'n' has no price for cached, output, reasoning" in done.stderr
    assert (
        "note: 'm' has no max_output: under a hard budget a call without max_tokens holds, and asks for" in done.stderr
    )
    assert "note: 'n' has no max_output" not in done.stderr
    assert os.environ["PATH"] not in done.stdout + done.stderr


@pytest.mark.parametrize("healthy", [True, False])
async def test_a_probe_asks_whether_upstreams_are_there(tmp_path: Path, upstream: Scripted, healthy: bool) -> None:
    upstream.healthy = healthy
    path = tmp_path / "farthing.toml"
    path.write_text(EXAMPLE.read_text(encoding="utf-8").replace("http://127.0.0.1:8001/v1", upstream.url))
    done = await asyncio.to_thread(check, path, "--probe")
    assert done.returncode == (0 if healthy else 1)
    assert healthy or "the upstream engine answers 503 to a health check" in done.stderr


async def test_a_probe_of_what_farthing_up_runs_asks_where_its_engine_is(tmp_path: Path, upstream: Scripted) -> None:
    path = tmp_path / "farthing.toml"
    path.write_text((ROOT / "gateway/starter.toml").read_text(encoding="utf-8"))
    words = dict.fromkeys(("base_url", "api_key", "admin_key", "dashboard_url", "database_url"), "x")
    UpFile(**words, engine_url=upstream.url).write(tmp_path)
    done = await asyncio.to_thread(check, path, "--probe")
    assert done.returncode == 0, done.stderr
    assert f"asking engine at {upstream.url}, where `farthing up`" in done.stdout
    UpFile(**words).write(tmp_path)
    assert "the upstream engine does not answer" in (await asyncio.to_thread(check, path, "--probe")).stderr


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = check(tmp_path / "no.toml")
    assert done.returncode == 1 and "no.toml: it cannot be read: No such file or directory" in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [(b'a = 1\nb = "\xff"\n', "UTF-8"), (b"a = " + b"[" * 100_000, "nested too deeply")],
    ids=["latin-1", "deep"],
)
def test_a_file_that_is_no_text_or_has_no_bottom(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "farthing.toml"
    path.write_bytes(content)
    done = check(path)
    assert done.returncode == 1 and said in done.stderr
    assert "Traceback" not in done.stderr
