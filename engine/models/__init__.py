"""Model families, each written once for every backend."""

from engine.backends.base import Backend
from engine.loader import Checkpoint
from engine.models import gemma3, llama
from engine.models.decoder import Decoder


def build(checkpoint: Checkpoint, backend: Backend) -> Decoder:
    """Load the weights into the family's decoder. Raises ModelFileError for a missing, misshapen or unknown tensor."""
    read = gemma3.read if checkpoint.config.architecture == "gemma3" else llama.read
    decoder = read(checkpoint, backend)
    checkpoint.check_all_taken()
    return decoder
