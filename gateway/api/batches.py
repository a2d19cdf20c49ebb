"""OpenAI's `/v1/batches`. Every key of its organisation sees a batch; it runs on behalf of the one that made it."""

from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from litestar import Router, get, post
from litestar.params import FromPath
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.tables import BATCH_MOMENTS
from gateway.api.callers import AnyRequest, authenticated, bad, failure, page_body, page_of, refusal
from gateway.api.files import find_or_404
from gateway.api.upload import keep_seconds
from gateway.auth import Keys, check_route
from gateway.batches.lines import ENDPOINTS
from gateway.batches.names import batch_id, batch_name, file_name
from gateway.batches.store import StoredBatch, cancel_batch, create_batch, find_batch, list_batches
from gateway.database import reachable, transaction
from gateway.errors import ApiError
from gateway.live import Live

MOST_LISTED, USUALLY_LISTED = 100, 20
MAX_BODY_BYTES = 256 * 1024
MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512
_ENDED = ("failed", "completed", "expired", "cancelled")


class _ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: str | None = None
    seconds: int | None = None


class _Create(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _ExpiresAfter | None = None


def batch_routes(engine: AsyncEngine, live: Live, keys: Keys, changed: Callable[[], None]) -> Router:
    """`changed` is called when there is a batch to work on."""

    @post("/v1/batches", status_code=200, request_max_body_size=MAX_BODY_BYTES)
    async def create(request: AnyRequest) -> dict[str, Any]:
        principal = await authenticated(request, live, keys, "batches")
        wanted = _decode(await request.body())
        check_route(principal, wanted.endpoint.removeprefix("/v1/").replace("/", "."))
        file = await find_or_404(engine, principal, wanted.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise bad("invalid_value", "`input_file_id` must be of a file with the purpose `batch`.", "input_file_id")
        policy = wanted.output_expires_after or _ExpiresAfter()
        async with transaction(engine) as conn:
            made = await create_batch(
                conn,
                org_id=principal.org_id,
                key_id=principal.key_id,
                endpoint=wanted.endpoint,
                input_file_id=file.id,
                metadata=wanted.metadata,
                output_seconds=keep_seconds(policy.anchor, policy.seconds, "output_expires_after"),
            )
        changed()
        return batch_object(made)

    @get("/v1/batches")
    async def list_all(request: AnyRequest) -> dict[str, Any]:
        principal = await authenticated(request, live, keys, "batches")
        page = page_of(request, MOST_LISTED, USUALLY_LISTED, batch_id)
        async with reachable(), engine.connect() as conn:
            found = await list_batches(conn, principal.org_id, after=page.after, limit=page.limit + 1)
        return page_body([batch_object(batch) for batch in found], page.limit)

    @get("/v1/batches/{name:str}")
    async def retrieve(request: AnyRequest, name: FromPath[str]) -> dict[str, Any]:
        principal = await authenticated(request, live, keys, "batches")
        async with reachable(), engine.connect() as conn:
            return batch_object(_found(await find_batch(conn, principal.org_id, _id(name)), name))

    @post("/v1/batches/{name:str}/cancel", status_code=200)
    async def cancel(request: AnyRequest, name: FromPath[str]) -> dict[str, Any]:
        principal = await authenticated(request, live, keys, "batches")
        async with transaction(engine) as conn:
            batch = _found(await cancel_batch(conn, principal.org_id, _id(name)), name)
        if batch.status in _ENDED or batch.status == "finalizing":
            text = f"The batch {name} cannot be cancelled any more: its status is {batch.status}."
            raise ApiError(409, "batch_has_ended", text)
        changed()
        return batch_object(batch)

    return Router(
        path="/",
        route_handlers=[create, list_all, retrieve, cancel],
        exception_handlers={ApiError: refusal, Exception: failure},
    )


def _decode(body: bytes) -> _Create:
    try:
        wanted = msgspec.json.decode(body, type=_Create)
    except msgspec.ValidationError as error:
        raise bad("invalid_value", f"The body cannot be used: {error}.", None) from None
    except (msgspec.DecodeError, RecursionError):
        raise bad("invalid_json", "The body is not valid JSON.", None) from None
    if wanted.endpoint not in ENDPOINTS:
        raise bad("invalid_value", f"`endpoint` must be one of {', '.join(ENDPOINTS)}.", "endpoint")
    if wanted.completion_window != "24h":
        raise bad("invalid_value", '`completion_window` must be "24h", the only one there is.', "completion_window")
    pairs = wanted.metadata or {}
    fits = all(len(name) <= MAX_NAME and len(value) <= MAX_VALUE for name, value in pairs.items())
    if len(pairs) > MAX_PAIRS or not fits or any("\0" in name + value for name, value in pairs.items()):
        text = f"up to {MAX_PAIRS} pairs, names up to {MAX_NAME} characters, values up to {MAX_VALUE}, none with a NUL"
        raise bad("invalid_value", f"`metadata` may have {text}.", "metadata")
    return wanted


def _id(name: str) -> UUID:
    identifier = batch_id(name)
    if identifier is None:
        raise _no_such_batch(name)
    return identifier


def _found(batch: StoredBatch | None, name: str) -> StoredBatch:
    if batch is None:
        raise _no_such_batch(name)
    return batch


def _no_such_batch(name: str) -> ApiError:
    text = f"There is no batch {name[:100]!r}, or it is not your organisation's."
    return ApiError(404, "batch_not_found", text)


def batch_object(batch: StoredBatch) -> dict[str, Any]:
    moments = {f"{name}_at": _seconds(getattr(batch, f"{name}_at")) for name in BATCH_MOMENTS}
    return {
        "id": batch_name(batch.id),
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": None if batch.errors is None else {"object": "list", "data": batch.errors},
        "input_file_id": file_name(batch.input_file_id),
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": None if batch.output_file_id is None else file_name(batch.output_file_id),
        "error_file_id": None if batch.error_file_id is None else file_name(batch.error_file_id),
        "created_at": _seconds(batch.created_at),
        "expires_at": _seconds(batch.expires_at),
        **moments,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.metadata,
    }


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
