"""A stand-in for a model that answers with the text of its prompt, so that a test chooses what the model wants to say.

The prompt has the token `<say>` at its end: the answer is everything between the token `<text>` and that one, then
`<eos>`. Where a grammar does not allow the next token, it says the first allowed one.
"""

import torch

from engine.batch import BLOCK_TOKENS, FlatBatch, ModelConfig
from engine.hosted import HostedModel
from engine.sampling import choose
from engine.tokenizer import Tokenizer
from tests.engine.byte_words import byte_tokenizer

TEMPLATE = (
    "{% if enable_thinking is defined and enable_thinking %}{% endif %}{% if tools %}{{ tools | tojson }}"
    "<tool_call></tool_call>{% endif %}{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson if m.tool_calls }}"
    "{{ m.tool_call_id if m.tool_call_id }}{% endfor %}<text>{{ messages[-1].content }}<say>"
)


class ParrotRunner:
    """Same public face as engine.runner.ModelRunner."""

    block_bytes = 8 * BLOCK_TOKENS
    batch_invariant = True
    choose = staticmethod(choose)

    def __init__(self, tokenizer: Tokenizer, lead: int, max_context: int = 4096) -> None:
        """`lead`: tokens of the prompt after `<say>`, which open the answer."""
        self.lead = lead
        self.config = ModelConfig(
            architecture="fake", vocab_size=tokenizer.vocab_size + 3, num_layers=1, hidden_size=8, intermediate_size=16,
            num_heads=2, num_kv_heads=1, head_dim=4, max_context=max_context, rms_eps=1e-5, rope_theta=1e4,
            tied_embeddings=True,
        )  # fmt: skip
        self.text, self.say = tokenizer.control_tokens["<text>"], tokenizer.control_tokens["<say>"]
        self.eos = tokenizer.control_tokens["<eos>"]
        self.kv = torch.zeros(0, dtype=torch.int64)

    def allocate(self, num_blocks: int) -> None:
        self.kv = torch.zeros(num_blocks * BLOCK_TOKENS, dtype=torch.int64)

    def hidden(self, batch: FlatBatch) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        self.kv[batch.slot_mapping] = batch.token_ids
        rows = batch.logits_rows.tolist()
        logits = torch.zeros(len(rows), self.config.vocab_size)
        for i, row in enumerate(rows):
            owner = next(s for s in range(len(batch.context_lens)) if row < batch.query_starts[s + 1])
            positions = torch.arange(int(batch.positions[row]) + 1)
            blocks = batch.block_tables[owner].long()[positions // BLOCK_TOKENS]
            seen = self.kv[blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS].tolist()
            logits[i, self._next(seen)] = 9.0
        return logits

    def _next(self, seen: list[int]) -> int:
        if self.say not in seen or self.text not in seen:  # no prompt of ours: the engine measures its steps
            return self.eos
        start, end = seen.index(self.text) + 1, seen.index(self.say)
        said = len(seen) - end - 1 - self.lead
        return seen[start + said] if start + said < end else self.eos


def parrot(name: str = "parrot", template: str = TEMPLATE, lead: int = 0, **tokens: list[str]) -> HostedModel:
    control = ["<text>", "<say>", *tokens.get("control", [])]
    tokenizer = byte_tokenizer(template, control=control, added=tokens.get("added", []))
    return HostedModel(name, ParrotRunner(tokenizer, lead), tokenizer, 2048, 512)
