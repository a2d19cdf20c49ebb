"""Who pays is decided by the key alone; what a caller may say about itself, and what is refused."""

from typing import Any

import pytest

from billing.ids import new_id
from billing.people import Principal, create_user, restrict_key
from billing.restrictions import Restrictions
from gateway.attribution import attribute
from gateway.errors import ApiError
from tests.gateway.running import CHAT, Gateway
from tests.gateway.scripted import Scripted


def principal(tags: dict[str, str] | None = None, *, may_attribute: bool = False) -> Principal:
    return Principal(
        key_id=new_id(),
        org_id=new_id(),
        team_id=None,
        user_id=None,
        name="k",
        expires_at=None,
        revoked_at=None,
        tags=tags or {},
        may_attribute=may_attribute,
    )


def header(value: str) -> dict[str, str]:
    return {"x-farthing-tags": value}


def test_without_permission_the_key_alone_says_what_counts() -> None:
    key = principal({"scenario": "chat"})
    assert attribute(key, {}, {}) == ({"scenario": "chat"}, ("scenario=chat",))
    assert attribute(key, {}, {"user": "eve"}) == ({"scenario": "chat", "user": "eve"}, ("scenario=chat",))
    assert attribute(principal({"user": "ada"}), {}, {"user": "eve"}) == ({"user": "ada"}, ("user=ada",))
    with pytest.raises(ApiError, match="may not set x-farthing-tags") as refused:
        attribute(key, header("scenario=chat"), {})
    assert (refused.value.status, refused.value.anthropic_type) == (403, "permission_error")


def test_with_permission_all_count() -> None:
    key = principal({"scenario": "chat"}, may_attribute=True)
    tags, scopes = attribute(key, header(" feature = search ,batch=%E5%AE%A2%2C%3D"), {"user": "eve"})
    assert tags == {"scenario": "chat", "feature": "search", "batch": "客,=", "user": "eve"}
    assert scopes == ("batch=客,=", "feature=search", "scenario=chat", "user=eve")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("", "write `name=value`"),
        ("a", "write `name=value`"),
        ("a=b,", "write `name=value`"),
        ("a=b,a=c", "each name once"),
        ("a=", "the tag 'a' needs 1 to 256"),
        ("a=%ff", "the value of `a` is not percent-encoded UTF-8"),
        ("a=b%0d%0ax", "the tag 'a' needs 1 to 256 printable"),
        ("org=other", "'org' cannot be a tag"),
        ("team=other", "'team' cannot be a tag"),
        ("key=other", "'key' cannot be a tag"),
        ("scenario=free", "`scenario` is set by the API key; leave it out"),
        (",".join(f"t{number}=x" for number in range(17)), "17 tags are too many"),
    ],
)
def test_a_header_that_cannot_be_used(value: str, sentence: str) -> None:
    key = principal({"scenario": "chat"}, may_attribute=True)
    with pytest.raises(ApiError) as refused:
        attribute(key, header(value), {})
    assert sentence in refused.value.message
    assert (refused.value.status, refused.value.code) == (400, "invalid_tags")


async def test_naming_somebody_else_is_charged_to_the_key(gateway: Gateway) -> None:
    async with gateway.engine.begin() as connection:
        other = await create_user(connection, gateway.people.org, "Eve")
    claims = {
        "user": str(other),
        "user_id": str(other),
        "team": "Ads",
        "org_id": str(new_id()),
        "key_id": str(new_id()),
        "metadata": {"user_id": str(other), "team_id": "Ads"},
    }
    headers = {"x-farthing-user": str(other), "openai-organization": "org-other", "openai-project": "proj-other"}
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT | claims, headers=headers)
    assert answer.status_code == 200
    row = await gateway.row()
    people = gateway.people
    assert (row["org_id"], row["team_id"], row["user_id"], row["key_id"]) == (
        people.org,
        people.team,
        people.user,
        people.key,
    )
    assert row["tags"] == {"user": str(other)}


async def test_tags_reach_the_ledger_where_the_key_allows_it(gateway: Gateway, upstream: Scripted) -> None:
    tagged = {"x-farthing-tags": "feature=search"}
    refused = await gateway.http.post("/v1/chat/completions", json=CHAT, headers=tagged)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "attribution_not_allowed")
    assert not upstream.chats
    async with gateway.engine.begin() as connection:
        allowed = Restrictions(tags={"scenario": "chat"}, may_attribute=True)
        await restrict_key(connection, gateway.people.key, allowed)
    await gateway.heard()
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT, headers=tagged)
    assert answer.status_code == 200
    assert (await gateway.http.post("/v1/chat/completions", content=b"{}")).status_code == 400
    rows = await gateway.rows(3)
    both = {"scenario": "chat", "feature": "search"}
    assert [row["tags"] for row in rows] == [{}, both, {"scenario": "chat"}]


@pytest.mark.parametrize(
    ("headers", "body", "named"),
    [
        ({"x-base-url": "http://evil"}, {}, "The header `x-base-url`"),
        ({"OpenAI-Base-URL": "http://evil"}, {}, "The header `openai-base-url`"),
        ({"helicone-target-url": "http://evil"}, {}, "The header `helicone-target-url`"),
        ({}, {"base_url": "http://evil"}, "The field `base_url`"),
        ({}, {"api_base": "http://evil"}, "The field `api_base`"),
        ({}, {"api_key": "sk-hidden"}, "The field `api_key`"),
        ({}, {"apiKey": None}, "The field `apiKey`"),
    ],
)
async def test_where_a_request_goes_is_not_for_the_caller_to_say(
    gateway: Gateway, upstream: Scripted, headers: dict[str, str], body: dict[str, Any], named: str
) -> None:
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT | body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "address_refused")
    assert named in answer.json()["error"]["message"] and "evil" not in answer.text and "hidden" not in answer.text
    assert not upstream.chats
    if headers:
        assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 400
