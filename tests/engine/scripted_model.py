"""A served model that knows one text by heart, byte by byte: its prompt is the beginning, it says what follows."""

import torch
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.batch import FlatBatch
from engine.hosted import HostedModel
from engine.tokenizer import BYTE_OF_CHARACTER, Tokenizer
from tests.engine.fake_runner import FakeRunner

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """Token `b` is the byte b; `<eos>` comes after them."""
    backend = Backend(models.BPE(vocab=dict(BYTE_OF_CHARACTER), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(
        backend, "byte-level", special_tokens={"eos_token": "<eos>"}, add_bos=False, eos_ids=[EOS], chat_template=None
    )


class ScriptedRunner(FakeRunner):
    """The token after position p is the text's byte p + 1, or its end."""

    def __init__(self, text: bytes, sure: float = 20.0) -> None:
        super().__init__(vocabulary=EOS + 1)
        self.text, self.sure = text, sure

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        self._run(batch, [])
        rows = batch.logits_rows.tolist()
        logits = torch.zeros(len(rows), EOS + 1)
        for i, position in enumerate(batch.positions[rows].tolist()):
            follows = position + 1 < len(self.text)
            logits[i, self.text[position + 1] if follows else EOS] = self.sure
        return logits


def scripted_model(text: str | bytes) -> HostedModel:
    data = text if isinstance(text, bytes) else text.encode()
    return HostedModel("scripted", ScriptedRunner(data), byte_tokenizer(), num_blocks=64, max_batch_tokens=64)
