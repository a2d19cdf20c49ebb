"""Nobody outside the process can speak for a key as the batch runner does."""

from billing.ids import new_id
from billing.people import Principal
from gateway.trusted import SCOPE_ENTRY, Answer, Trusted, ask
from tests.gateway.running import CHAT, Gateway


async def test_no_header_vouches_for_anybody(gateway: Gateway) -> None:
    key = str(gateway.people.key)
    for name, value in ((SCOPE_ENTRY, key), (f"x-{SCOPE_ENTRY}", key), ("farthing-trusted", f"principal={key}")):
        answer = await gateway.http.post("/v1/chat/completions", json=CHAT, headers={"authorization": "", name: value})
        assert answer.status_code == 401


def test_only_the_object_itself_counts() -> None:
    principal = Principal(
        key_id=new_id(), org_id=new_id(), team_id=None, user_id=None, name="k", expires_at=None, revoked_at=None
    )
    trusted = Trusted(principal, "batch", 1, {})
    assert Trusted.of({SCOPE_ENTRY: trusted}) is trusted
    for forged in ("x", b"x", {"principal": principal}, principal, ["x"], None):
        assert Trusted.of({SCOPE_ENTRY: forged}) is None
    assert Trusted.of({}) is None


async def test_an_answer_in_pieces() -> None:
    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        message = await receive()
        assert (scope["path"], message["body"], message["more_body"]) == ("/v1/x", b"{}", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-A", b"1")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        assert not answer.complete
        await send({"type": "http.response.body", "body": b"c"})

    principal = Principal(
        key_id=new_id(), org_id=new_id(), team_id=None, user_id=None, name="k", expires_at=None, revoked_at=None
    )
    answer = Answer()
    await ask(app, "/v1/x", b"{}", Trusted(principal, "batch", 1, {}), answer)
    assert (answer.status, answer.headers, answer.body, answer.complete) == (200, {"x-a": "1"}, b"abc", True)
