"""Several prompts in one text completion, and gaps to fill, through the OpenAI SDK."""

import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from engine.hosted import HostedModel
from tests.engine.fake_model import expected_text, fake_tokenizer
from tests.engine.serving import complete

EXTRA = {"extra_body": {"ignore_eos": True}}
PROMPTS = ["one", "a second prompt, longer", "three"]


@pytest.fixture(scope="module")
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ids(text: str) -> list[int]:
    return fake_tokenizer().encode(text, add_special=True)


@pytest.mark.parametrize("prompts", [PROMPTS, [ids(prompt) for prompt in PROMPTS]], ids=["texts", "token ids"])
def test_each_prompt_has_its_answers(sdk: openai.OpenAI, prompts: list) -> None:
    reply = sdk.completions.create(model="fake", prompt=prompts, n=2, max_tokens=6, temperature=0, **EXTRA)
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert [choice.text for choice in reply.choices] == [expected_text(p, 6) for p in PROMPTS for _ in range(2)]
    account = reply.farthing
    assert reply.usage.prompt_tokens == sum(map(len, PROMPTS)) == account["input_fresh"] + account["input_cached"]
    assert reply.usage.completion_tokens == account["output_text"] == 36


def test_one_prompt_of_many_is_answered_as_if_alone(http: httpx.Client) -> None:
    ask = {"temperature": 2, "seed": 9}
    together = complete(http, PROMPTS, 8, **ask).json()["choices"]
    alone = [complete(http, prompt, 8, **ask).json()["choices"][0]["text"] for prompt in PROMPTS]
    assert [choice["text"] for choice in together] == alone


def test_best_of_is_chosen_for_each_prompt(http: httpx.Client) -> None:
    ask = {"temperature": 2, "seed": 11, "logprobs": 0}
    best = complete(http, PROMPTS, 3, best_of=4, **ask).json()
    alone = [complete(http, prompt, 3, best_of=4, **ask).json()["choices"][0]["text"] for prompt in PROMPTS]
    assert [choice["text"] for choice in best["choices"]] == alone
    assert best["usage"]["completion_tokens"] == 3 * 4 * 3


@pytest.mark.parametrize("echo", [False, True])
def test_prompts_stream_side_by_side(sdk: openai.OpenAI, echo: bool) -> None:
    texts, reasons = [""] * 6, [None] * 6
    stream = sdk.completions.create(
        model="fake", prompt=PROMPTS, n=2, max_tokens=6, temperature=0, stream=True, echo=echo, logprobs=1,
        stream_options={"include_usage": True}, **EXTRA,
    )  # fmt: skip
    scored = [0] * 6
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            scored[choice.index] += len(choice.logprobs.tokens) if choice.logprobs else 0
    assert texts == [(p if echo else "") + expected_text(p, 6) for p in PROMPTS for _ in range(2)]
    assert reasons == ["length"] * 6
    assert scored == [(len(p) if echo else 0) + 6 for p in PROMPTS for _ in range(2)]
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (sum(map(len, PROMPTS)), 36)


def test_echo_and_prompt_scores_are_each_prompt_s_own(http: httpx.Client) -> None:
    reply = complete(http, PROMPTS, 2, echo=True, logprobs=1, prompt_logprobs=1).json()["choices"]
    for prompt, choice in zip(PROMPTS, reply, strict=True):
        assert choice["text"] == prompt + expected_text(prompt, 2)
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert len(choice["prompt_logprobs"]) == len(prompt)


def test_an_abort_ends_all_of_them(http: httpx.Client, url: str) -> None:
    body = {"model": "fake", "prompt": PROMPTS, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers={"x-farthing-request-id": "batch"}) as reply:
        lines = reply.iter_lines()
        next(lines)
        httpx.post(f"{url}/v1/abort", json={"id": "batch"})
        frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    ended = [c["index"] for frame in frames for c in frame["choices"] if c["finish_reason"]]
    assert sorted(ended) == [0, 1, 2]


def test_a_gap_is_marked_with_the_model_s_tokens(
    http: httpx.Client, model: HostedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = dict(zip(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ids("(|)"), strict=True))
    monkeypatch.setattr(model.tokenizer, "token_id", marks.get)
    filled = complete(http, "def f", 6, suffix="return").json()
    assert filled["choices"][0]["text"] == expected_text("(def f|return)", 6)
    assert filled["usage"]["prompt_tokens"] == len("(def f|return)")
    counted = http.post("/tokenize", json={"model": "fake", "prompt": "def f", "suffix": "return"}).json()
    assert counted["tokens"] == ids("(def f|return)")
    for several in (["a", "b"], [ids("a"), ids("b")]):
        texts = [choice["text"] for choice in complete(http, several, 3, suffix="c").json()["choices"]]
        assert texts == [expected_text(f"({p}|c)", 3) for p in "ab"]


def test_what_ends_the_filling_of_a_gap(
    http: httpx.Client, model: HostedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = expected_text("(x|y)", 8)
    names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|fim_pad|>")
    marks = dict(zip(names, ids("(|)" + text[4]), strict=True))
    monkeypatch.setattr(model.tokenizer, "token_id", marks.get)
    choice = complete(http, "x", 8, suffix="y").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[4])], "stop")
