"""Every workload against a real server, with a fake model behind that is quick and remembers every prefix."""

from collections.abc import Iterator

import pytest

from benchmarks.client import Client
from benchmarks.workloads import WORKLOADS, Figure, Sizes, Words
from tests.engine.fake_model import fake_model, fake_tokenizer
from tests.engine.serving import serving

SMALL = Sizes(8, 2, 2, 3, 4, 6, 2, 12, 2)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(fake_model(num_blocks=1200, budget=4096, max_context=2048)) as url:
        yield url


async def measure(url: str, name: str) -> dict[str, Figure]:
    async with Client(url, "fake") as client:
        figures = await WORKLOADS[name](client, Words(fake_tokenizer(), list(WORKLOADS).index(name)), SMALL)
    return {figure.metric: figure for figure in figures}


def test_prompts_have_the_asked_length_and_follow_from_the_seed() -> None:
    first, again, other = (Words(fake_tokenizer(), seed) for seed in (1, 1, 2))
    prompt = first.ids(300)
    assert len(prompt) == 300 and prompt == again.ids(300) and prompt != other.ids(300)
    assert prompt[:16] != first.ids(300)[:16]


@pytest.mark.parametrize("name", ["decode", "throughput", "ttft"])
async def test_speeds_and_times_are_positive(url: str, name: str) -> None:
    figures = await measure(url, name)
    assert all(figure.value > 0 for figure in figures.values() if figure.metric != "repeated over one-token")


async def test_a_streamed_answer_has_its_times_in_order_and_its_counts(url: str) -> None:
    prompt = Words(fake_tokenizer(), 7).ids(1024)
    async with Client(url, "fake") as client:
        cold, again = [await client.stream(prompt, 4) for _ in range(2)]
    assert 0 < cold.first <= cold.last and cold.text == again.text
    assert (cold.prompt_tokens, cold.cached_tokens, cold.output_tokens) == (1024, 0, 4)
    assert again.cached_tokens == 1008


async def test_repeated_over_one_token_is_a_difference(url: str) -> None:
    figures = await measure(url, "ttft")
    repeated, single = figures["first token, repeated"].value, figures["first token, one-token prompt"].value
    assert figures["repeated over one-token"].value == pytest.approx(repeated - single)


async def test_hit_rates_count_what_the_server_says_it_did_not_compute(url: str) -> None:
    turns = await measure(url, "multiturn")
    # A later turn computes its 64 tokens of question, what the last answer left unwritten, and the rest of a block.
    assert 75 < turns["hit rate after the first turn"].value < 95
    batch = await measure(url, "template")
    assert 80 < batch["hit rate"].value < 95 and batch["total"].value > 0
    rag = await measure(url, "rag")  # 6 questions on 4 documents: 2 find theirs computed
    assert 20 < rag["hit rate"].value < 34


async def test_an_answer_of_another_length_is_an_error(url: str) -> None:
    async with Client(url, "fake") as client:
        with pytest.raises(RuntimeError, match="400"):
            await client.complete([1] * 3000, 4)
        text, count = await client.write("abc", 5, ["never said"])
    assert 1 <= count <= 5 and isinstance(text, str)
