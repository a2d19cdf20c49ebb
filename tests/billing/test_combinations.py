"""Budgets and limits of several scopes together: found without looking at all of them, and counted where all apply."""

import random
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.allowances import NARROWEST_FIRST, Allowance, ScopeKind, scope_of
from billing.ids import new_id
from billing.leases import BudgetExhausted, Leases, LimitExceeded, Need
from billing.limits import list_limits
from billing.matching import Matching
from billing.pots import Account
from tests.billing.replicas import admit, admit_to, budget, budgets_of, limit

kinds = st.sampled_from(NARROWEST_FIRST)
scope_sets = st.dictionaries(kinds, st.sampled_from(["a=1", "b=1", "c=1"]), min_size=1)
calls = st.dictionaries(kinds, st.lists(st.sampled_from(["a=1", "b=1", "c=1"]), unique=True, max_size=3))


def account(scopes: dict[ScopeKind, str]) -> Account:
    (kind, identifier), *_ = scopes.items()
    kind, identifier, also = scope_of(kind, identifier, {k: v for k, v in scopes.items() if k != kind})
    terms: dict[str, Any] = {"unit": "money", "window": "none", "time_zone": "UTC", "limit_amount": Decimal(1)}
    return Account(
        Allowance(id=new_id(), scope_kind=kind, scope_id=identifier, also=also, currency="USD", hard=True, **terms)
    )


def all_scopes(found: Account) -> dict[ScopeKind, str]:
    return {found.terms.scope_kind: found.terms.scope_id, **found.terms.also}


@given(st.lists(scope_sets, max_size=20), calls)
def test_a_call_finds_those_whose_scopes_it_all_has(
    wanted: list[dict[ScopeKind, str]], call: dict[ScopeKind, list[str]]
) -> None:
    accounts = [account(scopes) for scopes in wanted]
    matching = Matching()
    assert matching.find(call) is None or not any(call.values())
    for kind, identifier in matching.unknown:
        matching.file(
            (kind, identifier), [a for a in accounts if (a.terms.scope_kind, a.terms.scope_id) == (kind, identifier)]
        )
    found = matching.find(call)
    assert found is not None
    expected = [a for a in accounts if all(i in call.get(k, ()) for k, i in all_scopes(a).items())]
    assert sorted(id(a) for a in found) == sorted(id(a) for a in expected)


def test_nobody_looks_at_the_budgets_of_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has ten thousand budgets, one a model: a call looks once."""
    accounts = [account({"user": "u", "model": f"m{n}"}) for n in range(10_000)]
    matching = Matching()
    matching.file(("user", "u"), accounts)
    matching.file(("model", "m7"), [])
    filed = matching.scopes["user", "u"]
    assert filed is not None
    ((_, by_ids),) = filed.together
    looked = []

    class Counting(dict[tuple[str, ...], tuple[Account, ...]]):
        def get(self, key: Any, default: Any = None) -> Any:
            looked.append(key)
            return super().get(key, default)

    matching.scopes["user", "u"] = filed._replace(together=((("model",), Counting(by_ids)),))
    assert matching.find({"user": ["u"], "model": ["m7"]}) == [accounts[7]]
    assert looked == [("m7",)]


async def test_only_calls_in_all_scopes_count(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "model", "large", "1", also={"user": "u"})
    hold = await admit(leases, "1", user="u", model="large")
    assert len(hold.charges) == 1
    with pytest.raises(BudgetExhausted, match="the user's and model's budget of 1 USD has 0 left") as caught:
        await admit(leases, "0.1", user="u", model="large")
    assert (caught.value.scope_kind, caught.value.scope_id, caught.value.also) == ("user", "u", {"model": "large"})
    for scopes in ({"user": "u", "model": "small"}, {"user": "v", "model": "large"}, {"user": "u"}, {"model": "large"}):
        assert (await admit(leases, "9", **scopes)).charges == []


async def test_one_of_the_tags_of_a_call_is_enough(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "team", "t", "1", also={"tag": "app=search"})
    scopes: Any = {"team": ["t"], "tag": ["app=chat", "app=search"]}
    await admit_to(leases, scopes, Need(Decimal(1), 0))
    with pytest.raises(BudgetExhausted):
        await admit_to(leases, scopes, Need(Decimal(1), 0))
    await admit_to(leases, scopes | {"tag": ["app=chat"]}, Need(Decimal(1), 0))


async def test_with_its_scopes_alone_all_or_nothing(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "user", "u", "10")
    await budget(engine, "user", "u", "1", also={"model": "m", "org": "o"})
    with pytest.raises(BudgetExhausted):
        await admit(leases, "2", user="u", model="m", org="o")
    await admit(leases, "10", user="u", model="other", org="o")


async def test_limits_of_several_scopes(engine: AsyncEngine, leases: Leases) -> None:
    first = await limit(engine, "tag", "app=search", "concurrent", 1, also={"model": "m"})
    assert await limit(engine, "model", "m", "concurrent", 1, also={"tag": "app=search"}) == first
    await admit(leases, "0", tag="app=search", model="m")
    with pytest.raises(LimitExceeded, match="the tag's and model's limit of 1 calls"):
        await admit(leases, "0", tag="app=search", model="m")
    await admit(leases, "0", tag="app=search", model="other")
    async with engine.connect() as conn:
        (found,) = await list_limits(conn)
    assert (found.scope_kind, found.scope_id, found.also) == ("tag", "app=search", {"model": "m"})


async def test_the_order_of_the_scopes_makes_no_other_budget(engine: AsyncEngine) -> None:
    order = list(NARROWEST_FIRST[:5])
    ids = {kind: "a=b" if kind == "tag" else kind for kind in order}
    made = set()
    for _ in range(5):
        random.shuffle(order)
        also = {kind: ids[kind] for kind in order[1:]}
        made.add(await budget(engine, order[0], ids[order[0]], "1", also=also))
    assert len(made) == 1
    assert (await budgets_of(engine))["key"].also == {kind: ids[kind] for kind in NARROWEST_FIRST[1:5]}


async def test_bad_combinations_are_refused_with_a_sentence(engine: AsyncEngine) -> None:
    with pytest.raises(ValueError, match="user is there twice"):
        await budget(engine, "user", "u", "1", also={"user": "v"})
    with pytest.raises(ValueError, match="'planet' is not a scope"):
        await budget(engine, "user", "u", "1", also={"planet": "mars"})
    with pytest.raises(ValueError, match="'x' is not a tag"):
        await budget(engine, "user", "u", "1", also={"tag": "x"})
