"""Sends one running request's answer to its caller, and ends the request when the caller goes away."""

import asyncio
from http import HTTPStatus

from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec import UNSET, UnsetType

from engine.api_reply import DONE, ReplyWriter, event, usage_so_far
from engine.api_request import StreamOptions
from engine.errors import ApiError
from engine.front import Front, Running
from engine.hosted import Event
from engine.protocol import ErrorBody, Usage

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def answer(front: Front, running: Running, writer: ReplyWriter, stream: StreamOptions | None) -> ASGIApp:
    """The response to a submitted request: server-sent events with `stream`, else one JSON object.

    Its first byte waits for the first token, so a request that fails before that is answered with an error status.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_abort_when_gone(front, running, receive))
        try:
            if stream is None:
                await _send_whole(running, writer, send)
            else:
                await _send_stream(running, writer, stream, send)
        finally:
            watcher.cancel()
            front.abort(running)

    return app


async def _abort_when_gone(front: Front, running: Running, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    front.abort(running)


async def _send_whole(running: Running, writer: ReplyWriter, send: Send) -> None:
    async for batch in running.batches():
        last = batch[-1]
    _raise_if_failed(last)
    assert last.finish is not None and last.account is not None
    body = writer.whole(last.text, last.finish, last.account)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_stream(running: Running, writer: ReplyWriter, options: StreamOptions, send: Send) -> None:
    started = False
    async for batch in running.batches():
        frames = []
        if not started:
            _raise_if_failed(batch[0])
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": STREAM_HEADERS})
            started = True
            if writer.chat:
                frames.append(writer.role(_usage(running, options, 0)))
        for news in batch:
            frames += _frames(news, running, writer, options)
        if frames:
            await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _frames(news: Event, running: Running, writer: ReplyWriter, options: StreamOptions) -> list[bytes]:
    usage = _usage(running, options, news.delivered)
    frames = [writer.text(news.text, usage)] if news.text else []
    if news.finish == "error":
        frames.append(event(ErrorBody(_failure(news).detail)))
    elif news.finish is not None:
        assert news.account is not None
        frames.append(writer.finish(news.finish, usage))
        if options.include_usage:
            frames.append(writer.usage(news.account))
        frames.append(DONE)
    return frames


def _usage(running: Running, options: StreamOptions, delivered: int) -> Usage | UnsetType | None:
    """What a chunk says in `usage`: the count so far, null where only the last chunk will say it, or nothing."""
    if options.continuous_usage_stats:
        sequence = running.generation.sequence
        return usage_so_far(sequence.prompt_len, sequence.cached_tokens or 0, delivered)
    return None if options.include_usage else UNSET


def _failure(news: Event) -> ApiError:
    return ApiError(500, news.error or "The engine failed.", code="engine_error")


def _raise_if_failed(news: Event) -> None:
    if news.finish == "error":
        raise _failure(news)
