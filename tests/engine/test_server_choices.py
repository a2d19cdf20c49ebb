"""Several choices, log-probabilities, echo and what else a caller may ask of an answer, through the OpenAI SDK."""

import json
import math
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from engine.hosted import HostedModel
from tests.engine.fake_model import EOS, expected_text, fake_model
from tests.engine.serving import GREEDY, complete, serving

EXTRA = {"extra_body": {"ignore_eos": True}}
HELLO = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_choices_share_the_prompt_and_differ(sdk: openai.OpenAI, model: HostedModel) -> None:
    prompt = "a prompt that is longer than two blocks, to be shared"
    reply = sdk.completions.create(model="fake", prompt=prompt, n=4, max_tokens=12, temperature=2, seed=5, **EXTRA)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in reply.choices}) == 4
    account = reply.farthing
    assert reply.usage.prompt_tokens == len(prompt) == account["input_fresh"] + account["input_cached"]
    assert reply.usage.completion_tokens == account["output_text"] == account["generated_tokens"] == 48
    again = sdk.completions.create(model="fake", prompt=prompt, n=2, max_tokens=12, temperature=2, seed=5, **EXTRA)
    assert [c.text for c in again.choices] == [c.text for c in reply.choices[:2]], "a seed covers every choice"
    alone = sdk.completions.create(model="fake", prompt=prompt, max_tokens=12, temperature=2, seed=5, **EXTRA)
    assert alone.choices[0].text == reply.choices[0].text


def test_the_prompt_of_several_choices_is_computed_once() -> None:
    model = fake_model(num_blocks=64, max_context=400)
    model.runner.batches.clear()
    with serving(model) as url, httpx.Client(base_url=url) as http:
        complete(http, "p" * 160, 4, n=8, temperature=1)
    computed = sum(len(batch.token_ids) for batch in model.runner.batches)
    assert computed <= 160 + 7 * 16 + 8 * 4


def test_choices_stream_side_by_side(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**HELLO, n=3, max_tokens=10, temperature=1.5, seed=3, **EXTRA)
    stream = sdk.chat.completions.create(
        **HELLO, n=3, max_tokens=10, temperature=1.5, seed=3, stream=True, stream_options={"include_usage": True},
        **EXTRA,
    )  # fmt: skip
    texts, reasons, order = ["", "", ""], [None] * 3, []
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            order.append(choice.index)
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length"] * 3 and order != sorted(order)
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (10, 30)
    assert chunk.farthing["input_fresh"] + chunk.farthing["input_cached"] == 10


def test_best_of_gives_the_likeliest(http: httpx.Client) -> None:
    ask = {"temperature": 2, "seed": 11, "logprobs": 0}
    drafts = complete(http, "best", 3, n=8, **ask).json()["choices"]
    best = complete(http, "best", 3, n=2, best_of=8, **ask).json()

    def mean(choice: dict) -> float:
        return sum(choice["logprobs"]["token_logprobs"]) / 3

    ranked = sorted(drafts, key=mean, reverse=True)
    assert [mean(c) for c in best["choices"]] == [mean(c) for c in ranked[:2]]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 24
    silent = complete(http, "best", 3, n=1, best_of=3, temperature=2).json()["choices"]
    assert len(silent) == 1 and silent[0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(sdk: openai.OpenAI, stream: bool) -> None:
    reply = sdk.chat.completions.create(
        **HELLO, max_tokens=9, temperature=0, logprobs=True, top_logprobs=2, stream=stream, **EXTRA
    )
    if stream:
        choices = [choice for chunk in reply for choice in chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    else:
        text, content = reply.choices[0].message.content, reply.choices[0].logprobs.content
    assert len(content) == 9
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == text
    best = 1 - math.log(math.e + 96)  # one logit is 1, the other 96 are 0
    for entry in content:
        assert entry.logprob == pytest.approx(best, abs=1e-5) == entry.top_logprobs[0].logprob
        assert entry.token == entry.top_logprobs[0].token and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[1].logprob == pytest.approx(best - 1, abs=1e-5)


def test_logprobs_of_what_a_stop_string_cuts_are_not_shown(http: httpx.Client) -> None:
    full = expected_text("stop", 12)
    for stream in (False, True):
        reply = complete(http, "stop", 12, stop=[full[6:9]], logprobs=1, stream=stream)
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
        frames = [json.loads(line) for line in lines if line.startswith("{")]
        shown = [t for f in frames for c in f["choices"] if c["logprobs"] for t in c["logprobs"]["tokens"]]
        assert "".join(shown) == full[:6] == "".join(c["text"] for f in frames for c in f["choices"])


def test_completion_logprobs_and_echo(sdk: openai.OpenAI) -> None:
    prompt = "echo this"
    reply = sdk.completions.create(
        model="fake", prompt=prompt, max_tokens=5, temperature=0, logprobs=3, echo=True, **EXTRA
    ).choices[0]
    assert reply.text == prompt + expected_text(prompt, 5)
    logprobs = reply.logprobs
    assert "".join(logprobs.tokens) == reply.text
    assert logprobs.text_offset == list(range(len(reply.text)))
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(math.isfinite(p) for p in logprobs.token_logprobs[1:])
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs[1:])
    only = sdk.completions.create(model="fake", prompt=prompt, max_tokens=0, logprobs=3, echo=True)
    assert only.choices[0].text == prompt and only.choices[0].finish_reason == "length"
    assert only.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[: len(prompt)]
    assert (only.usage.prompt_tokens, only.usage.completion_tokens) == (9, 0)
    bare = sdk.completions.create(model="fake", prompt=prompt, max_tokens=0, echo=True)
    assert bare.choices[0].text == prompt and bare.choices[0].logprobs is None


@pytest.mark.parametrize("prompt", ["a<eos>bc", [EOS, 5, EOS, 6]])
def test_offsets_count_control_tokens_that_the_echo_writes_out(http: httpx.Client, prompt) -> None:
    choice = complete(http, prompt, 4, logprobs=0, echo=True).json()["choices"][0]
    shown = choice["logprobs"]
    assert "<eos>" in shown["tokens"]
    for token, at in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert choice["text"][at : at + len(token)] == token


def test_echo_streams_before_every_choice(sdk: openai.OpenAI) -> None:
    texts, tokens = ["", ""], [[], []]
    for chunk in sdk.completions.create(
        model="fake", prompt="say this", max_tokens=5, temperature=0, logprobs=1, echo=True, n=2, stream=True, **EXTRA
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == ["say this" + expected_text("say this", 5)] * 2
    assert ["".join(t) for t in tokens] == texts


def test_top_k_of_one_with_echo_and_logprobs_is_all_finite(http: httpx.Client) -> None:
    reply = complete(http, "finite", 6, temperature=1, top_k=1, echo=True, logprobs=5)
    assert reply.status_code == 200 and "Infinity" not in reply.text and "NaN" not in reply.text
    numbers = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    assert numbers[0] is None and all(math.isfinite(number) for number in numbers[1:])


@pytest.mark.parametrize("length", [2, 40, 200])
def test_prompt_logprobs_are_the_same_warm_and_cold(length: int) -> None:
    prompt = ("prompt logprobs " * 20)[:length]
    with serving(fake_model(num_blocks=64, budget=48)) as url, httpx.Client(base_url=url) as http:
        cold = complete(http, prompt, 3, prompt_logprobs=2).json()
        complete(http, prompt, 3)
        warm = complete(http, prompt, 3, prompt_logprobs=2).json()
        found = cold["choices"][0]["prompt_logprobs"]
        assert found == warm["choices"][0]["prompt_logprobs"]
        assert warm["farthing"]["input_cached"] == 0
        assert len(found) == length and found[0] is None
        tokens = http.post("/tokenize", json={"model": "fake", "prompt": prompt}).json()["tokens"]
        assert all(str(token) in entry for token, entry in zip(tokens[1:], found[1:], strict=True))
        assert all(2 <= len(entry) <= 3 and entry[min(entry, key=lambda i: entry[i]["rank"])]["rank"] == 1
                   for entry in found[1:])  # fmt: skip
        chat = http.post("/v1/chat/completions", json={**HELLO, "max_tokens": 1, "prompt_logprobs": 0}).json()
        assert len(chat["prompt_logprobs"]) == 10 and all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


def test_penalties_and_biases_change_the_answer(http: httpx.Client) -> None:
    first = expected_text("bias", 1)
    token = http.post("/tokenize", json={"model": "fake", "prompt": first}).json()["tokens"][0]
    biased = complete(http, "bias", 6, logit_bias={"40": 50}).json()["choices"][0]["text"]
    assert biased == chr(33 + 40) * 6
    assert complete(http, "bias", 1, logit_bias={str(token): -100}).json()["choices"][0]["text"] != first
    assert complete(http, "bias", 1, bad_words=[first]).json()["choices"][0]["text"] != first
    # each token is drawn down further each time it comes, so none comes twice before all have come once
    varied = complete(http, "bias", 60, frequency_penalty=2).json()["choices"][0]["text"]
    assert len(set(varied)) == len(varied)


def test_bad_words_of_several_tokens_never_come_whole(http: httpx.Client) -> None:
    full = expected_text("bad", 20)
    word = full[8:11]
    text = complete(http, "bad", 20, bad_words=[word]).json()["choices"][0]["text"]
    assert text[:10] == full[:10] and word not in text


def test_nothing_but_max_tokens_ends_the_text_before_min_tokens(http: httpx.Client) -> None:
    ask = {"ignore_eos": False, "logit_bias": {str(EOS): 100}}
    assert complete(http, "min", 9, **ask).json()["usage"]["completion_tokens"] == 0
    reply = complete(http, "min", 9, min_tokens=5, **ask).json()
    assert reply["usage"]["completion_tokens"] == 5 and reply["choices"][0]["finish_reason"] == "stop"
    full = expected_text("min", 9)
    reply = complete(http, "min", 9, min_tokens=5, stop=[full[1], full[7]]).json()
    assert reply["choices"][0]["text"] == full[:5] + full[5:].split(full[1])[0].split(full[7])[0]


def test_stop_tokens_and_stop_strings_in_the_output(http: httpx.Client) -> None:
    full = expected_text("stops", 12)
    token = http.post("/tokenize", json={"model": "fake", "prompt": full[6]}).json()["tokens"][0]
    reply = complete(http, "stops", 12, stop_token_ids=[token]).json()["choices"][0]
    assert (reply["text"], reply["finish_reason"]) == (full[: full.index(full[6])], "stop")
    reply = complete(http, "stops", 12, stop=[full[4:7]], include_stop_str_in_output=True).json()["choices"][0]
    assert (reply["text"], reply["finish_reason"]) == (full[:7], "stop")


def test_detokenize_undoes_tokenize(http: httpx.Client) -> None:
    text = "back and forth<eos>\n"
    tokens = http.post("/tokenize", json={"model": "fake", "prompt": text}).json()["tokens"]
    assert http.post("/detokenize", json={"model": "fake", "tokens": tokens}).json() == {"prompt": text}
    reply = http.post("/detokenize", json={"model": "fake", "tokens": [97]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("completions", {"n": 0}, "n", "from 1 to 128"),
        ("completions", {"n": 200}, "n", "from 1 to 128"),
        ("completions", {"n": 3, "best_of": 2}, "best_of", "from n, 3"),
        ("completions", {"n": 1, "best_of": 2, "stream": True}, "best_of", "stream"),
        ("completions", {"logprobs": 21}, "logprobs", "from 0 to 20"),
        ("completions", {"logit_bias": {"97": 1}}, "logit_bias", "only ids from 0 to 96"),
        ("completions", {"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ("completions", {"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "'05' is no token id"),
        ("completions", {"logit_bias": {"٣": 1}}, "logit_bias", "is no token id"),
        ("completions", {"logit_bias": {"9" * 5000: 1}}, "logit_bias", "is no token id"),
        ("completions", {"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ("completions", {"stop_token_ids": [97]}, "stop_token_ids", "97"),
        ("completions", {"bad_words": [""]}, "bad_words", "empty"),
        ("completions", {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_tokens, 8"),
        ("completions", {"max_tokens": 0}, "max_tokens", "at least 1"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ("completions", {"repetition_penalty": 0}, "repetition_penalty", "from 0.01"),
        ("chat/completions", {"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ("chat/completions", {"best_of": 2}, "best_of", "Unknown parameter"),
    ],
)
def test_what_is_refused(http: httpx.Client, path: str, body: dict, param: str, says: str) -> None:
    base = {"model": "fake", "prompt": "x"} if path == "completions" else HELLO
    reply = http.post(f"/v1/{path}", json={**base, **body})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param and says in reply.json()["error"]["message"]
    assert complete(http, "x", 1).status_code == 200


def test_deterministic_is_refused_where_results_depend_on_the_batch(http: httpx.Client, model, monkeypatch) -> None:
    assert complete(http, "x", 1, deterministic=True).status_code == 200
    monkeypatch.setattr(model.runner, "batch_invariant", False)
    reply = complete(http, "x", 1, deterministic=True)
    assert reply.status_code == 400 and "--dtype int8" in reply.json()["error"]["message"]
    assert complete(http, "x", 1, deterministic=False).status_code == 200


def test_a_request_of_many_choices_that_fails_ends_as_one(http: httpx.Client, model: HostedModel) -> None:
    model.runner.fail_next = RuntimeError("broken")
    reply = http.post("/v1/completions", json={**GREEDY, "prompt": "x" * 40, "n": 4, "max_tokens": 5})
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "engine_error"
    assert complete(http, "x").status_code == 200


def test_a_lower_priority_number_runs_first(monkeypatch) -> None:
    model = fake_model(num_blocks=8, budget=32)  # room for one of the requests below
    forward = model.runner.forward
    monkeypatch.setattr(model.runner, "forward", lambda batch: (time.sleep(0.005), forward(batch))[1])
    done: list[int] = []

    def ask(priority: int) -> None:
        with httpx.Client(base_url=url, timeout=30) as http:
            assert complete(http, f"{priority % 10}" * 60, 40, priority=priority).status_code == 200
            done.append(priority)

    with serving(model) as url:
        threads = [threading.Thread(target=ask, args=(priority,)) for priority in (3, 9, 5, -1)]
        for thread in threads:
            thread.start()
            time.sleep(0.03)
        for thread in threads:
            thread.join()
        with httpx.Client(base_url=url) as http:
            assert complete(http, "x", 1, priority="high").json()["error"]["param"] == "priority"
    assert done == [-1, 3, 5, 9]
