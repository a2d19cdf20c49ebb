"""The engine's HTTP face: OpenAI's chat and text completions, and what the gateway needs besides."""

import asyncio
import logging
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import prometheus_client
from litestar import Litestar, Request, Response, get, post
from litestar.di import NamedDependency, Provide
from litestar.exceptions import HTTPException
from litestar.params import FromQuery
from litestar.types import ASGIApp

from engine.answer import answer
from engine.answer_form import answer_form, tools_of
from engine.api_blocks import block_changes, block_names
from engine.api_embeddings import embed
from engine.api_logprobs import spell_out
from engine.api_params import choices, known_tokens, sampling_params
from engine.api_reply import ReplyKind
from engine.api_request import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    StreamOptions,
    TokenizeRequest,
    decode,
)
from engine.chat import ChatError, render
from engine.errors import ApiError, bad_request
from engine.front import Front, Order
from engine.hosted import HostedModel
from engine.limits import check_text
from engine.metrics import CoreCollector
from engine.prompts import echoes, gap_ends, read_prompt, read_prompts
from engine.protocol import REQUEST_ID_HEADER, TENANT_HEADER, TokenizeReply
from engine.reply_writer import ReplyOptions, ReplyWriter
from engine.tools.declared import Tools

log = logging.getLogger("engine")

MAX_BODY = 8 << 20
"""Bytes of a request body; the longest context of text is far below."""
MAX_DRAIN = 8 * MAX_BODY
"""A body too large is read up to here, so that its sender gets to see the answer."""

HttpRequest = Request[Any, Any, Any]


def create_app(front: Front) -> Litestar:
    """The application over `front`, which may still be loading its models."""
    return Litestar(
        [
            chat_completions,
            completions,
            embeddings,
            tokenize,
            detokenize,
            abort,
            blocks,
            device,
            list_models,
            health,
            metrics,
        ],
        dependencies={"front": Provide(lambda: front, sync_to_thread=False)},
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected_error},
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,
        on_shutdown=[front.close],
    )


@post("/v1/chat/completions")
async def chat_completions(request: HttpRequest, front: NamedDependency[Front]) -> ASGIApp:
    body = decode(await _read_body(request), ChatRequest)
    model = front.model(body.model)
    tools = await asyncio.to_thread(tools_of, body)
    prompt = await _render(model, body, body.messages, tools)
    return await _generate(request, front, model, body, [prompt], "chat", tools)


@post("/v1/completions")
async def completions(request: HttpRequest, front: NamedDependency[Front]) -> ASGIApp:
    body = decode(await _read_body(request), CompletionRequest)
    model = front.model(body.model)
    _, drafts = choices(body)
    return await _generate(request, front, model, body, await read_prompts(model, body, drafts), "text", None)


@post("/tokenize")
async def tokenize(request: HttpRequest, front: NamedDependency[Front]) -> Response[bytes]:
    """Counts a prompt, or a conversation as the chat endpoint would send it to the model.

    One that is far too long for the model is refused with 400 instead, as it would be there.
    """
    body = decode(await _read_body(request), TokenizeRequest)
    model = front.model(body.model)
    if isinstance(body.messages, list) == isinstance(body.prompt, str):
        raise bad_request("Give either messages or prompt.", "prompt")
    if isinstance(body.messages, list):
        if body.suffix:
            raise bad_request("suffix is only allowed together with prompt.", "suffix")
        tokens = await _render(model, body, body.messages, await asyncio.to_thread(tools_of, body))
    else:
        assert isinstance(body.prompt, str)
        for name in ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"):
            if getattr(body, name) is not None:
                raise bad_request(f"{name} is only allowed together with messages.", name)
        tokens = await read_prompt(model, body.prompt, body.suffix)
    tenant = request.headers.get(TENANT_HEADER, "")
    hashes = await asyncio.to_thread(block_names, model, tenant, tokens) if body.block_hashes else None
    return _json(TokenizeReply(len(tokens), model.max_model_len, tokens, hashes))


@post("/detokenize")
async def detokenize(request: HttpRequest, front: NamedDependency[Front]) -> Response[bytes]:
    """The text of token ids, control tokens written out as /tokenize takes them."""
    body = decode(await _read_body(request), DetokenizeRequest)
    model = front.model(body.model)
    known_tokens(body.tokens, model.runner.config.vocab_size, "tokens")
    return _json({"prompt": spell_out(model.tokenizer, body.tokens)})


@post("/v1/embeddings")
async def embeddings(request: HttpRequest, front: NamedDependency[Front]) -> ASGIApp:
    body = decode(await _read_body(request), EmbeddingRequest)
    model = front.model(body.model)
    id, tenant = _names(request)
    return await embed(front, model, body, id, tenant)


@post("/v1/abort")
async def abort(request: HttpRequest, front: NamedDependency[Front]) -> Response[bytes]:
    """Ends a request before the next step; its own response ends normally with `finish_reason: "abort"`."""
    id = decode(await _read_body(request), AbortRequest).id
    running = front.find(id)
    if running is None:
        raise ApiError(404, f"No request with the id {id!r} is running.", param="id", code="request_not_found")
    front.abort(running)
    return _json({"id": id, "status": "aborting"})


@get("/v1/blocks")
async def blocks(
    front: NamedDependency[Front],
    model: FromQuery[str],
    instance: FromQuery[str] = "",
    since: FromQuery[int] = 0,
    wait: FromQuery[float] = 0.0,
) -> Response[bytes]:
    """What has changed in the blocks held for a model; waits for news up to `wait` seconds."""
    return _json(await block_changes(front, front.model(model), instance, since, wait))


@get("/v1/device")
async def device(front: NamedDependency[Front]) -> Response[bytes]:
    """What the device has done, for who adds up what it costs."""
    return _json(front.working_core.clock.account())


@get("/v1/models")
async def list_models(front: NamedDependency[Front]) -> Response[bytes]:
    models = front.models  # first: there is no `opened_at` while they load
    common = {"object": "model", "created": front.opened_at, "owned_by": "farthing"}
    entries = [{"id": name, **common, "max_model_len": model.max_model_len} for name, model in models.items()]
    return _json({"object": "list", "data": entries})


@get("/health")
async def health(front: NamedDependency[Front]) -> Response[bytes]:
    return _json({"status": front.status}, 200 if front.status == "ok" else 503)


@get("/metrics")
async def metrics(front: NamedDependency[Front]) -> Response[bytes]:
    text = prometheus_client.generate_latest(front.latencies.registry)
    if front.core is not None:
        text += prometheus_client.generate_latest(CoreCollector(front.core))
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_PLAIN_0_0_4)


async def _generate(
    request: HttpRequest,
    front: Front,
    model: HostedModel,
    body: ChatRequest | CompletionRequest,
    prompts: list[list[int]],
    kind: ReplyKind,
    tools: Tools | None,
) -> ASGIApp:
    id, tenant = _names(request)
    params = sampling_params(body, model)
    count, drafts = choices(body)
    form = await answer_form(body, tools, model.tokenizer, prompts[0])
    if isinstance(body, CompletionRequest) and body.suffix:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *gap_ends(model.tokenizer)))
    options = ReplyOptions(
        logprobs=params.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=echoes(model, body) if isinstance(body, CompletionRequest) else None,
        choices=count,
        splitter=form.splitter,
    )
    if drafts > count and params.logprobs is None:
        params = replace(params, logprobs=0)  # to choose by
    order = Order(
        id=id,
        tenant=tenant,
        prompts=prompts,
        params=params,
        streaming=bool(body.stream),
        choices=count,
        drafts=drafts,
        priority=body.priority or 0,
        form=form,
    )
    running = front.submit(model, order)
    writer = ReplyWriter(
        kind, id, model.name, int(time.time()), model.tokenizer, prompts, running.prompt_scores, options
    )
    return answer(front, running, writer, (body.stream_options or StreamOptions()) if body.stream else None)


def _names(request: HttpRequest) -> tuple[str, str]:
    """The request's id and its tenant."""
    return request.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex, request.headers.get(TENANT_HEADER, "")


async def _render(
    model: HostedModel, body: ChatRequest | TokenizeRequest, messages: list[dict[str, Any]], tools: Tools | None
) -> list[int]:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if "reasoning_effort" in options:
            raise bad_request("Give reasoning_effort once, not in chat_template_kwargs too.", "reasoning_effort")
        options["reasoning_effort"] = body.reasoning_effort
    check = partial(check_text, model)
    declared = () if tools is None else tools.declared
    try:
        return await asyncio.to_thread(render, model.tokenizer, messages, check, tools=declared, options=options)
    except ChatError as error:
        raise bad_request(f"{str(error).rstrip('.')}.", error.param) from error


async def _read_body(request: HttpRequest) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY:
            parts.append(part)
        elif size > MAX_DRAIN:
            break
    if size > MAX_BODY:
        raise ApiError(413, f"The request body is larger than {MAX_BODY} bytes.", code="request_too_large")
    return b"".join(parts)


def _json(value: object, status: int = 200) -> Response[bytes]:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _api_error(request: HttpRequest, error: ApiError) -> Response[bytes]:
    return Response(error.body(), status_code=error.status, media_type="application/json")


def _http_error(request: HttpRequest, error: HTTPException) -> Response[bytes]:
    """Unknown paths and methods."""
    message = f"{request.method} {request.url.path}: {error.detail}."
    return _api_error(request, ApiError(error.status_code, message, code="http_error"))


def _unexpected_error(request: HttpRequest, error: Exception) -> Response[bytes]:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _api_error(
        request, ApiError(500, "The engine failed on this request; its log says why.", code="engine_error")
    )
