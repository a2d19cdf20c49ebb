"""/v1/embeddings: texts to vectors of length 1."""

import asyncio
import base64
from typing import Any

import msgspec
import torch
from litestar.types import ASGIApp, Receive, Scope, Send
from torch import Tensor

from engine.answer import abort_when_gone, last_events, send_json
from engine.api_reply import EmbeddingReply, EmbeddingUsage, Vector
from engine.api_request import EmbeddingRequest
from engine.errors import bad_request
from engine.front import Front, Running
from engine.hosted import HostedModel
from engine.limits import check_text

MAX_INPUTS = 2048


async def embed(front: Front, model: HostedModel, body: EmbeddingRequest, id: str, tenant: str) -> ASGIApp:
    """The response to an embedding request, which has been started. Raises ApiError for a bad input."""
    width = model.runner.config.hidden_size
    if body.dimensions is not None and not 1 <= body.dimensions <= width:
        raise bad_request(f"dimensions must be from 1 to {width}, not {body.dimensions}.", "dimensions")
    texts = await asyncio.to_thread(_inputs, model, body.input)
    running = front.submit_texts(model, id, tenant, texts, body.pooling, body.priority or 0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(abort_when_gone(front, running, receive))
        try:
            await send_json(await _reply(running, body), send)
        finally:
            watcher.cancel()
            front.abort(running)

    return app


async def _reply(running: Running, body: EmbeddingRequest) -> bytes:
    vectors = []
    for index, news in enumerate(await last_events(running)):
        if news.vector is None:
            raise bad_request("The request was aborted before its vectors were there.", code="aborted")
        vectors.append(Vector(index, _encoded(_shortened(news.vector, body.dimensions), body.encoding_format)))
    account = running.account
    usage = EmbeddingUsage(account.prompt_tokens, account.prompt_tokens)
    return msgspec.json.encode(EmbeddingReply(data=vectors, model=running.model.name, usage=usage, farthing=account))


def _shortened(vector: Tensor, dimensions: int | None) -> Tensor:
    return vector if dimensions is None else torch.nn.functional.normalize(vector[:dimensions], dim=0)


def _encoded(vector: Tensor, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _inputs(model: HostedModel, given: str | list[Any]) -> list[list[int]]:
    """Token ids of each input."""
    if isinstance(given, str):
        return [_tokens(model, given, "input")]
    if given and all(_is_id(value) for value in given):
        return [given]
    if not 1 <= len(given) <= MAX_INPUTS:
        raise bad_request(f"input takes from 1 to {MAX_INPUTS} texts, here are {len(given)}.", "input")
    return [_tokens(model, value, f"input[{i}]") for i, value in enumerate(given)]


def _tokens(model: HostedModel, given: object, param: str) -> list[int]:
    if isinstance(given, str) and given:
        check_text(model, given)
        return model.tokenizer.encode(given, add_special=True)
    if isinstance(given, list) and given and all(_is_id(value) for value in given):
        return given
    raise bad_request(f"{param} must be a text or a list of token ids, and not empty.", param)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
