"""Model families, each written once for every backend."""

from engine.backends.base import WeightStore
from engine.loader import Checkpoint
from engine.models import gemma, llama
from engine.models.decoder import Decoder


def build(checkpoint: Checkpoint, store: WeightStore) -> Decoder:
    """Load the weights into the family's decoder. Raises ModelFileError for a missing, misshapen or unknown tensor."""
    read = gemma.read if checkpoint.config.architecture.startswith("gemma") else llama.read
    decoder = read(checkpoint, store)
    checkpoint.check_all_taken()
    return decoder
