"""The compiled decoder for a user whose cache folder cannot be written, or who has no home at all."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import native
from engine.native.compile import FOLDER, build, file_name, user_cache
from engine.native.runner import open_runner

pytestmark = pytest.mark.skipif(not native.able(), reason="this CPU has no AVX512-VNNI")


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that has seen this source before."""
    name = file_name(bool(torch.cpu.get_capabilities().get("avx512_bf16")))
    if (FOLDER / name).exists():
        pytest.skip("the decoder was compiled ahead of time")
    native.library()
    shutil.copy(user_cache() / "native" / name, tmp_path / "known.so")
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\nfor target; do :; done\ncp {tmp_path}/known.so "$target"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("cache", ["a file, not a folder", None])
def test_the_decoder_runs_though_nothing_can_be_kept(
    cache: str | None, quick_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    if cache is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", no_home)
    else:
        (tmp_path / cache).touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    library = native.library.__wrapped__()
    assert isinstance(library, ctypes.CDLL)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)).save_pretrained(tmp_path / "model")
    open_runner(tmp_path / "model", 8, library).allocate(4)
    assert "are not kept for the next start" in caplog.text


def test_a_cache_that_can_be_written_keeps_the_decoder(
    quick_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert native.library.__wrapped__() is not None
    (kept,) = (tmp_path / "cache" / "farthing" / "native").iterdir()
    monkeypatch.setenv("CXX", "false")
    assert build(kept.parent, bool(torch.cpu.get_capabilities().get("avx512_bf16"))) == kept
