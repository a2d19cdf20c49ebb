"""Each kind of channel against a receiver on a real socket: what arrives, how it is signed, and what a refusal says."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from aiohttp import web
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from billing.alerts import send as sending
from billing.alerts.channels import LARGEST_FILE, Channel
from billing.alerts.message import Cause, Message
from billing.alerts.send import SendError, send
from billing.alerts.senders.wecom import wecom
from billing.ids import new_id
from tests.billing.receivers import Receiver, certificate, http_receiver, smtp_receiver

NOW = datetime.now(UTC)
MESSAGE = Message(
    event="opened",
    alert_id=new_id(),
    rule="spike",
    scope_kind="team",
    scope_id=str(new_id()),
    scope="team <!channel> *Search*",
    summary="12.00 USD spent in the hour up to 14:05 UTC, 3.1 times as much as usual (3.90 USD).",
    details={"spent": "12.00", "score": 4.2},
    causes=(Cause("tag", "feature=chat", "feature=chat", 0.91),),
    opened_at=NOW,
    at=NOW,
)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with http_receiver() as running:
        yield running


@pytest.fixture
def told(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sends to the receiver as a channel of a kind."""

    async def tell(kind: str, path: str = "/hook", secret: str | None = None, **changes: Any) -> None:
        monkeypatch.setenv("ALERT_URL", receiver.url + path)
        if secret is not None:
            monkeypatch.setenv("ALERT_SECRET", secret)
        fields: dict[str, Any] = {
            "name": "ops",
            "kind": kind,
            "address": "env:ALERT_URL",
            "secret": None if secret is None else "env:ALERT_SECRET",
            "sender": None,
            "recipients": None,
            "created_at": NOW,
        }
        await send(Channel(**fields | changes), MESSAGE, DELIVERY)

    return tell


DELIVERY = new_id()


@pytest.mark.parametrize("secret", ["whsec_" + base64.b64encode(b"k" * 32).decode(), "any text at all"])
async def test_a_webhook_is_verified_by_the_standard_library_of_webhooks(
    told: Any, receiver: Receiver, secret: str
) -> None:
    await told("webhook", secret=secret)
    [got] = receiver.got
    assert got.headers["webhook-id"] == str(DELIVERY)
    key = secret if secret.startswith("whsec_") else base64.b64encode(secret.encode()).decode()
    payload = Webhook(key).verify(got.body, got.headers)
    assert payload["type"] == "alert.opened"
    assert payload["data"]["causes"] == [{"kind": "tag", "name": "feature=chat", "id": "feature=chat", "share": 0.91}]
    assert payload["data"]["details"]["spent"] == "12.00"
    with pytest.raises(WebhookVerificationError):
        Webhook(key).verify(got.body + b" ", got.headers)


async def test_slack_gets_blocks_that_call_nobody(told: Any, receiver: Receiver) -> None:
    await told("slack", "/services/T/B/x")
    body = json.loads(receiver.got[0].body)
    header, *sections = body["blocks"]
    assert header["type"] == "header" and header["text"]["type"] == "plain_text" and len(header["text"]["text"]) <= 150
    assert all(each["text"]["type"] == "mrkdwn" and len(each["text"]["text"]) <= 3000 for each in sections)
    assert "<!channel>" not in body["text"] and "&lt;!channel&gt;" in body["text"]
    assert any("tag feature=chat (91% of the rise)" in each["text"]["text"] for each in sections)


async def test_feishu_gets_a_signed_card(told: Any, receiver: Receiver) -> None:
    receiver.answer = lambda _: web.json_response({"code": 0, "msg": "success", "data": {}})
    await told("feishu", "/open-apis/bot/v2/hook/x", secret="s3cret")
    body = json.loads(receiver.got[0].body)
    assert body["msg_type"] == "interactive"
    assert body["card"]["header"]["title"]["tag"] == "plain_text"
    assert [each["text"]["tag"] for each in body["card"]["elements"]] == ["plain_text"] * 3
    key = f"{body['timestamp']}\ns3cret".encode()
    assert body["sign"] == base64.b64encode(hmac.new(key, digestmod=hashlib.sha256).digest()).decode()
    assert abs(int(body["timestamp"]) - datetime.now(UTC).timestamp()) < 60


async def test_dingtalk_gets_markdown_and_a_signed_address(told: Any, receiver: Receiver) -> None:
    receiver.answer = lambda _: web.json_response({"errcode": 0, "errmsg": "ok"})
    await told("dingtalk", "/robot/send?access_token=t", secret="SECx")
    [got] = receiver.got
    query = parse_qs(urlsplit(got.path).query)
    assert query["access_token"] == ["t"]
    signed = hmac.new(b"SECx", f"{query['timestamp'][0]}\nSECx".encode(), hashlib.sha256).digest()
    assert base64.b64decode(query["sign"][0]) == signed
    assert len(query["timestamp"][0]) == 13, "milliseconds"
    body = json.loads(got.body)
    assert body["msgtype"] == "markdown" and set(body["markdown"]) == {"title", "text"}
    assert "team ＜!channel＞ *Search*" in body["markdown"]["text"]


async def test_wecom_gets_markdown_of_at_most_4096_bytes(told: Any, receiver: Receiver) -> None:
    receiver.answer = lambda _: web.json_response({"errcode": 0, "errmsg": "ok"})
    await told("wecom", "/cgi-bin/webhook/send?key=k")
    body = json.loads(receiver.got[0].body)
    assert body["msgtype"] == "markdown" and "12.00 USD" in body["markdown"]["content"]
    long = msgspec.structs.replace(MESSAGE, summary="费" * 5000)
    assert len(json.loads(wecom(long, "http://x").body)["markdown"]["content"].encode()) <= 4096


@pytest.mark.parametrize(
    ("kind", "answer", "reason"),
    [
        ("feishu", {"code": 19021, "msg": "sign match fail"}, "code 19021: sign match fail"),
        ("dingtalk", {"errcode": 310000, "errmsg": "sign not match"}, "errcode 310000: sign not match"),
        ("wecom", {"errcode": 45009, "errmsg": "freq out of limit"}, "errcode 45009: freq out of limit"),
        ("wecom", {}, "errcode None"),
        ("feishu", "hello", "is the address right"),
    ],
)
async def test_a_refusal_in_a_200_is_a_refusal(
    told: Any, receiver: Receiver, kind: str, answer: Any, reason: str
) -> None:
    receiver.answer = lambda _: web.json_response(answer)
    with pytest.raises(SendError, match=reason):
        await told(kind)


async def test_what_a_receiver_answers_is_said_and_its_address_is_not(told: Any, receiver: Receiver) -> None:
    for status, headers, reason, after in [
        (500, {}, "HTTP 500: broken", None),
        (404, {}, "HTTP 404", None),
        (302, {"location": "/elsewhere"}, "HTTP 302", None),
        (429, {"retry-after": "120"}, "HTTP 429", 120.0),
        (429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, "HTTP 429", None),
    ]:
        receiver.answer = lambda _, s=status, h=headers: web.Response(status=s, headers=h, text="broken")
        with pytest.raises(SendError, match=reason) as caught:
            await told("slack", "/services/token")
        assert caught.value.retry_after == after
        assert "token" not in str(caught.value)
    assert all(got.path == "/services/token" for got in receiver.got), "no redirect is followed"


async def test_an_answer_too_large_or_too_late_is_given_up(
    told: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answer = lambda _: web.Response(body=b"x" * 200_000)
    with pytest.raises(SendError, match="larger than 65536 bytes"):
        await told("webhook")

    async def never(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    receiver.answer = never
    monkeypatch.setattr(sending, "SECONDS", 0.3)
    with pytest.raises(SendError, match=r"no answer within 0.3 seconds|cannot be reached: ReadTimeout"):
        await told("webhook")


@pytest.mark.parametrize(
    ("address", "content", "reason"),
    [
        ("env:ALERT_NONE", None, "the environment variable ALERT_NONE is not set"),
        ("file:/nowhere/token", None, "/nowhere/token cannot be read by this gateway: No such file"),
        ("file:", b"", "is empty"),
        ("file:", b"\xff\xfe", "is not UTF-8 text"),
        ("file:", b"x" * (LARGEST_FILE + 1), "larger than"),
        ("file:", b"ftp://u:hush@x", "must start with http:// or https://"),
        ("file:", b"http://u:hush@[::bad/", "not a URL|cannot be reached"),
        ("file:", b"http://u:hush@127.0.0.1:1/hush", "cannot be reached: ConnectError"),
    ],
)
async def test_a_bad_address_is_named_and_not_shown(
    told: Any, tmp_path: Path, address: str, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "url").write_bytes(content)
        address = f"file:{tmp_path / 'url'}"
    with pytest.raises(SendError, match=reason) as caught:
        await told("webhook", address=address)
    assert "hush" not in str(caught.value)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.filterwarnings("ignore:Requiring AUTH")  # the TLS is the listener's
@pytest.mark.parametrize("from_the_start", [False, True])
async def test_mail_goes_over_tls_with_a_login(
    told: Any, pem: Path, from_the_start: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    async with smtp_receiver(pem, from_the_start) as mailbox:
        scheme = "smtps" if from_the_start else "smtp"
        (tmp_path / "url").write_text(f"{scheme}://farthing%40x:p%40ss%3Aword@127.0.0.1:{mailbox.port}\n")
        address = f"file:{tmp_path / 'url'}"
        await told("email", address=address, sender="f@example.org", recipients=("a@example.org", "b@example.org"))
        [mail] = mailbox.mails
        assert mailbox.logins == [b"farthing@x"]
        assert mailbox.to == [["a@example.org", "b@example.org"]]
        assert mail["Message-ID"] == f"<{DELIVERY}@example.org>"
        assert mail["Subject"] == "[Farthing] Alert: spike, team <!channel> *Search*"
        assert "91% of the rise" in mail.get_content()


async def test_a_server_that_nobody_vouches_for_gets_no_mail(told: Any, pem: Path, tmp_path: Path) -> None:
    async with smtp_receiver(pem) as mailbox:
        (tmp_path / "url").write_text(f"smtp://farthing%40x:hush@127.0.0.1:{mailbox.port}")
        with pytest.raises(SendError, match="self-signed certificate"):
            await told("email", address=f"file:{tmp_path / 'url'}", sender="f@x", recipients=("a@x",))
        assert mailbox.logins == []


async def test_mail_without_tls_and_refused_recipients(told: Any, tmp_path: Path) -> None:
    async with smtp_receiver(None) as mailbox:
        (tmp_path / "url").write_text(f"smtp+plain://127.0.0.1:{mailbox.port}")
        mail: dict[str, Any] = {"address": f"file:{tmp_path / 'url'}", "sender": "f@x.org"}
        mailbox.refuse = ("b@x.org",)
        channel = Channel(
            name="m", kind="email", secret=None, recipients=("a@x.org", "b@x.org"), created_at=NOW, **mail
        )
        assert await send(channel, MESSAGE, DELIVERY) == "b@x.org: 550 no such mailbox"
        assert mailbox.to == [["a@x.org"]]
        with pytest.raises(SendError, match=r"b@x.org: 550 no such mailbox"):
            await told("email", recipients=("b@x.org",), **mail)
        (tmp_path / "url").write_text(f"smtp://127.0.0.1:{mailbox.port}")  # wants STARTTLS, which is not offered
        with pytest.raises(SendError, match="STARTTLS"):
            await told("email", recipients=("a@x.org",), **mail)
        (tmp_path / "url").write_text("http://127.0.0.1")
        with pytest.raises(SendError, match="must be like smtps://USER:PASSWORD@HOST"):
            await told("email", recipients=("a@x.org",), **mail)
