"""Large and costly bodies are refused, or parsed in a thread. Compressed bodies and long prompts."""

import gzip
import json
import threading
import zlib
from typing import Any

import httpx
import pytest
from scripted_worker import ScriptedWorker
from served_gateway import Conforms

from ktqueue.core.config import GatewayConfig
from ktqueue.core.errors import ContextLengthExceeded, RequestTooLarge
from ktqueue.core.prompt_size import check_text
from ktqueue.gateway.errors import MalformedBody
from ktqueue.gateway.http.body import LARGE, BodyReader
from ktqueue.gateway.http.body_decoding import MAX_PARTS, SLICE_BYTES, check_structure, decode_content

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
BODY: dict[str, Any] = {"model": "tale", "messages": [{"role": "user", "content": "Hi"}]}
JSON = {"content-type": "application/json"}


def test_structure_is_counted_outside_of_strings() -> None:
    for text in ('"', "\\", '\\"', "[{:", 'say "[" twice \\\\" '):
        long = text * (2 * SLICE_BYTES // len(text))
        check_structure(json.dumps({"a": long, "b": ["[" * MAX_PARTS, '"' + ":" * MAX_PARTS]}).encode())
    for part, comma in ((b"[]", b","), (b"{}", b","), (b'{"a":1}', b","), (b'"\\"[",[]', b",")):
        many = b"[" + comma.join([part] * (MAX_PARTS + 1)) + b"]"
        with pytest.raises(MalformedBody) as caught:
            check_structure(many)
        assert caught.value.limit == MAX_PARTS


async def test_large_bodies_are_parsed_by_a_thread() -> None:
    bodies = BodyReader(GatewayConfig())
    here = threading.get_ident()
    assert await bodies.run(LARGE, threading.get_ident) == here
    assert await bodies.run(LARGE + 1, threading.get_ident) != here
    bodies.close()


COSTLY = [
    (CHAT, b'{"model":"tale","messages":[' + b"[]," * 2_000_000 + b"1]}", "body"),
    (COMPLETE, b'{"model":"tale","prompt":[' + b"1," * 1_000_000 + b"1]}", "prompt"),
    (COMPLETE, b'{"model":"tale","prompt":[' + b'"",' * 1_000_000 + b"1]}", "prompt"),
    ("/v1/jobs", b'{"model":"tale","prompt_token_ids":[' + b"1," * 1_000_000 + b"1]}", "prompt"),
    ("/v1/jobs", b'{"model":"tale","prompt_token_ids":[' + b'"",' * 1_000_000 + b"1]}", "prompt_token_ids"),
    ("/v1/jobs", b'{"model":"tale","prompt":"x","webhook":{"url":"https://x.org","events":['
        + b'"",' * 500_000 + b"1]}}", "webhook.events"),
]  # fmt: skip


async def test_costly_bodies_are_refused_by_field(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    for path, body, param in COSTLY:
        response = await http.post(path, content=body, headers=JSON)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert error["limit"] is not None
        assert len(response.content) < 1_000
    assert worker.claims == []
    assert (await http.post(CHAT, json=BODY)).status_code == 200


def test_texts_that_cannot_fit_are_refused_by_their_bytes() -> None:
    check_text("a" * 5_110, 512, 10)
    check_text("a" * 1_000_000, 512, None)
    for text in ("a" * 5_111, "é" * 2_556):
        with pytest.raises(ContextLengthExceeded, match="at least 512 tokens") as caught:
            check_text(text, 512, 10)
        assert (caught.value.limit, caught.value.value) == (512, 512)


async def test_compressed_bodies_are_read(http: httpx.AsyncClient, worker: ScriptedWorker, conforms: Conforms) -> None:
    plain = json.dumps(BODY).encode()
    raw = zlib.compressobj(wbits=-15)
    for encoding, data in (
        ("gzip", gzip.compress(plain)),
        ("x-gzip", gzip.compress(plain[:9]) + gzip.compress(plain[9:])),
        ("GZip", gzip.compress(plain)),
        ("deflate", zlib.compress(plain)),
        ("deflate", raw.compress(plain) + raw.flush()),
        ("identity", plain),
    ):
        response = await http.post(CHAT, content=data, headers={**JSON, "content-encoding": encoding})
        assert response.status_code == 200, (encoding, response.text)
    for encoding, data, status in (
        ("br", plain, 415),
        ("gzip, gzip", plain, 415),
        ("gzip", plain, 400),
        ("gzip", gzip.compress(plain)[:-9], 400),
        ("deflate", b"", 400),
        ("gzip", gzip.compress(b" " * (9 << 20)), 413),
    ):
        response = await http.post(CHAT, content=data, headers={**JSON, "content-encoding": encoding})
        assert response.status_code == status, (encoding, response.text)
        conforms(response.json(), "ErrorResponse")
    assert worker.claims[-1].request.messages == ({"role": "user", "content": "Hi"},)


def test_a_compression_bomb_is_not_decompressed() -> None:
    bomb = gzip.compress(bytes(50 << 20))
    with pytest.raises(RequestTooLarge) as caught:
        decode_content(bomb, "gzip", 1 << 20)
    assert caught.value.value == (1 << 20) + 1  # no more was decompressed
