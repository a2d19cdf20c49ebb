"""Model families, each written once for every backend."""

from typing import Protocol

from torch import Tensor

from engine.backends.base import Backend
from engine.batch import FlatBatch
from engine.loader import Checkpoint
from engine.models.gemma3 import Gemma3
from engine.models.llama import Llama


class Model(Protocol):
    def forward(self, batch: FlatBatch, pools: list[Tensor]) -> Tensor:
        """Logits [L, vocab] float32 of the batch's wanted rows; `pools` has one KV pool a layer."""


def build(checkpoint: Checkpoint, backend: Backend) -> Model:
    """Load the weights into the family's model. Raises ModelFileError for a missing or misshapen tensor."""
    family = Gemma3 if checkpoint.config.architecture == "gemma3" else Llama
    return family(checkpoint, backend)
