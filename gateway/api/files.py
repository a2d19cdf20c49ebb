"""OpenAI's `/v1/files`, for the input and output of batches. A file is seen by every key of its organisation."""

from typing import Any

from litestar import Router, delete, get, post
from litestar.params import FromPath
from litestar.response import Stream
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.people import Principal
from gateway.api.callers import AnyRequest, authenticated, bad, failure, page_body, page_of, refusal
from gateway.api.upload import Upload, paced
from gateway.auth import Keys
from gateway.batches.files import StoredFile, contents, delete_file, find_file, list_files
from gateway.batches.names import file_id, file_name
from gateway.database import reachable, transaction
from gateway.errors import ApiError
from gateway.live import Live

MOST_LISTED = 10_000


def file_routes(engine: AsyncEngine, live: Live, keys: Keys) -> Router:
    @post("/v1/files", status_code=200, request_max_body_size=None)
    async def upload(request: AnyRequest) -> dict[str, Any]:
        principal = await authenticated(request, live, keys, "files")
        limits = live.settings.limits
        chunks = paced(request.stream(), limits.body_seconds)
        receiving = Upload(engine, principal, limits.file_bytes)
        try:
            return file_object(await receiving.receive(chunks, request.headers.get("content-type", "")))
        except BaseException:
            await receiving.abandon()
            raise

    @get("/v1/files")
    async def list_all(request: AnyRequest) -> dict[str, Any]:
        principal = await authenticated(request, live, keys, "files")
        page = page_of(request, MOST_LISTED, MOST_LISTED, file_id, "order", "purpose")
        order = page.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad("invalid_value", "`order` must be asc or desc.", "order")
        async with reachable(), engine.connect() as conn:
            found = await list_files(
                conn,
                principal.org_id,
                after=page.after,
                limit=page.limit + 1,
                descending=order == "desc",
                purpose=page.query.get("purpose"),
            )
        return page_body([file_object(file) for file in found], page.limit)

    @get("/v1/files/{name:str}")
    async def retrieve(request: AnyRequest, name: FromPath[str]) -> dict[str, Any]:
        principal = await authenticated(request, live, keys, "files")
        return file_object(await find_or_404(engine, principal, name))

    @get("/v1/files/{name:str}/content")
    async def content(request: AnyRequest, name: FromPath[str]) -> Stream:
        principal = await authenticated(request, live, keys, "files")
        file = await find_or_404(engine, principal, name)
        body = contents(engine, file.id, file.bytes)
        return Stream(body, media_type="application/octet-stream", headers={"content-length": str(file.bytes)})

    @delete("/v1/files/{name:str}", status_code=200)
    async def remove(request: AnyRequest, name: FromPath[str]) -> dict[str, Any]:
        principal = await authenticated(request, live, keys, "files")
        identifier = file_id(name)
        async with transaction(engine) as conn:
            if identifier is None or not await delete_file(conn, principal.org_id, identifier):
                raise _no_such_file(name)
        return {"id": name, "object": "file", "deleted": True}

    return Router(
        path="/",
        route_handlers=[upload, list_all, retrieve, content, remove],
        exception_handlers={ApiError: refusal, Exception: failure},
    )


async def find_or_404(engine: AsyncEngine, principal: Principal, name: str, param: str | None = None) -> StoredFile:
    """The file of the key's organisation. Raises ApiError 404, `param` naming where its id was given."""
    identifier = file_id(name)
    if identifier is not None:
        async with reachable(), engine.connect() as conn:
            found = await find_file(conn, principal.org_id, identifier)
        if found is not None:
            return found
    raise _no_such_file(name, param)


def file_object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file_name(file.id),
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at.timestamp()),
        "expires_at": int(file.expires_at.timestamp()),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _no_such_file(name: str, param: str | None = None) -> ApiError:
    text = f"There is no file {name[:100]!r}: it expired, was deleted, or never was one of your organisation's."
    return ApiError(404, "file_not_found", text, param=param)
