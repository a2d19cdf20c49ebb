"""Scheduling under pressure: whatever happens to the pool, no text changes and every block is accounted for."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_manager import block_digest
from engine.layout import Chunk
from engine.sequence import Sequence
from tests.engine.driver import Driver, outputs_are_right, prompt_of


def test_decode_goes_first_and_several_prefills_fill_the_budget() -> None:
    driver = Driver(64, budget=32)
    first = driver.add(prompt_of(8), 8)
    driver.step()
    a, b, c = (driver.add(prompt_of(20, seed), 4) for seed in (1, 2, 3))
    chunks = driver.step()
    assert chunks == [Chunk(first, 8, 9), Chunk(a, 0, 20), Chunk(b, 0, 11)]
    assert driver.step() == [Chunk(first, 9, 10), Chunk(a, 20, 21), Chunk(b, 11, 20), Chunk(c, 0, 20)]
    driver.run()
    outputs_are_right([first, a, b, c])


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_fully_cached_prompt_of_whole_blocks_still_computes(k: int) -> None:
    driver = Driver(64, budget=512)
    cold, warm = driver.add(prompt_of(16 * k), 3), None
    driver.run()
    warm = driver.add(prompt_of(16 * k), 3)
    driver.run()
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 16 * (k - 1))
    assert warm.tokens == cold.tokens
    outputs_are_right([warm])


def test_hits_are_frozen_at_first_admission() -> None:
    driver = Driver(8, budget=512)
    a, b = driver.add(prompt_of(30, 1), 60), driver.add(prompt_of(30, 2), 60)
    driver.run()
    assert b.preemptions >= 1 and a.preemptions == 0
    assert a.cached_tokens == b.cached_tokens == 0
    assert b.recomputed_tokens > 0
    outputs_are_right([a, b])


def test_the_latest_arrival_is_preempted_and_the_oldest_never() -> None:
    driver = Driver(8, budget=512)
    sequences = [driver.add(prompt_of(30, seed), 60) for seed in range(4)]
    driver.run()
    counts = [sequence.preemptions for sequence in sequences]
    assert counts[0] == 0 and sum(counts) > 0
    assert driver.finished[0] is sequences[0]
    outputs_are_right(sequences)


def test_a_waiting_sequence_can_be_removed() -> None:
    driver = Driver(4, budget=64)
    running, waiting = driver.add(prompt_of(40), 10), driver.add(prompt_of(40, 1), 10)
    driver.step()
    driver.scheduler.remove(waiting, driver.now)
    assert waiting.account(driver.now).input_fresh == 40
    driver.run()
    outputs_are_right([running])
    assert driver.scheduler.manager.held == 0


def test_a_forced_hash_collision_changes_no_output() -> None:
    driver = Driver(64, budget=64, digest=lambda parent, space, tokens: b"same")
    sequences = [driver.add(prompt_of(70, seed), 40) for seed in (1, 2, 1, 3)]
    driver.run()
    again = driver.add(prompt_of(70, 1), 40)
    driver.run()
    outputs_are_right([*sequences, again])
    assert again.cached_tokens == 16  # the one block whose hash nobody else could take


def test_block_seconds_count_the_blocks_held() -> None:
    driver = Driver(64, budget=64)
    sequence = driver.add(prompt_of(20), 3)
    driver.run()
    # 2 blocks, from the first step (second 2) to the third (second 4), where it finished.
    assert sequence.account(driver.now).kv_block_seconds == 2 * (4.0 - 2.0)


# A prompt is a few pieces out of a small set, so that prefixes are shared by chance.
pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=4)
wishes = st.fixed_dictionaries({"priority": st.integers(-1, 1), "reserves_all": st.booleans(), "reuse": st.booleans()})
arrivals = st.tuples(st.just("add"), pieces, st.integers(1, 50), st.integers(0, 2), wishes)
operations = st.lists(
    st.one_of(arrivals, st.tuples(st.just("step"), st.integers(1, 12)), st.tuples(st.just("abort"), st.integers(0, 9))),
    min_size=1,
    max_size=40,
)


def accounts_add_up(sequences: list[Sequence], now: float) -> None:
    for sequence in sequences:
        account = sequence.account(now)
        assert account.input_fresh + account.input_cached == account.prompt_tokens == sequence.prompt_len
        assert account.input_cached < sequence.prompt_len and account.input_fresh > 0
        assert account.input_cached == 0 or sequence.reuse
        assert account.recomputed_tokens == 0 or account.preemptions
        # Each of its tokens was computed once, found at first admission, or counted as computed again.
        assert sequence.peak_computed == len(sequence.tokens) - 1


@settings(max_examples=150, deadline=None)
@given(operations, st.integers(13, 40), st.integers(1, 80), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_random_operations_keep_the_pool_whole_and_the_text_right(ops, num_blocks, budget, collide, floor) -> None:
    """Any mix of arrivals, chunks, preemptions, aborts, evictions and ends, in a pool that is often too small."""
    digest = (lambda parent, space, tokens: b"same") if collide else block_digest
    driver = Driver(num_blocks, budget, digest, floor=floor)
    live: list[Sequence] = []
    for op in ops:
        if op[0] == "add":
            prompt = [token for kind, length in op[1] for token in prompt_of(length, kind)]
            output = min(op[2], num_blocks * 16 - len(prompt))
            if output > 0:
                live.append(driver.add(prompt, output, bytes([op[3]]), **op[4]))
        elif op[0] == "step":
            for _ in range(op[1]):
                if driver.scheduler.has_work:
                    driver.step()
        else:
            live = [sequence for sequence in live if sequence not in driver.finished]
            if live:
                driver.abort(live.pop(op[1] % len(live)))
    driver.run()
    outputs_are_right(driver.finished)
    assert driver.scheduler.manager.held == driver.scheduler.reserved == len(driver.scheduler.waiting) == 0
    accounts_add_up(driver.finished, driver.now)


@pytest.mark.parametrize("tenants,floor", [(1, 0.0), (3, 0.5)])
def test_ten_thousand_random_operations(tenants: int, floor: float) -> None:
    """A long life of one pool, so that ids, references and evictions go round many times."""
    rng = random.Random(7)
    driver = Driver(24, budget=48, floor=floor)
    live: list[Sequence] = []
    aborted = {"waiting": 0, "prefilling": 0, "decoding": 0, "preempted": 0}
    hits = preempted = 0
    for _ in range(10_000):
        if len(live) < 6 and rng.random() < 0.3:
            prompt = [t for _ in range(rng.randint(1, 3)) for t in prompt_of(rng.randint(1, 48), rng.randint(0, 2))]
            wishes = {"priority": rng.choice([0, 0, 0, 1]), "reserves_all": rng.random() < 0.3}
            live.append(driver.add(prompt, rng.randint(1, 60), bytes([rng.randrange(tenants)]), **wishes))
        elif live and rng.random() < 0.03:
            sequence = live.pop(rng.randrange(len(live)))
            if sequence.row is None:
                aborted["preempted" if sequence.preemptions else "waiting"] += 1
            else:
                aborted["decoding" if sequence.generated else "prefilling"] += 1
            driver.abort(sequence)
        elif driver.scheduler.has_work:
            driver.step()
        live = [sequence for sequence in live if sequence not in driver.finished]
        if len(driver.finished) >= 20:
            outputs_are_right(driver.finished)
            accounts_add_up(driver.finished, driver.now)
            hits += sum(sequence.cached_tokens or 0 for sequence in driver.finished)
            preempted += sum(sequence.preemptions > 0 for sequence in driver.finished)
            driver.finished.clear()
    assert driver.scheduler.preemptions > 100 and hits > 1000 and preempted > 20
    assert all(aborted.values()), aborted
