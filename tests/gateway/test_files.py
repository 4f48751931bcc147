"""/v1/files: with the `openai` package, and with raw sockets that send what no client should."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from processes import until
from served_gateway import Conforms, serving

from ktqueue.core.config import Config, StorageConfig
from ktqueue.core.tenants import TenantConfig, hash_of
from ktqueue.gateway.serve import GatewayServer

LIMIT = 300_000  # bytes of a file
FORM = "multipart/form-data; boundary=b"
ServeFiles = Callable[..., Any]


@pytest.fixture
def serve_files(config: Config, tmp_path: Path) -> ServeFiles:
    """Serve a gateway with a store in a new folder: `async with serve_files(max_uploads=1) as (server, url)`."""

    @asynccontextmanager
    async def serve(gateway: dict[str, Any] | None = None, **storage: Any) -> AsyncIterator[tuple[GatewayServer, str]]:
        settings = {"location": str(tmp_path), "min_free_bytes": 0, "max_file_bytes": LIMIT, **storage}
        chosen = replace(config, storage=StorageConfig(**settings), gateway=replace(config.gateway, **(gateway or {})))
        async with serving(chosen) as served:
            yield served

    return serve


def stored(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


PURPOSE, FILE = part("purpose", b"batch"), part("file", b"{}\n", '; filename="a.jsonl"')


async def test_the_openai_package_uploads_reads_and_deletes_files(
    serve_files: ServeFiles, tmp_path: Path, conforms: Conforms
) -> None:
    tenants = tuple(TenantConfig(name=name, keys=(hash_of(name),), max_files=3) for name in ("ann", "bob"))
    async with serve_files({"tenants": tenants}) as (_, url):
        ann, bob = (openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=name, max_retries=0) for name in ("ann", "bob"))
        data = bytes(range(256)) * 1_000
        long = await ann.files.create(
            file=("/etc/../passwd.jsonl", data),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3_600},
        )
        conforms(long.to_dict(), "OpenAIFile")
        assert (long.filename, long.bytes, long.purpose) == ("passwd.jsonl", len(data), "batch")
        assert long.expires_at == long.created_at + 3_600
        assert await ann.files.retrieve(long.id) == long
        content = await ann.files.with_raw_response.content(long.id)
        assert content.content == data
        assert content.headers["content-length"] == str(len(data))
        assert content.headers["x-content-type-options"] == "nosniff"
        others = [await ann.files.create(file=b"", purpose="batch") for _ in range(2)]
        with pytest.raises(openai.BadRequestError, match="3 files are stored") as caught:
            await ann.files.create(file=b"", purpose="batch")
        assert caught.value.code == "file_limit_reached"
        page = await ann.files.list(limit=2)
        conforms(page.to_dict(), "ListFilesResponse")
        assert [file.id async for file in page] == [others[1].id, others[0].id, long.id]
        assert [file.id async for file in ann.files.list(order="asc", purpose="batch_output")] == []
        for call in (bob.files.retrieve, bob.files.delete, bob.files.content):
            with pytest.raises(openai.NotFoundError):
                await call(long.id)
        conforms((await ann.files.delete(long.id)).to_dict(), "DeleteFileResponse")
        assert stored(tmp_path) == sorted(f"files/{file.id}" for file in others)
        with pytest.raises(openai.NotFoundError):
            await ann.files.retrieve(long.id)
        await ann.close()
        await bob.close()


RANGES = {
    "bytes=0-0": (0, 1), "bytes=2-5": (2, 6), "bytes=5-": (5, 600_000), "bytes=-1": (599_999, 600_000),
    "bytes=-999999999": (0, 600_000), "bytes=262144-524287": (262_144, 524_288), "bytes=7-99999999999": (7, 600_000),
    "Bytes=1-2": (1, 3),
}  # fmt: skip
WHOLE = ("bytes=", "bytes=-", "bytes=5-4", "bytes=0-1,3-4", "lines=0-1", "bytes=a-b", "0-1", f"bytes={'9' * 5_000}-")


async def test_a_range_of_a_file_is_sent_alone_and_a_head_has_no_body(serve_files: ServeFiles) -> None:
    async with serve_files(max_file_bytes=1 << 20) as (_, url), httpx.AsyncClient(base_url=url) as http:
        data = bytes(number % 251 for number in range(600_000))
        form = PURPOSE + part("file", data, '; filename="a"') + b"--b--"
        made = (await http.post("/v1/files", content=form, headers={"content-type": FORM})).json()
        path = f"/v1/files/{made['id']}/content"

        async def ask(**headers: str) -> httpx.Response:
            return await http.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})

        for wanted, (start, end) in RANGES.items():
            response = await ask(range=wanted)
            assert (response.status_code, response.content) == (206, data[start:end]), wanted
            assert response.headers["content-range"] == f"bytes {start}-{end - 1}/600000"
        for wanted in WHOLE:
            response = await ask(range=wanted)
            assert (response.status_code, response.content) == (200, data), wanted
        etag = response.headers["etag"]
        assert (await ask(range="bytes=1-1", if_range=etag)).status_code == 206
        assert (await ask(range="bytes=1-1", if_range='"other"')).status_code == 200
        for wanted in ("bytes=600000-", "bytes=-0", "bytes=999999999-9999999999"):
            response = await ask(range=wanted)
            assert (response.status_code, response.headers["content-range"]) == (416, "bytes */600000")
            assert response.json()["error"]["code"] == "range_not_satisfiable"
        head = await http.head(path, headers={"range": "bytes=1-1"})
        assert (head.status_code, head.headers["content-length"], head.content) == (200, "600000", b"")
        assert head.headers["accept-ranges"] == "bytes"
        assert (await http.head("/v1/files/none/content")).status_code == 404
        empty = PURPOSE + part("file", b"", '; filename="a"') + b"--b--"
        made = (await http.post("/v1/files", content=empty, headers={"content-type": FORM})).json()
        path = f"/v1/files/{made['id']}/content"
        assert [(await ask(range=wanted)).status_code for wanted in ("bytes=0-", "bytes=-5", "x")] == [416, 416, 200]
        shown = (await http.get("/metrics")).text
        assert "\nktqueue:file_uploads_total 2.0\n" in shown
        assert "\nktqueue:file_upload_bytes_total 600000.0\n" in shown
        await http.post("/v1/files", content=b"", headers={"content-type": FORM})
        assert 'ktqueue:file_upload_refusals_total{code="invalid_form"} 1.0\n' in (await http.get("/metrics")).text


async def test_a_file_that_is_deleted_while_it_is_sent_is_cut_off(
    serve_files: ServeFiles, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_files(max_file_bytes=1 << 26) as (_, url), httpx.AsyncClient(base_url=url) as http:
        form = PURPOSE + part("file", bytes(20_000_000), '; filename="a"') + b"--b--"
        path = f"/v1/files/{(await http.post('/v1/files', content=form, headers={'content-type': FORM})).json()['id']}"
        with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
            async with http.stream("GET", f"{path}/content") as response:
                async for _ in response.aiter_bytes():
                    await http.delete(path)
    assert "a file was not sent to its end" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


WRONG_FORMS = [
    (FILE, "application/json", 415, "content-type"),
    (FILE, "multipart/form-data", 400, "content-type"),
    (FILE, f"multipart/form-data; boundary={'b' * 71}", 400, "content-type"),
    (b"", FORM, 400, "body"),
    (b"hello", FORM, 400, "body"),
    (FILE + PURPOSE, FORM, 400, "body"),  # no last boundary
    (FILE[:-9], FORM, 400, "body"),
    (b"--b--\r\n", FORM, 400, "file"),
    (PURPOSE + b"--b--", FORM, 400, "file"),
    (FILE + b"--b--", FORM, 400, "purpose"),
    (FILE + part("purpose", b"fine-tune") + b"--b--", FORM, 400, "purpose"),
    (FILE + FILE + PURPOSE + b"--b--", FORM, 400, "file"),
    (FILE + PURPOSE + PURPOSE + b"--b--", FORM, 400, "purpose"),
    (FILE + PURPOSE + part("colour", b"red") + b"--b--", FORM, 400, "colour"),
    (FILE + part("purpose", b"b" * 2_000), FORM, 400, "purpose"),
    (FILE + PURPOSE + part("expires_after[seconds]", b"3600") + b"--b--", FORM, 400, "expires_after[anchor]"),
    (FILE + PURPOSE + part("expires_after[seconds]", b"9") + b"--b--", FORM, 400, "expires_after[seconds]"),
    (FILE + PURPOSE + part("expires_after[seconds]", b"1e4") + b"--b--", FORM, 400, "expires_after[seconds]"),
    (FILE + PURPOSE + part("expires_after[seconds]", b"9" * 999) + b"--b--", FORM, 400, "expires_after[seconds]"),
    (FILE + PURPOSE + part("seconds", b"3600") + part("anchor", b"created_at") + b"--b--", FORM, 400, "seconds"),
    (FILE + PURPOSE + part("expires_after", b'{"seconds": 3600}') + b"--b--", FORM, 400, "expires_after"),
    (part("file", b"e30K", "\r\nContent-Transfer-Encoding: base64") + PURPOSE + b"--b--", FORM, 400, "body"),
    (part("file", b"", f"; filename={'a' * 5_000}") + PURPOSE + b"--b--", FORM, 400, "body"),
    (part("file", b"", "; filename*=iso-8859-1''%E9") + PURPOSE + b"--b--", FORM, 400, "file"),
    (part("file", b"", "; filename*=UTF-8''%E9; filename=a") + PURPOSE + b"--b--", FORM, 400, "file"),
    (part("file", b"", "; filename*=a.jsonl") + PURPOSE + b"--b--", FORM, 400, "file"),
    (part("file", b"", "; filename*0*=UTF-8''a; filename*1=b") + PURPOSE + b"--b--", FORM, 400, "file"),
    (b"--b\r\n\r\nx\r\n", FORM, 400, "body"),
    (b"--b\r\nx: " + b"x" * 100_000, FORM, 400, "body"),
    (b"--b\r\n" + b"x: y\r\n" * 1_000, FORM, 400, "body"),
    (b"--b\r\n" + b"x" * 100_000, FORM, 400, "body"),
    (b"".join(part(f"n{number}", b"") for number in range(1_000)), FORM, 400, "body"),
    (part("file", b"x" * (LIMIT + 1)), FORM, 413, "file"),
]  # fmt: skip


CLEAR = [
    (FILE + part("purpose", b"vision") + b"--b--", "purpose must be 'batch', got 'vision'"),
    (FILE + PURPOSE + part("expires_after", b"{}") + b"--b--", "sent as expires_after[anchor] and "),
    (part("file", b"", f"; filename={'a' * 5_000}") + PURPOSE + b"--b--", "give the file a shorter name"),
    (part("file", b"", "\r\nContent-Transfer-Encoding: base64") + PURPOSE + b"--b--", "send its bytes as they are"),
]  # fmt: skip


async def test_wrong_forms_are_refused_by_name_and_leave_nothing(
    serve_files: ServeFiles, tmp_path: Path, conforms: Conforms, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_files() as (server, url), httpx.AsyncClient(base_url=url, timeout=20) as http:
        for body, content_type, status, param in WRONG_FORMS:
            response = await http.post("/v1/files", content=body, headers={"content-type": content_type})
            shown = (body[:80], response.text[:300])
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), shown
            conforms(response.json(), "ErrorResponse")
            assert len(response.content) < 1_000
            assert "Input should" not in response.text  # what pydantic says
        for body, words in CLEAR:
            response = await http.post("/v1/files", content=body, headers={"content-type": FORM})
            assert words in response.json()["error"]["message"]
        foreign = {"content-type": FORM, "origin": "https://evil.example"}
        assert (await http.post("/v1/files", content=FILE, headers=foreign)).status_code == 403
        assert stored(tmp_path) == []
        assert len(server.gateway.file_uploads) == 0
        assert not [record for record in caplog.records if "multipart" in record.name]
        names = {
            "": "file", 'filename=""': "file", 'filename="C:\\x\\a\x7f\tb"': "ab", 'filename="x/.."': "file",
            "filename*=UTF-8''na%C3%AFve%20%25.jsonl": "naïve %.jsonl", "FileName*=utf-8'en'%2Fetc%2Fa": "a",
            "filename=\"=?utf-8?B?w6k=?=\"; filename*=utf-8''%C3%A9": "é", "filename*=\"UTF-8''b\"; filename=a": "b",
            "filename=\"; filename*=UTF-8''b\"": "; filename*=UTF-8''b",
        }  # fmt: skip
        forms = [(PURPOSE + part("file", b"{}\n", f"; {sent}"), name) for sent, name in names.items()]
        for form, name in ((FILE + PURPOSE, "a.jsonl"), *forms):
            headers = {"content-type": FORM, "origin": url}
            response = await http.post("/v1/files", content=form + b"--b--\r\n", headers=headers)
            assert response.status_code == 200, response.text
            assert response.json()["filename"] == name
            assert (await http.get(f"/v1/files/{response.json()['id']}/content")).content == b"{}\n"
        for query in ("limit=0", "limit=10001", "limit=x", "limit=٣", "order=up", "after=x"):
            response = await http.get(f"/v1/files?{query}")
            assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])
        # Far more than other bodies may have, in small chunks; and other paths still have their own limit.
        pieces = [part("file", b"")[:-2], *[b"x" * 1_000] * 295, b"\r\n", PURPOSE, b"--b--"]
        response = await http.post("/v1/files", content=_each(pieces), headers={"content-type": FORM})
        assert response.json()["bytes"] == 295_000


async def _each(parts: list[bytes]) -> AsyncIterator[bytes]:
    for data in parts:
        yield data


async def begin(url: str, size: int, source: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the beginning of an upload of `size` bytes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {FORM}\r\ncontent-length: {size}\r\n\r\n"
    writer.write(head.encode() + part("file", b"x" * 1_000)[:-2])
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head[9:12]), json.loads(await reader.readexactly(length))["error"]


async def test_uploads_are_limited_in_size_time_and_number(serve_files: ServeFiles, tmp_path: Path) -> None:
    async with serve_files(max_uploads=3, min_upload_rate=1 << 20) as (server, url):
        uploads = server.gateway.file_uploads

        async def has(count: int) -> None:
            await until(lambda: len(uploads) == count, 10)

        reader, writer = await begin(url, 10_000_000)  # refused before it is read
        status, error = await answer(reader)
        assert (status, error["param"], error["limit"]) == (413, "file", LIMIT)
        writer.close()
        clients = [await begin(url, 200_000, "127.0.0.2")]
        for count in (1, 2, 3):
            await has(count)
            if count < 3:
                clients.append(await begin(url, 200_000, "127.0.0.2"))
        other = await begin(url, 200_000, "127.0.0.3")  # takes the place of one of them
        dropped = [asyncio.create_task(answer(client[0])) for client in clients]
        done, _ = await asyncio.wait(dropped, return_when=asyncio.FIRST_COMPLETED)
        status, error = done.pop().result()
        assert (status, error["code"], error["limit"]) == (503, "too_many_uploads", 3)
        again = await begin(url, 200_000, "127.0.0.2")  # has its share
        assert (await answer(again[0]))[0] == 503
        await has(3)
        other[1].close()  # in the middle
        await has(2)
        uploads.grace_seconds = 0.05
        slow = await begin(url, 200_000, "127.0.0.4")
        status, error = await answer(slow[0])
        assert (status, error["code"]) == (408, "request_timeout")
        for _, client in (*clients, again, slow):
            client.close()
        for task in dropped:
            task.cancel()
        await has(0)
        await until(lambda: stored(tmp_path) == [], 10)  # a thread of the store deletes what is not whole


async def test_a_store_without_room_is_no_error_of_the_client(serve_files: ServeFiles) -> None:
    async with serve_files(min_free_bytes=1 << 53) as (_, url), httpx.AsyncClient(base_url=url) as http:
        body = PURPOSE + part("file", b"x" * LIMIT) + b"--b--"
        response = await http.post("/v1/files", content=body, headers={"content-type": FORM})
        assert (response.status_code, response.json()["error"]["param"]) == (503, "storage.location")
