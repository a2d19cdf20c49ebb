"""What is taken at once for calls that wait: each call's all or nothing, and never more than there is."""

from decimal import Decimal
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from billing.allowances import Allowance
from billing.grants import Demand, Rest, Wish, grants
from billing.lease_store import SLICES

NAMES = [UUID(int=number) for number in range(3)]
amounts = st.integers(0, 40).map(Decimal)


def demand(identifier: UUID, free: int = 0) -> Demand:
    terms = Allowance(
        id=identifier,
        scope_kind="key",
        scope_id="k",
        unit="money",
        window="none",
        time_zone="UTC",
        limit_amount=Decimal(100),
        currency="USD",
        hard=True,
    )
    return Demand(terms, Decimal(free))


def rest(amount: Decimal | int) -> Rest:
    return Rest(Decimal(amount), Decimal(amount) / SLICES)


def take(wishes: list[Wish], *rests: int, free: int = 0) -> list[Decimal]:
    asked = [demand(name, free) for name in NAMES[: len(rests)]]
    taken = grants(asked, wishes, {name: rest(amount) for name, amount in zip(NAMES, rests, strict=False)})
    return [taken[name] for name in NAMES[: len(rests)]]


def test_a_call_that_lacks_one_part_takes_no_other() -> None:
    a, b, _ = NAMES
    both = {a: Decimal(5), b: Decimal(5)}
    assert take([both], 5, 5) == [5, 5]
    assert take([both], 5, 4) == [0, 0]
    assert take([both, {a: Decimal(5)}], 5, 4) == [5, 0], "the next call is not kept waiting"
    assert take([{a: Decimal(5)}, both], 9, 5) == [5, 0], "first come, first served"
    assert take([both], 4, 4, free=1) == [4, 4]


def test_a_slice_for_calls_to_come_leaves_whole_what_a_call_waits_for() -> None:
    a, b, _ = NAMES
    assert take([], 160, 16) == [10, 1]
    assert take([{a: Decimal(1)}], 160) == [10]
    assert take([{a: Decimal(10), b: Decimal(2)}], 160, 1) == [10, 0], "a slice is enough for the call too"
    assert take([{a: Decimal(11), b: Decimal(2)}], 160, 1) == [0, 0]


@given(st.data())
def test_any_wishes_are_granted_whole_in_turn_and_never_over(data: st.DataObject) -> None:
    free = {name: data.draw(amounts) for name in NAMES}
    rests = {name: rest(data.draw(amounts)) for name in NAMES}
    wish = st.dictionaries(st.sampled_from(NAMES), amounts.filter(bool), min_size=1)
    wishes = data.draw(st.lists(wish, max_size=6))
    taken = grants([demand(name, int(free[name])) for name in NAMES], wishes, rests)
    assert all(0 <= taken[name] <= rests[name].rest for name in NAMES)
    had = {name: free[name] + taken[name] for name in NAMES}
    could = {name: free[name] + rests[name].rest for name in NAMES}
    for wanted in wishes:
        fits = all(amount <= could[name] for name, amount in wanted.items())
        if fits:  # else it waits, and nothing was counted for it
            assert all(amount <= had[name] for name, amount in wanted.items())
            for name, amount in wanted.items():
                had[name] -= amount
                could[name] -= amount
