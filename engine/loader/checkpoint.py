"""What every loader returns: a configuration and tensors under one set of names, whatever the file calls them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from engine.batch import ModelConfig
from engine.layers.rope import Rope

ATTENTION_INPUT = frozenset(["attn_q", "attn_k", "attn_v"])
FEED_FORWARD = frozenset(["ffn_gate", "ffn_up", "ffn_down"])

# Far above any model's, and small enough that nothing made from a hostile file's numbers fills the memory.
SIZE_LIMITS = dict.fromkeys(
    ["vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "max_context"], 1 << 31
) | {"num_layers": 1 << 14, "head_dim": 1 << 14}


class ModelFileError(Exception):
    """A model file that cannot be served. The message names the file and the tensor, field or architecture."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How far one layer looks back, and which of the model's rotary embeddings it uses."""

    window: int | None = None
    rope: int = 0


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """All of a model that is not a tensor."""

    config: ModelConfig
    ropes: tuple[Rope, ...]
    layers: tuple[LayerAttention, ...]
    scale: float
    """What attention scores are multiplied by."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    biases: frozenset[str] = frozenset()
    """The projections that have one (`attn_q`), in every layer."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model. Tensor names are GGUF's (`blk.0.attn_q.weight`), layouts are Hugging Face's:
    a projection is [out, in], and rotary pairs are the two halves of a head. Norm weights multiply as they are.
    """

    path: Path
    settings: ModelSettings
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor that the model may have, under the file's own name."""
    stored_name: Callable[[str], str]
    """From our name to the file's."""
    read: Callable[[str], Tensor]
    """Float32 copy of the tensor with this (our) name, known to exist."""
    taken: set[str] = field(default_factory=set)
    """Tensors that were read, under the file's own names."""

    @property
    def config(self) -> ModelConfig:
        return self.settings.config

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
        self.taken.add(stored)
        return self.read(name)

    def check_all_taken(self) -> None:
        """Raises ModelFileError naming a tensor that nothing has read: the model would not be what it was trained to
        be without it."""
        left = sorted(self.shapes.keys() - self.taken)
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise ModelFileError(
                f"{self.path}: tensor {left[0]}{more} has no place in a {self.config.architecture} model here: "
                "the model is of another architecture or a variant that Farthing cannot run"
            )


def check_sizes(config: ModelConfig, where: object) -> ModelConfig:
    """The configuration, if its numbers can be a model's. Raises ModelFileError, saying which cannot."""
    for name, limit in SIZE_LIMITS.items():
        size = getattr(config, name)
        if not 0 < size < limit:
            raise ModelFileError(f"{where}: {name} is {size}, and must be above 0 and below {limit}")
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{where}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelFileError(f"{where}: the head size {config.head_dim} is odd, so it has no rotary pairs")
    if not (config.rms_eps > 0 and config.rope_theta > 1):
        raise ModelFileError(
            f"{where}: the norm's epsilon {config.rms_eps} must be above 0 and the rotary base {config.rope_theta} "
            "above 1"
        )
    return config
