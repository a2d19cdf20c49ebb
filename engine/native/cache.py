"""Packed models kept on disk, so that only a model's first start dequantises and quantises its weights."""

import hashlib
import logging
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from engine.batch import ModelConfig
from engine.layers.rope import Rope
from engine.models.decoder import Decoder, Layer
from engine.native.compile import user_cache
from engine.native.packing import Packed

log = logging.getLogger("engine")

PARTS = ("batch.py", "gguf_header.py", "loader", "layers", "models", "native/packing.py", "native/cache.py")
"""Code that a packed model depends on, in the folder of the engine."""


def packed(source: Path, bits: int, make: Callable[[], Decoder]) -> Decoder:
    """`make()`, or what it gave for the same files, kept in the user's cache folder.

    A cache that cannot be read or written costs the time that it would have saved, and a line in the log.
    """
    try:
        folder = user_cache() / "packed"
    except FileNotFoundError as error:
        log.warning("The packed weights of %s are not kept for the next start: %s", source, error)
        return make()
    name = f"{source.resolve().stem}-{hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]}-int{bits}-"
    target = folder / f"{name}{_fingerprint(source)}.pt"
    if target.exists():
        try:
            with torch.serialization.safe_globals([ModelConfig, Rope, Decoder, Layer, Packed]):
                decoder: Decoder = torch.load(target, weights_only=True)
            return decoder
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            log.warning("Packing %s again, because %s cannot be read: %s", source, target, error)
    decoder = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            torch.save(decoder, made)
            for old in folder.glob(f"{name}*.pt"):
                old.unlink(missing_ok=True)
            made.replace(target)
    except (OSError, RuntimeError) as error:
        log.warning("The packed weights of %s are not kept for the next start: %s", source, error)
    return decoder


def _fingerprint(source: Path) -> str:
    """Of the model's files (by name, size and time) and of the code that reads and packs them."""
    digest = hashlib.sha256(torch.__version__.encode())
    for file in sorted(source.iterdir()) if source.is_dir() else [source]:
        status = file.stat()
        digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    engine = Path(__file__).parents[1]
    for part in PARTS:
        path = engine / part
        for code in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(code.read_bytes())
    return digest.hexdigest()[:16]
