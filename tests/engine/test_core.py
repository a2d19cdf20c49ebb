"""The step loop: requests in, events out, accounts that add up."""

import threading
import time

import pytest
import torch

from tests.engine.fake_model import expected_text, fake_model, fake_tokenizer
from tests.engine.harness import Harness, text


@pytest.mark.parametrize("streaming", [True, False])
def test_one_request_from_start_to_end(streaming: bool) -> None:
    model = fake_model()
    with Harness(model) as harness:
        request = harness.submit(model, "hello", 20, streaming=streaming)
        events = harness.collect(request)[request]
    assert text(events) == expected_text("hello", 20)
    assert streaming or len(events) == 1
    account = events[-1].account
    assert events[-1].finish == "length" and account is not None
    assert (account.prompt_tokens, account.output_text, account.generated_tokens) == (5, 20, 20)
    assert account.prefill_device_seconds > 0 and account.decode_device_seconds > 0
    assert 0 <= account.queue_seconds <= account.ttft_seconds <= account.total_seconds


def test_two_models_take_turns() -> None:
    a, b = fake_model("a"), fake_model("b")
    with Harness(a, b) as harness:
        requests = [harness.submit(model, "hi", 100) for model in (a, b)]
        events = harness.collect(*requests)
    for request in requests:
        assert text(events[request]) == expected_text("hi", 100)
    assert abs(a.device.steps - b.device.steps) <= 2


def test_end_of_text_stops_unless_ignored() -> None:
    model = fake_model()
    prompt = next(p for p in (f"p{i}" for i in range(1000)) if len(expected_text(p, 40)) == 39)  # one <eos> in it
    with Harness(model) as harness:
        ends, goes_on = harness.submit(model, prompt, 40, ignore_eos=False), harness.submit(model, prompt, 40)
        events = harness.collect(ends, goes_on)
    account = events[ends][-1].account
    assert events[ends][-1].finish == "stop" and events[goes_on][-1].finish == "length"
    assert account.generated_tokens == account.output_text + 1 == len(text(events[ends])) + 1
    assert expected_text(prompt, 40).startswith(text(events[ends]))


def test_a_stop_string_never_leaks_and_its_tokens_are_generated_but_not_delivered() -> None:
    model = fake_model()
    full = expected_text("stop here", 30)
    stop = full[10:14]
    with Harness(model) as harness:
        request = harness.submit(model, "stop here", 30, stop=(stop,))
        events = harness.collect(request)[request]
    account = events[-1].account
    assert text(events) == full[: full.index(stop)]
    assert events[-1].finish == "stop"
    assert account.output_text == len(text(events)) and account.generated_tokens == account.output_text + 4


def test_abort_in_every_state_gives_the_blocks_back_within_a_step() -> None:
    model = fake_model(num_blocks=8, budget=8)  # 128 tokens: the second waits, the first prefills in chunks
    gate = threading.Semaphore(0)
    forward = model.runner.forward

    def gated(batch):
        gate.acquire()
        return forward(batch)

    model.runner.forward = gated
    harness = Harness(model)
    try:
        prefilling, waiting = harness.submit(model, "x" * 100, 20), harness.submit(model, "y" * 100, 20)
        gate.release(3)
        while model.device.steps < 3:
            time.sleep(0.001)
        harness.core.abort(model, waiting)
        harness.core.abort(model, prefilling)
        gate.release(1)  # the step in progress
        events = harness.collect(prefilling, waiting)
        assert model.device.steps == 4 and model.blocks.held == 0
        assert [events[r][-1].finish for r in (prefilling, waiting)] == ["abort", "abort"]
        assert events[waiting][-1].account.prefill_device_seconds == 0
        decoding = harness.submit(model, "z", 100)
        gate.release(5)
        while model.device.steps < 9:
            time.sleep(0.001)
        harness.core.abort(model, decoding)
        harness.core.abort(model, decoding)  # twice does no harm
        gate.release(1)
        account = harness.collect(decoding)[decoding][-1].account
        assert account.generated_tokens == account.output_text == 6
        assert model.blocks.held == 0
    finally:
        gate.release(1000)
        harness.core.stop()


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    model = fake_model()
    with Harness(model) as harness:
        model.runner.fail_next = RuntimeError("out of memory")
        broken = harness.submit(model, "boom", 5)
        event = harness.collect(broken)[broken][-1]
        assert event.finish == "error" and "RuntimeError" in event.error
        fine = harness.submit(model, "boom", 5)
        assert text(harness.collect(fine)[fine]) == expected_text("boom", 5)


def test_a_broken_step_loop_ends_every_request_and_says_so() -> None:
    model = fake_model()
    harness = Harness(model)

    def broken(now):
        raise AssertionError("a defect")

    model.scheduler.schedule = broken
    request = harness.submit(model, "x", 5)
    assert harness.collect(request)[request][-1].finish == "error"
    harness.core.stop()
    assert not harness.core.alive
    with pytest.raises(RuntimeError):  # and not a request that waits for ever
        harness.submit(model, "x", 5)
    harness.core.abort(model, request)


def test_stopping_ends_what_runs() -> None:
    model = fake_model(max_context=100_000, num_blocks=1000)
    harness = Harness(model)
    request = harness.submit(model, "x", 10_000)
    while model.device.steps < 3:
        time.sleep(0.001)
    harness.core.stop()
    assert harness.collect(request)[request][-1].finish == "abort"


def test_pressure_changes_no_text_and_no_hit() -> None:
    model = fake_model(num_blocks=12)
    with Harness(model) as harness:
        requests = {f"prompt number {i}": None for i in range(8)}
        for prompt in requests:
            requests[prompt] = harness.submit(model, prompt, 80)
        events = harness.collect(*requests.values())
    for prompt, request in requests.items():
        assert text(events[request]) == expected_text(prompt, 80)
        assert events[request][-1].account.input_cached == 0  # they share less than one block
    assert model.scheduler.preemptions > 0


def test_device_seconds_and_idle_close_with_the_wall_clock() -> None:
    model, other = fake_model("a"), fake_model("b")
    started = time.monotonic()
    with Harness(model, other) as harness:
        running = time.monotonic()
        accounts = []
        for _ in range(3):
            requests = [harness.submit(m, "some prompt " * 3, 40) for m in (model, other) for _ in range(4)]
            accounts += [events[-1].account for events in harness.collect(*requests).values()]
            time.sleep(0.1)
        stopping = time.monotonic()
        harness.core.stop()
        stopped = time.monotonic()
        attributed = sum(a.prefill_device_seconds + a.decode_device_seconds for a in accounts)
        clock = harness.core.clock
        assert attributed == pytest.approx(clock.busy_seconds, rel=1e-9)
        assert (stopping - running) * 0.99 <= attributed + clock.idle_seconds <= (stopped - started) * 1.01
        assert clock.idle_seconds > 0.25


def test_a_seeded_request_is_the_same_alone_and_in_company() -> None:
    texts = []
    for company in (0, 5):
        model = fake_model()
        with Harness(model) as harness:
            others = [harness.submit(model, f"other {i}", 30, temperature=1.0) for i in range(company)]
            request = harness.submit(model, "seeded", 30, temperature=1.5, top_p=0.9, seed=7)
            texts.append(text(harness.collect(request, *others)[request]))
    assert texts[0] == texts[1]


def test_the_fake_tokenizer_is_the_real_thing() -> None:
    tokenizer = fake_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Hi, you!\n", add_special=True)) == "Hi, you!\n"
    assert torch.is_inference_mode_enabled() is False
