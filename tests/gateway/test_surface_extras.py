"""What each surface has besides answers: counts, refusals in its own shape, embeddings, text completions, models."""

from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from billing.people import restrict_key
from billing.restrictions import Restrictions
from tests.gateway.running import Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted
from tests.gateway.vendors import QUESTION, anthropic_upstream, openai_upstream, with_claude


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return with_claude(settings)


@pytest.fixture
def upstreams(upstream: Scripted) -> Scripted:
    upstream.script = openai_upstream
    upstream.paths["/v1/messages"] = anthropic_upstream
    return upstream


async def test_message_start_has_the_engine_s_own_count(gateway: Gateway, claude: AsyncAnthropic) -> None:
    async with claude.messages.stream(model="tiny", max_tokens=9, messages=QUESTION) as events:
        first = await anext(aiter(events))
        assert first.type == "message_start"
        usage = first.message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (6, 4, 0)
        message = await events.get_final_message()
    assert message.content[0].type == "text" and message.content[0].text == "Hello world"
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 3)


async def test_counting_tokens(gateway: Gateway, upstream: Scripted, claude: AsyncAnthropic) -> None:
    async def count(request: Request, connection: Connection) -> None:
        await connection.json({"input_tokens": 42})

    upstream.paths["/v1/messages/count_tokens"] = count
    tools: Any = [{"name": "f", "input_schema": {"type": "object"}}]
    assert (await claude.messages.count_tokens(model="tiny", messages=QUESTION, tools=tools)).input_tokens == 10
    asked = next(request for request in upstream.requests if request.path == "/tokenize")
    assert asked.body["tools"][0]["function"]["name"] == "f", "tools are part of the prompt"
    assert (await claude.messages.count_tokens(model="claude", messages=QUESTION)).input_tokens == 42
    with pytest.raises(anthropic.APIStatusError, match="cannot count tokens") as caught:
        await claude.messages.count_tokens(model="hosted", messages=QUESTION)
    assert caught.value.status_code == 501
    assert len(await gateway.rows(3)) == 3, "the SDK did not try again"


async def test_refusals_in_anthropic_s_shape(gateway: Gateway, upstreams: Scripted, claude: AsyncAnthropic) -> None:
    async with AsyncAnthropic(base_url=gateway.url, api_key="no-key", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model="tiny", max_tokens=9, messages=QUESTION)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await claude.messages.create(model="nobody", max_tokens=9, messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError, match="container"):
        await claude.messages.create(model="hosted", max_tokens=9, messages=QUESTION, extra_body={"container": "c"})
    await claude.messages.create(model="claude", max_tokens=9, messages=QUESTION, extra_body={"container": "c"})
    assert upstreams.requests[-1].body["container"] == "c"

    async def refuse(request: Request, connection: Connection) -> None:
        error = {"type": "invalid_request_error", "message": "max_tokens: too many"}
        await connection.json({"type": "error", "error": error, "request_id": "req_1"}, 400)

    upstreams.paths["/v1/messages"] = refuse
    with pytest.raises(anthropic.BadRequestError, match="too many"):
        await claude.messages.create(model="claude", max_tokens=9, messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="too many") as caught:
        await gateway.sdk.chat.completions.create(model="claude", messages=QUESTION)
    assert caught.value.type == "invalid_request_error"


async def test_a_response_is_not_kept(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="no responses are kept here") as caught:
        await gateway.sdk.responses.create(model="tiny", input="q", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


async def test_embeddings_as_openai_s_clients_ask_for_them(gateway: Gateway, upstream: Scripted) -> None:
    numbers = [i / 256 for i in range(768)]

    async def embed(request: Request, connection: Connection) -> None:
        data = [{"object": "embedding", "index": 0, "embedding": numbers}]  # whatever was asked for
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        await connection.json({"object": "list", "data": data, "model": "m-1", "usage": usage})

    upstream.paths["/v1/embeddings"] = embed
    reply = await gateway.sdk.embeddings.create(model="hosted", input="text")
    assert upstream.requests[-1].body["encoding_format"] == "base64"
    assert reply.data[0].embedding == numbers
    row = await gateway.row()
    assert (row["attempts"][0]["input_fresh"], row["attempts"][0]["output_text"]) == (3, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_text_completions(gateway: Gateway, upstream: Scripted, stream: bool) -> None:
    async def complete(request: Request, connection: Connection) -> None:
        def reply(text: str, finish: str | None) -> dict[str, Any]:
            choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
            return {"id": "c", "object": "text_completion", "created": 1, "model": "m-1", "choices": [choice]}

        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        if not request.body["stream"]:
            await connection.json(reply("你好🙂", "stop") | {"usage": usage})
            return
        await connection.start()
        await connection.frame(reply("你好", None))
        await connection.frame(reply("🙂", "stop"))
        await connection.frame(reply("", None) | {"choices": [], "usage": usage})
        await connection.done()

    upstream.paths["/v1/completions"] = complete
    prompt = ["one", "two"]
    sdk = gateway.sdk
    if stream:
        parts = await sdk.completions.create(model="hosted", prompt=prompt, stream=True)
        text = "".join([part.choices[0].text async for part in parts])
    else:
        text = (await sdk.completions.create(model="hosted", prompt=prompt, stream=False)).choices[0].text
    assert text == "你好🙂"
    assert upstream.requests[-1].body["prompt"] == prompt
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["input_fresh"], attempt["output_text"], attempt["usage_source"]) == (3, 2, "upstream")


async def test_parameters_that_a_route_drops(settings: dict[str, Any], upstreams: Scripted) -> None:
    settings["models"]["claude"]["drop_params"] = True
    async with running_gateway(settings) as gateway:
        raw = await gateway.sdk.chat.completions.with_raw_response.create(model="claude", messages=QUESTION, seed=1)
        assert raw.headers["x-farthing-dropped-params"] == "seed"
        assert "seed" not in upstreams.requests[-1].body


async def test_both_vendors_clients_list_the_models(gateway: Gateway, claude: AsyncAnthropic) -> None:
    named = [model.id async for model in gateway.sdk.models.list()]
    assert named[:3] == ["auto", "small", "large"] and "claude" in named
    found = [model async for model in claude.models.list()]
    assert [model.id for model in found] == named
    assert {(model.type, model.lifecycle, model.created_at.year > 2000) for model in found} == {
        ("model", "active", True)
    }


async def test_both_vendors_clients_find_a_model(gateway: Gateway, claude: AsyncAnthropic) -> None:
    listed = [model async for model in gateway.sdk.models.list()]
    for name in ("auto", "claude"):
        found = await gateway.sdk.models.retrieve(name)
        assert found.model_dump(exclude={"created"}) | {"created_at": 0} == next(
            model for model in listed if model.id == name
        ).model_dump(exclude={"created"}) | {"created_at": 0}
        theirs = await claude.models.retrieve(name)
        assert (theirs.id, theirs.type, theirs.display_name) == (name, "model", name)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await gateway.sdk.models.retrieve("nobody")
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        await claude.models.retrieve("nobody")
    assert missing.value.body["type"] == "error"  # type: ignore[index]


async def test_a_model_s_name_may_have_slashes(settings: dict[str, Any]) -> None:
    settings["models"]["meta/llama 3"] = settings["models"]["hosted"]
    async with running_gateway(settings) as gateway:
        assert (await gateway.sdk.models.retrieve("meta/llama 3")).id == "meta/llama 3"
        async with gateway.engine.begin() as connection:
            await restrict_key(connection, gateway.people.key, Restrictions(models=frozenset({"tiny"})))
        await gateway.heard()
        assert (await gateway.http.get("/v1/models/tiny")).status_code == 200
        assert (await gateway.http.get("/v1/models/meta/llama 3")).status_code == 404
        assert (await gateway.http.get("/v1/models/tiny", headers={"authorization": "Bearer fk-x"})).status_code == 401
        assert (await gateway.http.post("/v1/models/tiny")).status_code == 405
