"""What an operator sets: rules, channels, silences, each refused with a sentence where it makes no sense."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.channels import list_channels, remove_channel, set_channel
from billing.alerts.kinds import KINDS, BudgetShare, Spike
from billing.alerts.rules import list_rules, remove_rule, set_rule
from billing.alerts.scopes import rule_scope
from billing.alerts.silences import end_silence, list_silences, silence
from billing.ids import new_id


async def test_an_installation_starts_with_three_rules(conn: AsyncConnection) -> None:
    rules = await list_rules(conn)
    assert [(rule.kind, rule.scope.kind, rule.channels) for rule in rules] == [
        ("budget_share", "all", None),
        ("unpriced_model", "all", None),
        ("spool", "all", None),
    ]
    assert rules[0].parameters == BudgetShare()
    assert await remove_rule(conn, rules[0].id) and not await remove_rule(conn, rules[0].id)
    assert len(await list_rules(conn)) == 2


async def test_a_rule_is_made_changed_and_switched_off(conn: AsyncConnection) -> None:
    first = await set_rule(conn, "spike", "tag", "feature=*", {"score": "4.5", "minimum": "0.10"})
    rule = next(rule for rule in await list_rules(conn) if rule.id == first)
    assert rule.parameters == Spike(score=4.5, minimum=Decimal("0.10")) and rule.enabled
    assert await set_rule(conn, "spike", "tag", "feature=*", {"warm_up_days": 21}, enabled=False) == first
    rule = next(rule for rule in await list_rules(conn) if rule.id == first)
    assert rule.parameters == Spike(warm_up_days=21) and not rule.enabled
    shares = await set_rule(conn, "budget_share", parameters={"shares": "0.25,1"})
    rule = next(rule for rule in await list_rules(conn) if rule.id == shares)
    assert rule.parameters == BudgetShare(shares=(Decimal("0.25"), Decimal(1)))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("spice",), "'spice' is not a kind of rule; there are budget_share"),
        (("spike", "planet", "earth"), "'planet' is not a scope; use one of all, org"),
        (("spike", "all", "x"), "the scope all has no id"),
        (("spike", "user", ""), r"say which user, or \* for each"),
        (("spike", "user", "ada"), "'ada' is not the id of a user"),
        (("spike", "tag", "search"), "is not a tag; write it as name=value"),
        (("spool", "model", "m"), "is about Farthing itself: its scope is all"),
        (("spike", "all", "", {"sigma": 3}), "a rule spike has no parameter 'sigma'; there are clear_minutes"),
        (("spike", "all", "", {"score": "much"}), r"rule spike: Expected `float`"),
        (("spike", "all", "", {"score": "nan"}), "score is nan: it must be from 1 to 100"),
        (("spike", "all", "", {"minimum": "-1"}), "minimum is -1: it must be from 0"),
        (("spike", "all", "", {"minimum": "NaN"}), "minimum is NaN"),
        (("spike", "all", "", {"warm_up_days": 1}), "warm_up_days is 1: it must be from 2 to 56"),
        (("error_rate", "all", "", {"share": 0}), "share is 0"),
        (("latency", "all", "", {"minutes": 61}), "minutes is 61"),
        (("budget_share", "all", "", {"shares": "0.8,0.5"}), "different shares, smallest first"),
        (("budget_share", "all", "", {"shares": ""}), "rule budget_share: "),
        (("budget_share", "all", "", {"shares": "1,99"}), "each of shares is 99"),
        (("margin", "all", "", {"clear_minutes": -1}), "clear_minutes is -1"),
    ],
)
async def test_a_rule_that_makes_no_sense(conn: AsyncConnection, arguments: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        await set_rule(conn, *arguments)
    assert len(await list_rules(conn)) == 3


def test_every_kind_says_what_it_is_and_has_defaults() -> None:
    for kind in KINDS.values():
        assert kind() == kind() and kind.__doc__


@pytest.mark.parametrize(
    ("scope", "holds"),
    [
        (("all", ""), {("user", "1"): True, ("all", ""): True}),
        (("user", "*"), {("user", "1"): True, ("team", "1"): False}),
        (("tag", "feature=*"), {("tag", "feature=chat"): True, ("tag", "env=prod"): False}),
        (("tag", "*"), {("tag", "feature=chat"): True}),
        (("model", "m"), {("model", "m"): True, ("model", "n"): False}),
    ],
)
def test_what_a_scope_holds(scope: tuple[str, str], holds: dict[tuple[str, str], bool]) -> None:
    assert {of: rule_scope(*scope).holds(*of) for of in holds} == holds


async def test_channels_keep_references_alone(conn: AsyncConnection) -> None:
    await set_channel(conn, "hook", "webhook", "env:HOOK_URL", secret="file:/run/secrets/hook")
    await set_channel(conn, "mail", "email", "file:/run/secrets/smtp", sender="f@x.org", recipients=["a@x.org"])
    assert [(each.name, each.address, each.recipients) for each in await list_channels(conn)] == [
        ("hook", "env:HOOK_URL", None),
        ("mail", "file:/run/secrets/smtp", ("a@x.org",)),
    ]
    rule = await set_rule(conn, "spike", channels=["hook"])
    with pytest.raises(ValueError, match=f"the rule {rule} sends to 'hook'"):
        await remove_channel(conn, "hook")
    with pytest.raises(ValueError, match="there is no channel 'nowhere'; there are hook, mail"):
        await set_rule(conn, "spike", channels=["hook", "nowhere"])
    await remove_rule(conn, rule)
    assert await remove_channel(conn, "hook") and not await remove_channel(conn, "hook")


@pytest.mark.parametrize(
    ("name", "kind", "address", "more", "sentence"),
    [
        ("a b", "slack", "env:X", {}, "'a b' cannot be a channel's name"),
        ("x", "pager", "env:X", {}, "'pager' is not a kind of channel"),
        ("x", "slack", "https://hooks.slack.com/services/T/B/hush", {}, "must say where it is read: env:NAME"),
        ("x", "webhook", "env:X", {"secret": "hush"}, "the secret must say where it is read"),
        ("x", "slack", "env:X", {"secret": "env:Y"}, "a channel of kind slack is not signed"),
        ("x", "email", "env:X", {"sender": "a@b"}, "at least one recipient"),
        ("x", "slack", "env:X", {"recipients": ["a@b"]}, "the other kinds take neither"),
        ("x", "email", "env:X", {"sender": "a@b", "recipients": ["c@d\nBcc: e@f"]}, "is not an e-mail address"),
    ],
)
async def test_a_channel_that_makes_no_sense(
    conn: AsyncConnection, name: str, kind: str, address: str, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        await set_channel(conn, name, kind, address, **more)
    assert "hush" not in str(caught.value)


async def test_silences(conn: AsyncConnection) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    rule = (await list_rules(conn))[0].id
    of_rule = await silence(conn, soon, rule_id=rule, reason="moving house")
    of_tag = await silence(conn, soon + timedelta(hours=1), scope_kind="tag", scope_id="feature=*")
    by_id = {each.id: each for each in await list_silences(conn)}
    assert list(by_id) == [of_tag, of_rule] and by_id[of_rule].reason == "moving house"
    assert by_id[of_rule].covers(rule, "user", "1") and not by_id[of_rule].covers(new_id(), "user", "1")
    assert by_id[of_tag].covers(new_id(), "tag", "feature=chat") and not by_id[of_tag].covers(rule, "user", "1")
    assert await end_silence(conn, of_tag) and not await end_silence(conn, of_tag)
    for until, more, sentence in [
        (datetime.now(UTC) - timedelta(seconds=1), {}, "is over already"),
        (datetime(2030, 1, 1), {}, "needs a time zone"),
        (soon, {"rule_id": new_id()}, "there is no rule"),
        (soon, {"scope_kind": "tag"}, "say which tag"),
        (soon, {"reason": "x" * 501}, "at most 500"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            await silence(conn, until, **more)
