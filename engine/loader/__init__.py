"""Model files in, named float32 tensors and one configuration out."""

from pathlib import Path

from engine.loader import gguf, safetensors
from engine.loader.checkpoint import Checkpoint, LayerAttention, ModelFileError, ModelSettings

__all__ = ["Checkpoint", "LayerAttention", "ModelFileError", "ModelSettings", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a Hugging Face folder. Raises ModelFileError, naming the file, tensor or architecture."""
    if path.is_dir():
        return safetensors.open_folder(path)
    if path.is_file():
        return gguf.open_file(path)
    raise ModelFileError(f"{path}: no such file or folder; give a .gguf file or a Hugging Face model folder")
