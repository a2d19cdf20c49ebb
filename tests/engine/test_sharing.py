"""A prefix that several requests ask for at once is computed once, and nobody waits who need not."""

import pytest

from engine.block_manager import Space, block_digest
from tests.engine.driver import Driver, outputs_are_right, prompt_of


def computed(driver: Driver) -> int:
    return sum(batch.query_starts[-1] for batch in driver.runner.batches)


def test_a_template_is_computed_once_however_many_ask_at_once() -> None:
    driver = Driver(400, budget=128)
    template = prompt_of(100)
    sequences = [driver.add(template + prompt_of(8, i), 3) for i in range(20)]
    driver.run()
    outputs_are_right(sequences)
    assert sequences[0].cached_tokens == 0
    assert {sequence.cached_tokens for sequence in sequences[1:]} == {96}
    assert computed(driver) == 108 + 19 * 12 + 20 * 2
    assert driver.scheduler.preemptions == 0


def test_others_are_not_held_up_by_those_who_wait_for_a_prefix() -> None:
    driver = Driver(100, budget=128)
    template = prompt_of(100)
    first, second = (driver.add(template + [i] * 4, 3) for i in range(2))
    other = driver.add(prompt_of(20, 9), 3)
    chunks = driver.step()
    assert [chunk.sequence for chunk in chunks] == [first, other]
    assert len(driver.scheduler.waiting) == 1
    chunks = driver.step()
    assert {chunk.sequence for chunk in chunks} == {first, second, other} and second.cached_tokens == 96


def test_documents_and_questions() -> None:
    driver = Driver(400, budget=128)
    documents = [prompt_of(160, seed) for seed in range(4)]
    sequences = [driver.add(documents[i % 4] + prompt_of(10, 10 + i), 4) for i in range(32)]
    driver.run()
    outputs_are_right(sequences)
    assert sorted(sequence.cached_tokens for sequence in sequences) == [0] * 4 + [160] * 28


def test_a_growing_conversation_waits_for_the_longest_part_that_is_coming() -> None:
    driver = Driver(100, budget=32)
    text = prompt_of(200)
    short, long = driver.add(text[:100], 3), driver.add(text, 3)
    driver.run()
    outputs_are_right([short, long])
    assert long.cached_tokens == 96


def test_a_short_common_beginning_is_not_waited_for() -> None:
    driver = Driver(100, budget=512)
    sequences = [driver.add(prompt_of(16) + prompt_of(100, i), 2) for i in range(3)]
    assert len(driver.step()) == 3
    driver.run()
    outputs_are_right(sequences)


def test_tenants_do_not_wait_for_each_other() -> None:
    driver = Driver(100, budget=512)
    for tenant in (b"a", b"b"):
        driver.add(prompt_of(100), 2, tenant)
    driver.step()
    assert {sequence.row is None for sequence in driver.scheduler.running} == {False}
    assert len(driver.scheduler.running) == 2


def test_an_urgent_request_does_not_wait_for_one_that_is_not() -> None:
    driver = Driver(100, budget=32)
    later = driver.add(prompt_of(100), 2, priority=1)
    driver.step()
    urgent = driver.add(prompt_of(100), 2, priority=0)
    assert [chunk.sequence for chunk in driver.step()] == [urgent]
    driver.run()
    outputs_are_right([later, urgent])


def awaited(driver: Driver) -> set[bytes]:
    return driver.scheduler.waiting.awaited()


@pytest.mark.parametrize("after", [3, 4])
def test_when_the_one_who_computes_is_aborted_a_waiter_takes_over(after: int) -> None:
    driver = Driver(100, budget=32)
    other = driver.add(prompt_of(8, 5), 40, b"other")  # so that those who wait are looked at while there is no room
    first, second, third = (driver.add([*prompt_of(140), i], 3) for i in range(3))
    for _ in range(after):
        driver.step()
    assert awaited(driver) and 0 < first.computed < 140
    computed = first.registered * 16
    driver.abort(first)
    assert not awaited(driver)
    driver.run()
    outputs_are_right([other, second, third])
    assert second.cached_tokens == computed and third.cached_tokens == 128


def test_when_the_one_who_computes_is_preempted_nothing_stands_still() -> None:
    """Growing answers take the blocks of the prefill that others wait for."""
    driver = Driver(18, budget=20)
    growing = [driver.add(prompt_of(8, i), 120, b"other") for i in (1, 2)]
    for _ in range(50):
        driver.step()
    shared = [driver.add([*prompt_of(140), i], 8) for i in range(3)]
    waited = False
    while driver.scheduler.has_work:
        driver.step()
        waited |= bool(awaited(driver)) and not any(sequence.preemptions for sequence in shared)
    outputs_are_right([*growing, *shared])
    assert waited and any(sequence.preemptions for sequence in [*growing, *shared])


def test_a_collision_wakes_those_who_wait() -> None:
    driver = Driver(100, budget=32, digest=lambda parent, space, tokens: b"same")
    sequences = [driver.add([*prompt_of(100, seed), i], 3) for i, seed in enumerate((1, 1, 2, 2, 1))]
    driver.run()
    outputs_are_right(sequences)


def test_a_waiter_can_be_aborted() -> None:
    driver = Driver(100, budget=32)
    first, second = (driver.add([*prompt_of(100), i], 3) for i in range(2))
    driver.step()
    driver.abort(second)
    assert second.account(driver.now).input_cached == 0 and len(driver.scheduler.waiting) == 0
    driver.run()
    outputs_are_right([first])


def test_each_block_is_hashed_once_however_long_its_request_waits() -> None:
    hashed = 0

    def counted(parent: bytes, space: Space, tokens: bytes) -> bytes:
        nonlocal hashed
        hashed += 1
        return block_digest(parent, space, tokens)

    driver = Driver(60, budget=32, digest=counted)
    driver.add(prompt_of(8, 5), 100, b"other")
    sequences = [driver.add([*prompt_of(164), i], 5) for i in range(30)]
    driver.run()
    outputs_are_right(sequences)
    assert hashed == 30 * 10 + 108 // 16
    assert computed(driver) < 165 + 29 * 5 + 30 * 4 + 108
