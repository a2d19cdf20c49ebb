"""`/v1/files` with OpenAI's own client: content goes in and out in pieces, belongs to an organisation, and expires."""

import asyncio
import hashlib
import random
import tracemalloc
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, PermissionDeniedError
from openai.types import FileObject
from sqlalchemy import func, select, text

from billing.people import create_key
from billing.restrictions import Restrictions
from billing.tables import file, file_chunk
from gateway.batches.files import CHUNK_BYTES, purge_files, read_span
from gateway.batches.names import file_id
from tests.gateway.batching import eventually
from tests.gateway.running import Gateway, running_gateway

MEBIBYTE = 1024 * 1024


async def counts(gateway: Gateway) -> tuple[int, int]:
    """(files, chunks) in the database."""
    async with gateway.engine.connect() as connection:
        queries = [select(func.count()).select_from(table) for table in (file, file_chunk)]
        files, chunks = [(await connection.execute(query)).scalar_one() for query in queries]
    return files, chunks


async def has(gateway: Gateway, files: int, chunks: int) -> bool:
    return await counts(gateway) == (files, chunks)


async def test_up_and_down(gateway: Gateway) -> None:
    sdk = gateway.sdk
    data = random.Random(1).randbytes(3 * CHUNK_BYTES + 12_345)
    made = await sdk.files.create(file=("ümlaut 文.jsonl", data), purpose="batch")
    now = datetime.now(UTC).timestamp()
    assert (made.object, made.bytes, made.purpose, made.status) == ("file", len(data), "batch", "processed")
    assert made.filename == "ümlaut 文.jsonl" and abs(made.created_at - now) < 60
    assert made.expires_at == made.created_at + 30 * 24 * 3600
    assert await sdk.files.retrieve(made.id) == made
    assert (await sdk.files.content(made.id)).content == data
    assert await counts(gateway) == (1, 4)
    async with gateway.engine.connect() as connection:
        identifier = file_id(made.id)
        assert identifier is not None
        for position, length in ((0, 5), (CHUNK_BYTES - 3, 6), (CHUNK_BYTES, 1), (CHUNK_BYTES - 1, 2 * CHUNK_BYTES)):
            assert await read_span(connection, identifier, position, length) == data[position : position + length]
        assert await read_span(connection, identifier, len(data) - 2, 10) == data[-2:]
    deleted = await sdk.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    assert await counts(gateway) == (0, 0)
    for gone in (sdk.files.retrieve(made.id), sdk.files.content(made.id), sdk.files.delete(made.id)):
        with pytest.raises(NotFoundError, match="There is no file"):
            await gone


async def test_a_large_file_is_never_in_memory_as_a_whole(gateway: Gateway) -> None:
    """64 MiB go through in both directions; the gateway runs in this process, which grows by far less."""
    piece = random.Random(2).randbytes(MEBIBYTE)
    boundary = b"--b\r\n"

    async def body() -> Any:
        yield boundary + b'content-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield boundary + b'content-disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for _ in range(64):
            yield piece
        yield b"\r\n--b--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=b"}
    tracemalloc.start()
    try:
        made = (await gateway.http.post("/v1/files", content=body(), headers=headers)).json()
        digest = hashlib.sha256()
        async with gateway.http.stream("GET", f"/v1/files/{made['id']}/content") as answer:
            assert answer.headers["content-length"] == str(64 * MEBIBYTE)
            async for data in answer.aiter_bytes():
                digest.update(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert digest.digest() == hashlib.sha256(piece * 64).digest()
    assert peak < 24 * MEBIBYTE, f"{peak / MEBIBYTE:.0f} MiB"


async def test_files_are_listed_in_pages(gateway: Gateway) -> None:
    sdk = gateway.sdk
    made = [(await sdk.files.create(file=(f"{n}", b"x"), purpose="batch")).id for n in range(5)]
    assert [one.id async for one in sdk.files.list()] == made[::-1]
    assert [one.id async for one in sdk.files.list(order="asc", limit=2)] == made
    assert [one.id async for one in sdk.files.list(after=made[2], limit=1)] == made[1::-1]
    assert [one.id async for one in sdk.files.list(purpose="batch_output")] == []
    for options, words in (
        ({"limit": 0}, "`limit` must be a number from 1 to 10000"),
        ({"order": "up"}, "`order` must be asc or desc"),
        ({"after": "file-1"}, "`after` must be the id"),
        ({"extra_query": {"colour": "red"}}, "no query parameter `colour` here, only after, limit, order, purpose"),
    ):
        with pytest.raises(BadRequestError, match=words):
            await sdk.files.list(**options)  # type: ignore[arg-type]


async def test_a_file_expires(gateway: Gateway) -> None:
    sdk = gateway.sdk
    policy = b'--b\r\ncontent-disposition: form-data; name="expires_after[%s]"\r\n\r\n%s\r\n'

    async def slowly() -> Any:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'
        await asyncio.sleep(1.1)
        yield b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield policy % (b"anchor", b"created_at") + policy % (b"seconds", b"3600") + b"--b--"

    headers = {"content-type": "multipart/form-data; boundary=b"}
    made = FileObject(**(await gateway.http.post("/v1/files", content=slowly(), headers=headers)).json())
    assert made.expires_at == made.created_at + 3600, "however long it took to come"
    async with gateway.engine.begin() as connection:
        await connection.execute(text("UPDATE file SET expires_at = now() - interval '1 second'"))
    with pytest.raises(NotFoundError):
        await sdk.files.retrieve(made.id)
    assert (await sdk.files.list()).data == []
    async with gateway.engine.begin() as connection:
        assert await purge_files(connection) == 1
    assert await counts(gateway) == (0, 0)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"purpose": "fine-tune"}, "`purpose` 'fine-tune' is not supported; the only one is `batch`"),
        ({}, "`purpose` is required"),
        ({"purpose": "batch", "colour": "red"}, "no field `colour` here, only file, purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "now"}, "`expires_after.anchor` must be `created_at`"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "`expires_after.seconds` must be a whole number"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
            "from 3600 (an hour) to 2592000 (30 days)",
        ),
    ],
)
async def test_what_cannot_be_uploaded(gateway: Gateway, form: dict[str, str], words: str) -> None:
    refused = await upload(gateway, data=form, files={"file": ("a", b"x" * 3 * CHUNK_BYTES)})
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    assert await counts(gateway) == (0, 0)


async def test_bodies_that_are_no_upload(gateway: Gateway) -> None:
    whole = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nabc\r\n--b--\r\n'
    for body, content_type, words in (
        (b"{}", "application/json", "Send the file as multipart/form-data"),
        (whole, "multipart/form-data", "Send the file as multipart/form-data"),
        (whole[:-8], "multipart/form-data; boundary=b", "not valid multipart/form-data"),
        (b"--c--", "multipart/form-data; boundary=b", "not valid multipart/form-data"),
        (whole.replace(b'; filename="x"', b""), "multipart/form-data; boundary=b", "with a file name"),
        (whole[:-7] + whole, "multipart/form-data; boundary=b", "`file` was sent twice"),
    ):
        answer = await gateway.http.post("/v1/files", content=body, headers={"content-type": content_type})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    assert await counts(gateway) == (0, 0)


async def upload(gateway: Gateway, **parts: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {gateway.people.secret}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False, timeout=60) as http:
        return await http.post("/v1/files", **parts)


async def test_the_file_may_come_before_its_purpose(gateway: Gateway) -> None:
    parts = [("file", ("a.jsonl", b"x")), ("purpose", (None, b"batch"))]
    assert (await upload(gateway, files=parts)).json()["purpose"] == "batch"


async def test_a_file_that_is_too_large(settings: dict[str, Any]) -> None:
    settings["limits"] = {"file_bytes": 2 * CHUNK_BYTES}
    async with running_gateway(settings) as gateway:
        most = await gateway.sdk.files.create(file=("a", b"x" * 2 * CHUNK_BYTES), purpose="batch")
        assert most.bytes == 2 * CHUNK_BYTES
        with pytest.raises(APIStatusError, match=r"larger than the limit of 2097152 bytes") as refused:
            await gateway.sdk.files.create(file=("b", b"x" * (4 * CHUNK_BYTES)), purpose="batch")
        assert refused.value.status_code == 413
        assert await counts(gateway) == (1, 2)


async def test_an_upload_that_is_cut_off_leaves_nothing(gateway: Gateway) -> None:
    head = "POST /v1/files HTTP/1.1\r\ncontent-type: multipart/form-data; boundary=b\r\ncontent-length: 9000000"
    part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n' + b"x" * (CHUNK_BYTES * 3 // 2)
    async with gateway.socket(head, part):
        await eventually(lambda: has(gateway, 1, 1))
        assert (await gateway.sdk.files.list()).data == [], "it is not there before all of it is"
    await eventually(lambda: has(gateway, 0, 0))


async def test_an_upload_that_stops_coming(settings: dict[str, Any]) -> None:
    settings["limits"] = {"body_seconds": 0.3}
    head = "POST /v1/files HTTP/1.1\r\ncontent-type: multipart/form-data; boundary=b\r\ncontent-length: 9000000"
    async with running_gateway(settings) as gateway:
        async with gateway.socket(head, b"--b\r\n") as (reader, _):
            assert b" 408 " in await reader.readline()
        assert await counts(gateway) == (0, 0)


async def test_a_key_may_be_kept_from_files(gateway: Gateway) -> None:
    async with gateway.engine.begin() as connection:
        restrictions = Restrictions(routes=frozenset({"chat.completions"}))
        key = await create_key(connection, gateway.people.org, "chat only", restrictions=restrictions)
    sdk = gateway.sdk.with_options(api_key=key.secret)
    with pytest.raises(PermissionDeniedError, match="may not use files"):
        await sdk.files.list()
    with pytest.raises(PermissionDeniedError, match="may not use batches"):
        await sdk.batches.list()
