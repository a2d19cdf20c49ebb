"""Tenants and priorities: who is served, on a machine whose steps take a known time."""

import pytest

from engine.fairness import RECENT, Fairness
from tests.engine.driver import Driver, outputs_are_right, prompt_of
from tests.engine.simulation import Load, Simulation

FLOODS = {
    "a few": Load(b"flood", 32, 256, 64),
    "many": Load(b"flood", 200, 256, 64),
    "long answers": Load(b"flood", 200, 64, 400),
    "long prompts": Load(b"flood", 64, 2000, 4),
    "answers of open length": Load(b"flood", 200, 256, 128, reserves_all=False),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize("prompt,output,blocks", [(256, 16, 1000), (256, 16, 4000), (1024, 16, 1000)])
def test_a_flood_at_most_doubles_the_others_wait(flood: Load, prompt: int, output: int, blocks: int) -> None:
    """Whether rows, blocks or the device run short: the 95th percentile of a quiet tenant's first tokens."""
    quiet = Load(b"quiet", 1, prompt, output, pause=1.0, start=10.0)
    alone, together = Simulation(blocks), Simulation(blocks)
    alone.run([quiet], 60)
    together.run([quiet, flood], 70)
    assert len(together.served[b"quiet"]) > 20
    assert together.first_token(b"quiet", 0.95) <= 2 * alone.first_token(b"quiet", 0.95)
    unhindered = Simulation(blocks)
    unhindered.run([flood], 70)
    assert together.tokens(b"flood") + together.tokens(b"quiet") > 0.8 * unhindered.tokens(b"flood")


def test_two_floods_get_half_each_whatever_they_send() -> None:
    simulation = Simulation(2000)
    scheduler = simulation.run([Load(b"a", 100, 600, 20), Load(b"b", 100, 100, 60)], 200)
    counters = {name: tenant.counter for name, tenant in scheduler.fairness.tenants.items()}
    assert counters[b"a"] == pytest.approx(counters[b"b"], rel=0.05)
    assert min(counters.values()) > 50_000


def test_a_tenant_that_wants_less_than_its_share_gets_it_all() -> None:
    simulation = Simulation(2000)
    simulation.run([Load(b"a", 100, 600, 20), Load(b"b", 1, 100, 20, pause=2.0)], 100)
    waits = [sequence.first_token - sequence.arrived for sequence in simulation.served[b"b"]]
    assert len(waits) > 25 and max(waits[1:]) < 0.3


def test_tenants_who_ask_little_do_not_slow_each_other_down() -> None:
    loads = [Load(tenant, 1, 1024, 8, pause=2.0, start=1.5 * i) for i, tenant in enumerate((b"a", b"b"))]
    alone, together = Simulation(2000), Simulation(2000)
    alone.run(loads[:1], 60)
    together.run(loads, 60)
    for tenant in (b"a", b"b"):
        assert together.first_token(tenant, 0.5) == pytest.approx(alone.first_token(b"a", 0.5))


def test_a_lower_priority_number_goes_first_and_displaces() -> None:
    flood = Load(b"a", 100, 256, 200, priority=5)
    urgent = Load(b"a", 1, 256, 16, pause=1.0, priority=0, start=5.0)
    simulation = Simulation(600)
    simulation.run([flood, urgent], 60)
    waits = [s.first_token - s.arrived for s in simulation.served[b"a"] if s.priority == 0]
    assert len(waits) > 15 and max(waits) < 1.0
    others = [s.first_token - s.arrived for s in simulation.served[b"a"] if s.priority == 5]
    assert max(others) > 10


def test_in_one_tenant_the_order_of_arrival_stays() -> None:
    simulation = Simulation(300)
    simulation.run([Load(b"a", 50, 300, 20)], 60)
    served = sorted(simulation.served[b"a"], key=lambda sequence: sequence.order)
    firsts = [sequence.first_token for sequence in served]
    assert firsts == sorted(firsts)


def test_cached_tokens_cost_nothing() -> None:
    driver = Driver(100, budget=512)
    for _ in range(2):
        before = driver.scheduler.fairness.tenants[b"a"].counter if driver.finished else 0.0
        driver.add(prompt_of(100), 4, b"b")  # somebody else, so that nothing is forgotten in between
        sequence = driver.add(prompt_of(100), 2, b"a")
        while sequence not in driver.finished:
            driver.step()
    tenant = driver.scheduler.fairness.tenants[b"a"]
    assert sequence.cached_tokens == 96
    assert tenant.counter - before == pytest.approx(4 + driver.scheduler.fairness.decode_weight)


def test_what_is_computed_again_costs_nothing() -> None:
    driver = Driver(16, budget=512)
    sequences = [driver.add(prompt_of(30, seed), 100, b"a") for seed in range(4)]
    tenant = driver.scheduler.fairness.tenants[b"a"]
    driver.run()
    outputs_are_right(sequences)
    assert driver.scheduler.preemptions > 0
    # The token sampled last before a preemption is computed as one of the prefill after it.
    assert tenant.counter == pytest.approx(4 * 30 + 4 * 99 * 2.0 - driver.scheduler.preemptions)


def test_nobody_saves_up_by_being_away() -> None:
    fairness = Fairness(burst=100, decode_weight=2.0)
    fairness.arrive(b"a", 0.0)
    fairness.tenants[b"a"].counter += 10_000
    fairness.arrive(b"b", 1.0)
    assert fairness.tenants[b"b"].counter == 9_900
    fairness.tenants[b"b"].counter += 5_000
    fairness.leave(b"b", 2.0)
    fairness.arrive(b"b", 3.0)
    assert fairness.tenants[b"b"].counter == 14_900  # nor starts anew by going


def test_who_is_ahead_depends_on_those_that_count_as_much() -> None:
    fairness = Fairness(burst=100, decode_weight=2.0)
    for name, counter in ((b"a", 1000.0), (b"b", 940.0), (b"c", 960.0)):
        fairness.arrive(name, 0.0)
        fairness.tenants[name].counter = counter
    assert fairness.ahead({b"a": 0, b"b": 0, b"c": 0}) == {b"a"}
    assert fairness.ahead({b"a": 0, b"b": 1, b"c": 0}) == set()  # what b does can wait
    assert fairness.ahead({b"a": 1, b"b": 0, b"c": 0}) == {b"a"}
    fairness.leave(b"b", 1.0)
    assert fairness.ahead({b"a": 0, b"c": 0}) == {b"a"}
    assert fairness.contended(1.0 + RECENT)
    assert fairness.ahead({b"a": 0, b"c": 0}) == set()


def test_tenants_who_owe_nothing_are_forgotten() -> None:
    fairness = Fairness(burst=100, decode_weight=2.0)
    fairness.arrive(b"stays", 0.0)
    for i in range(1000):
        fairness.tenants[b"stays"].counter += 200
        fairness.arrive(b"%d" % i, float(i))
        fairness.leave(b"%d" % i, float(i))
    assert len(fairness.tenants) < 2 * RECENT + 2


def test_a_tenant_counts_as_a_rival_until_it_has_been_away_for_a_while() -> None:
    fairness = Fairness(burst=100, decode_weight=2.0)
    fairness.arrive(b"a", 0.0)
    assert not fairness.contended(0.0)
    fairness.arrive(b"b", 1.0)
    assert fairness.contended(1.0)
    fairness.leave(b"b", 2.0)
    assert fairness.contended(2.0 + RECENT / 2)
    assert not fairness.contended(2.0 + RECENT)
    fairness.leave(b"a", 9.0)
    fairness.arrive(b"a", 9.1)
    assert not fairness.contended(9.1)  # one does not compete with itself
