"""What is asked of every system: the same token ids in the same order, once a repetition.

Prompts are seeded random English words. A repetition has prompts of its own, so that one which should arrive cold does.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.client import Answer, Client
from engine.tokenizer import Tokenizer

TEXT = """
river table winter paper garden window letter summer kitchen music forest market bridge teacher village machine evening
silver station morning doctor island weather engine harbour ladder mountain pocket number question answer castle farmer
basket candle corner dinner finger hammer jacket kettle lemon mirror needle orange pencil rabbit sailor ticket valley
wagon yellow apple butter circle dragon eagle flower ground honey insect journey knight lesson meadow north ocean people
"""
COMMON = TEXT.split()


@dataclass(frozen=True)
class Sizes:
    """How much of each workload is run, in requests and tokens."""

    decode_out: int = 128
    many_out: int = 64
    conversations: int = 8
    turns: int = 6
    turn_out: int = 48
    questions: int = 32
    question_out: int = 32
    batch: int = 200
    batch_out: int = 16


FULL = Sizes()
QUICK = Sizes(64, 16, 4, 3, 16, 12, 8, 40, 8)


@dataclass(frozen=True)
class Figure:
    """One measurement of one repetition. `key` names it where systems are compared by it."""

    key: str
    workload: str
    metric: str
    unit: str
    value: float


class Words:
    """Prompts of exact token counts; equal seeds give equal prompts."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer, self._draw = tokenizer, random.Random(seed)

    def ids(self, count: int) -> list[int]:
        # A word is at least one token.
        text = " " + " ".join(self._draw.choice(COMMON) for _ in range(count))
        return self._tokenizer.encode(text, add_special=False)[:count]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


async def decode(client: Client, words: Words, sizes: Sizes) -> list[Figure]:
    answer = await client.stream(words.ids(64), sizes.decode_out)
    rate = (sizes.decode_out - 1) / (answer.last - answer.first)
    return [Figure("decode_b1", f"1 request, 64 in, {sizes.decode_out} out", "decode", "tok/s", rate)]


async def throughput(client: Client, words: Words, sizes: Sizes) -> list[Figure]:
    """Output tokens over wall time, the prompts' own time included."""
    figures = []
    for count in (8, 32):
        _, wall = await client.together([words.ids(256) for _ in range(count)], sizes.many_out)
        label = f"{count} at once, 256 in, {sizes.many_out} out"
        figures.append(Figure(f"throughput_c{count}", label, "throughput", "tok/s", count * sizes.many_out / wall))
    return figures


async def first_token(client: Client, words: Words, sizes: Sizes) -> list[Figure]:
    """Time to first token of a long prompt, of the same prompt again, and of a prompt of one token."""
    prompt = words.ids(1024)
    cold = (await client.stream(prompt, 4)).first
    again = [await client.stream(prompt, 4) for _ in range(3)]
    single = [(await client.stream(words.ids(1), 4)).first for _ in range(3)]
    warm, least = statistics.median(answer.first for answer in again), statistics.median(single)
    name = "1,024-token prompt"
    return [
        Figure("ttft_1024_cold", name, "first token, cold", "ms", cold * 1e3),
        Figure("", name, "first token, repeated", "ms", warm * 1e3),
        Figure("", name, "first token, one-token prompt", "ms", least * 1e3),
        Figure("ttft_1024_warm_ms_over_one_token", name, "repeated over one-token", "ms", (warm - least) * 1e3),
    ]


async def multiturn(client: Client, words: Words, sizes: Sizes) -> list[Figure]:
    """Conversations side by side over one system prompt; a turn carries all before it, the answers included."""
    system = words.ids(512)
    asked = [[words.ids(64) for _ in range(sizes.turns)] for _ in range(sizes.conversations)]

    async def converse(questions: list[list[int]]) -> list[Answer]:
        history, answers = list(system), []
        for question in questions:
            history += question
            answers.append(await client.complete(history, sizes.turn_out))
            history += words.encode(answers[-1].text)[: sizes.turn_out]
        return answers

    began = time.perf_counter()
    conversations = await asyncio.gather(*(converse(questions) for questions in asked))
    wall = time.perf_counter() - began
    label = f"{sizes.conversations} conversations x {sizes.turns} turns"
    later = [answer for answers in conversations for answer in answers[1:]]
    return [Figure("multiturn", label, "total", "s", wall), _hits(label, "hit rate after the first turn", later)]


async def rag(client: Client, words: Words, sizes: Sizes) -> list[Figure]:
    """Questions over a few long documents, all at once, in an order that mixes the documents."""
    documents = [words.ids(1500) for _ in range(4)]
    prompts = [documents[n % len(documents)] + words.ids(32) for n in range(sizes.questions)]
    answers, wall = await client.together(prompts, sizes.question_out)
    label = f"{sizes.questions} questions, 4 documents"
    return [Figure("rag", label, "total", "s", wall), _hits(label, "hit rate", answers)]


async def template(client: Client, words: Words, sizes: Sizes) -> list[Figure]:
    """One long instruction, many short inputs, all at once."""
    prefix = words.ids(600)
    answers, wall = await client.together([prefix + words.ids(32) for _ in range(sizes.batch)], sizes.batch_out)
    label = f"{sizes.batch} requests, one template"
    return [Figure("template", label, "total", "s", wall), _hits(label, "hit rate", answers)]


def _hits(workload: str, metric: str, answers: list[Answer]) -> Figure:
    share = sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers)
    return Figure("", workload, metric, "%", share * 100)


Workload = Callable[[Client, Words, Sizes], Awaitable[list[Figure]]]
WORKLOADS: dict[str, Workload] = {
    "decode": decode,
    "throughput": throughput,
    "ttft": first_token,
    "multiturn": multiturn,
    "rag": rag,
    "template": template,
}
"""In the order in which they run."""
