"""A deterministic stand-in for a model whose output depends on every KV entry it reads.

The KV of a token is a digest of the token, its position and the KV of the token before it, read through the block
table; the next token is a digest of the KV of the whole context, read the same way. A wrong slot, a stale or shared
block, a skipped or repeated position: each changes the text.
"""

import torch

from engine.batch import BLOCK_TOKENS, FlatBatch, ModelConfig
from engine.sampling import choose

VOCAB = 97
MASK = (1 << 61) - 1


def mix(*values: int) -> int:
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ value) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & MASK
        state ^= state >> 29
    return state


class FakeRunner:
    """Same public face as engine.runner.ModelRunner."""

    block_bytes = 8 * BLOCK_TOKENS
    batch_invariant = True
    choose = staticmethod(choose)

    def __init__(self, max_context: int = 512, vocabulary: int = VOCAB) -> None:
        self.config = ModelConfig(
            architecture="fake", vocab_size=vocabulary, num_layers=1, hidden_size=8, intermediate_size=16, num_heads=2,
            num_kv_heads=1, head_dim=4, max_context=max_context, rms_eps=1e-5, rope_theta=1e4, tied_embeddings=True,
        )  # fmt: skip
        self.kv: list[int] = []
        self.batches: list[FlatBatch] = []
        self.fail_next: Exception | None = None

    def allocate(self, num_blocks: int) -> None:
        self.kv = [0] * (num_blocks * BLOCK_TOKENS)

    def hidden(self, batch: FlatBatch) -> torch.Tensor:
        """[T, 8]: numbers that depend on every token up to each row's own."""
        seen = self._run(batch, list(range(len(batch.token_ids))))
        return torch.tensor([[(value >> (7 * i)) % 101 - 50.0 for i in range(8)] for value in seen])

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        seen = self._run(batch, batch.logits_rows.tolist())
        logits = torch.zeros(len(seen), VOCAB)
        for row, value in enumerate(seen):
            logits[row, value % VOCAB] = 1.0
        return logits

    def _run(self, batch: FlatBatch, wanted: list[int]) -> list[int]:
        """Write the batch's KV; returns what each wanted row has seen."""
        if self.fail_next:
            error, self.fail_next = self.fail_next, None
            raise error
        self.batches.append(batch)
        found: dict[int, int] = {}
        for s, context in enumerate(batch.context_lens):
            first, end = batch.query_starts[s], batch.query_starts[s + 1]
            table = batch.block_tables[s].tolist()
            slot = [table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(context)]
            for row in range(first, end):
                position = int(batch.positions[row])
                assert position == context - (end - row), "positions are not the last ones of the context"
                assert int(batch.slot_mapping[row]) == slot[position], "slot and block table disagree"
                before = self.kv[slot[position - 1]] if position else 0
                self.kv[slot[position]] = mix(int(batch.token_ids[row]), position, before)
            for row in range(first, end):
                if row in wanted:
                    found[row] = mix(*(self.kv[slot[p]] for p in range(int(batch.positions[row]) + 1)))
        return [found[row] for row in wanted]


def reference(prompt: list[int], count: int) -> list[int]:
    """What FakeRunner says after `prompt`, computed without blocks, chunks or batches."""
    tokens, kv, out = list(prompt), [], []
    for position, token in enumerate(tokens):
        kv.append(mix(token, position, kv[-1] if kv else 0))
    for _ in range(count):
        out.append(mix(*kv) % VOCAB)
        kv.append(mix(out[-1], len(kv), kv[-1]))
    return out
