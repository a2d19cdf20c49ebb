"""A served model made of FakeRunner and a real, tiny tokenizer: a token a printable character, and `<eos>`."""

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.hosted import HostedModel
from engine.tokenizer import Tokenizer
from tests.engine.fake_runner import VOCAB, FakeRunner, reference

EOS = VOCAB - 1
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def fake_tokenizer() -> Tokenizer:
    characters = [chr(33 + i) for i in range(94)] + ["Ġ", "Ċ"]
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    assert backend.token_to_id("<eos>") == EOS
    return Tokenizer(
        backend,
        "byte-level",
        special_tokens={"eos_token": "<eos>"},
        add_bos=False,
        eos_ids=[EOS],
        chat_template=TEMPLATE,
    )


def fake_model(name: str = "fake", num_blocks: int = 64, budget: int = 64, max_context: int = 512) -> HostedModel:
    return HostedModel(name, FakeRunner(max_context), fake_tokenizer(), num_blocks, budget)


def expected_text(prompt: str, count: int) -> str:
    """What the fake model answers to `prompt` within `count` tokens when nothing else stops it, `<eos>` skipped."""
    tokenizer = fake_tokenizer()
    return tokenizer.decode(reference(tokenizer.encode(prompt, add_special=True), count))
