"""Starting a server, asking it, ending it: on the transformers peer with a tiny random model."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.client import Answer, Client
from benchmarks.servers import Foreign, System, start, tree

CHARACTERS = [chr(33 + i) for i in range(90)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> System:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(CHARACTERS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    command = [sys.executable, "-m", "benchmarks.transformers_server", str(folder), "{port}"]
    return System("tiny", "transformers", command, "tiny", {"HF_HUB_OFFLINE": "1"})


def test_a_padded_batch_answers_as_each_would_be_answered_alone(system: System) -> None:
    prompts = [[5, 6, 7], [9] * 20, list(range(40))]

    async def ask(url: str) -> tuple[list[Answer], list[Answer], Answer]:
        async with Client(url, "tiny") as client:
            together, _ = await client.together(prompts, 4)
            alone = [await client.complete(prompt, 4) for prompt in prompts]
            return together, alone, await client.stream(prompts[2], 4)

    with start(system) as running:
        assert running.ready > 0 and running.peak_memory() > running.shared_out_memory() // 2 > 0
        foreign = Foreign(running.pid)
        together, alone, streamed = asyncio.run(ask(running.url))
        assert 0 <= foreign.cores() < 1000
        pid = running.pid
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.prompt_tokens for answer in together] == [3, 20, 40]
    assert streamed.text == alone[2].text and streamed.first < streamed.last and len(streamed.text) == 4
    assert tree(pid) == [pid] and not Path(f"/proc/{pid}").exists()


def test_a_server_that_does_not_start_says_why() -> None:
    broken = System("broken", "none", [sys.executable, "-c", "raise SystemExit('no such weights')"], "m")
    with pytest.raises(RuntimeError, match=r"broken did not start:\s+no such weights"), start(broken):
        pass
