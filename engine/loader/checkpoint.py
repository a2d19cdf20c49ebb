"""What every loader returns: a configuration and tensors under one set of names, whatever the file calls them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.batch import ModelConfig


class ModelFileError(Exception):
    """A model file that cannot be served. The message names the file and the tensor, field or architecture."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Gemma 3's local attention: layer i sees `tokens` keys and rotates with base `rope_theta` where `layers[i]`."""

    tokens: int
    rope_theta: float
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model. Tensor names are GGUF's (`blk.0.attn_q.weight`), layouts are Hugging Face's:
    a projection is [out, in], and rotary pairs are the two halves of a head. Norm weights multiply as they are.
    """

    path: Path
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor in the file, under the file's own name."""
    stored_name: Callable[[str], str]
    """From our name to the file's."""
    read: Callable[[str], Tensor]
    """Float32 copy of the tensor with this (our) name, known to exist."""
    rope_divisors: Tensor | None = None
    """[head_dim / 2] what each rotary frequency is divided by, for models stretched past their first context."""
    sliding: SlidingWindow | None = None
    query_scale: float | None = None
    """Attention logits are multiplied by this instead of head_dim ** -0.5."""

    def __contains__(self, name: str) -> bool:
        return self.stored_name(name) in self.shapes

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The named tensor as float32, checked to have `shape`. Raises ModelFileError when missing or different."""
        stored = self.stored_name(name)
        found = self.shapes.get(stored)
        if found is None:
            raise ModelFileError(f"{self.path}: tensor {stored} is missing")
        if found != shape:
            raise ModelFileError(f"{self.path}: tensor {stored} has shape {list(found)}, expected {list(shape)}")
        return self.read(name)
