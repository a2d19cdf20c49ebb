"""Sends one running request's answer to its caller, and ends the request when the caller goes away."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence, Set
from http import HTTPStatus

from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec import UNSET, UnsetType

from engine.api_reply import DONE, event, usage_so_far
from engine.api_request import StreamOptions
from engine.errors import ApiError, bad_request
from engine.front import Front, Running
from engine.generation import Event
from engine.protocol import ErrorBody, Usage
from engine.reply_writer import ReplyWriter

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
        watcher = asyncio.create_task(abort_when_gone(front, running, receive))
        try:
            if stream is None:
                await _send_whole(running, writer, send)
            else:
                await _send_stream(running, writer, stream, send)
        finally:
            watcher.cancel()
            front.abort(running)

    return app


async def abort_when_gone(front: Front, running: Running, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    front.abort(running)


async def _send_whole(running: Running, writer: ReplyWriter, send: Send) -> None:
    answers, size = await last_events(running), running.per_prompt
    if size > writer.options.choices:
        drafts = (answers[at : at + size] for at in range(0, len(answers), size))
        answers = [best for some in drafts for best in _likeliest(some, writer.options.choices)]
    await send_json(writer.whole(answers, running.account), send)


async def last_events(running: Running) -> list[Event]:
    """How each generation ended, in the request's order; raises ApiError when one failed."""
    answers: list[Event] = []
    async for batch in running.batches():
        answers += [news for news in batch if news.finish is not None]
        for news in answers:
            _raise_if_failed(news)
    return sorted(answers, key=lambda news: news.generation.index)


async def send_json(body: bytes, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _likeliest(drafts: Sequence[Event], count: int) -> list[Event]:
    return sorted(drafts, key=_likelihood, reverse=True)[:count]


def _likelihood(answer: Event) -> float:
    """Mean log-probability of an answer's tokens; one without any comes last."""
    scores = [score.logprob for score in answer.scores]
    return sum(scores) / len(scores) if scores else -math.inf


async def _send_stream(running: Running, writer: ReplyWriter, options: StreamOptions, send: Send) -> None:
    opened: set[int] = set()
    delivered: Counter[int] = Counter()
    early: list[Event] = []
    scored: set[int] = set()
    async for batch in running.batches():
        frames = []
        if writer.options.echo is not None:
            # The first choice's news means that the prompt's scores are there, which every choice begins with.
            early += batch
            firsts = (news.generation.index for news in early if news.generation.index % running.per_prompt == 0)
            scored.update(writer.prompt_of(index) for index in firsts)
            batch = [news for news in early if _is_ready(news, writer, scored)]
            early = [news for news in early if not _is_ready(news, writer, scored)]
            if not batch:
                continue
        if not opened:
            for news in batch:
                _raise_if_failed(news)
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": STREAM_HEADERS})
        for news in batch:
            index = news.generation.index
            delivered[index] = news.delivered
            if index not in opened:
                opened.add(index)
                frames.append(writer.opening(index, _usage(running, options, delivered.total() - news.delivered)))
            frames += _frames(news, writer, _usage(running, options, delivered.total()))
            if news.finish == "error":
                await send({"type": "http.response.body", "body": b"".join(frames), "more_body": False})
                return
        if frames:
            await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
    last = [writer.usage(running.account)] if options.include_usage else []
    await send({"type": "http.response.body", "body": b"".join([*last, DONE]), "more_body": False})


def _is_ready(news: Event, writer: ReplyWriter, scored: Set[int]) -> bool:
    return news.finish == "error" or writer.prompt_of(news.generation.index) in scored


def _frames(news: Event, writer: ReplyWriter, usage: Usage | UnsetType | None) -> list[bytes]:
    index = news.generation.index
    frames = writer.text(index, news, usage)
    if news.finish == "error":
        return [*frames, event(ErrorBody(_failure(news).detail))]
    return frames if news.finish is None else [*frames, writer.finish(index, news.finish, usage)]


def _usage(running: Running, options: StreamOptions, delivered: int) -> Usage | UnsetType | None:
    """What a chunk says in `usage`: the count so far, null where only the last chunk will say it, or nothing."""
    if options.continuous_usage_stats:
        return usage_so_far(running.prompt_tokens, running.cached_tokens, delivered)
    return None if options.include_usage else UNSET


def _failure(news: Event) -> ApiError:
    if news.generation.failure is not None:  # of the caller's making: asking again, here or elsewhere, is no use
        return bad_request(f"{news.generation.failure} Make the grammar simpler.", code="grammar_failed")
    return ApiError(500, news.error or "The engine failed.", code="engine_error")


def _raise_if_failed(news: Event) -> None:
    if news.finish == "error":
        raise _failure(news)
