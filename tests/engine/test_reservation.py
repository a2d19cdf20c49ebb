"""Who may start: a request that says how much it wants gets all of it or waits; others share what is left."""

import pytest

from tests.engine.driver import Driver, outputs_are_right, prompt_of


def test_a_promise_is_kept_without_preemption() -> None:
    driver = Driver(20, budget=512)
    sequences = [driver.add(prompt_of(30, seed), 66, reserves_all=True) for seed in range(6)]  # 6 blocks each
    driver.step()
    assert len(driver.scheduler.running) == 3 and driver.scheduler.reserved == 3 * 4
    driver.run()
    outputs_are_right(sequences)
    assert driver.scheduler.preemptions == 0
    assert driver.finished[:3] == sequences[:3]


def test_an_open_answer_starts_on_its_prompt_and_a_little_more() -> None:
    driver = Driver(20, budget=512)
    sequences = [driver.add(prompt_of(30, seed), 290) for seed in range(6)]  # all 20 blocks in the worst case
    driver.step()
    assert len(driver.scheduler.running) == 5  # 4 blocks each
    driver.run()
    outputs_are_right(sequences)
    assert driver.scheduler.preemptions > 0


def test_each_preemption_doubles_the_room_so_that_they_stay_few() -> None:
    driver = Driver(40, budget=512)
    sequences = [driver.add(prompt_of(30, seed), 480) for seed in range(8)]
    driver.run()
    outputs_are_right(sequences)
    assert 0 < max(sequence.preemptions for sequence in sequences) <= 5


def test_an_open_answer_never_takes_what_was_promised() -> None:
    driver = Driver(16, budget=512)
    sure = driver.add(prompt_of(30), 98, reserves_all=True)  # 8 blocks
    greedy = driver.add(prompt_of(60, 1), 180)
    driver.run()
    outputs_are_right([sure, greedy])
    assert sure.preemptions == 0 and greedy.preemptions > 0
    assert driver.finished[0] is sure


@pytest.mark.parametrize("blocks", [10, 12, 16])
def test_pressure_changes_no_text_and_unique_prompts_report_no_hit(blocks: int) -> None:
    """Each cycle makes progress: it ends, and the earliest request is never the one to give way."""
    texts = []
    for pool in (blocks, 400):
        driver = Driver(pool, budget=64)
        sequences = [driver.add(prompt_of(40, 100 + seed), 90) for seed in range(6)]
        driver.run()
        outputs_are_right(sequences)
        texts.append([sequence.tokens for sequence in sequences])
        assert [sequence.cached_tokens for sequence in sequences] == [0] * 6
        assert (driver.scheduler.preemptions > 0) == (pool == blocks)
        assert sequences[0].preemptions == 0
        assert all(s.recomputed_tokens > 0 or not s.preemptions for s in sequences if pool == blocks)
    assert texts[0] == texts[1]


def test_a_tenants_floor_makes_another_wait_but_not_for_ever() -> None:
    driver = Driver(16, budget=512, floor=0.5)
    a = driver.add(prompt_of(120), 8, b"a")
    driver.run()
    assert driver.scheduler.manager.cached_of(b"a") == 7
    small, large = (driver.add(prompt_of(60, seed), 40, b"b", reserves_all=True) for seed in (1, 2))
    driver.step()
    assert driver.scheduler.running == [small]  # the second would take what is a's to keep
    driver.run()
    assert driver.scheduler.manager.cached_of(b"a") == 4  # now that two have something cached
    whole = driver.add(prompt_of(200, 3), 50, b"b", reserves_all=True)
    driver.run()
    outputs_are_right([a, small, large, whole])
    assert driver.scheduler.manager.cached_of(b"a") == 0  # a cache stops no work


def test_a_flood_of_prompts_leaves_the_others_their_floor() -> None:
    for floor, hits in ((0.5, 64), (0.0, 0)):
        driver = Driver(24, budget=512, floor=floor)
        driver.add(prompt_of(70), 4, b"quiet")
        driver.run()
        for seed in range(40):
            driver.add(prompt_of(100, seed), 4, b"flood")
        driver.run()
        again = driver.add(prompt_of(70), 4, b"quiet")
        driver.run()
        assert again.cached_tokens == hits
