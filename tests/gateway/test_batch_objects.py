"""/v1/batches: every object, in each status, has OpenAI's type."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from served_gateway import Conforms, serving

from ktqueue.broker.batches import BatchFacts, BatchSpeed, BatchStatus, BatchUsage
from ktqueue.broker.broker import Broker
from ktqueue.core.config import Config

FACTS = BatchFacts(model="tale", total=3, answered=2, failed=1, usage=BatchUsage(prompt=5, completion=7))
FAULT = {"code": "invalid_method", "message": "method must be POST", "param": None, "line": None}
WRITTEN = {"output_file_id": "file-out", "error_file_id": "file-err"}
BODY: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
Changes = Sequence[tuple[BatchStatus, dict[str, Any]]]


async def upload(http: httpx.AsyncClient) -> dict[str, Any]:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tale", "prompt": "x"}}
    files = {"file": ("in.jsonl", json.dumps(line).encode(), "application/jsonl")}
    return dict((await http.post("/v1/files", data={"purpose": "batch"}, files=files)).raise_for_status().json())


@pytest.mark.parametrize(
    "changes",
    [
        [(BatchStatus.IN_PROGRESS, {}), (BatchStatus.FINALIZING, {}), (BatchStatus.COMPLETED, WRITTEN)],
        [(BatchStatus.FAILED, {"errors": (FAULT, FAULT | {"line": 3, "param": "method"})})],
        [(BatchStatus.IN_PROGRESS, {}), (BatchStatus.EXPIRED, WRITTEN)],
        [(BatchStatus.IN_PROGRESS, {}), (BatchStatus.CANCELLING, {}), (BatchStatus.CANCELLED, {})],
    ],
    ids=["completed", "failed", "expired", "cancelled"],
)
async def test_a_batch_has_openais_type_in_each_status(
    changes: Changes, http: httpx.AsyncClient, broker: Broker, conforms: Conforms
) -> None:
    body = BODY | {"metadata": {"name": "night"}, "input_file_id": (await upload(http))["id"]}
    made = await http.post("/v1/batches", json=body)
    batch = made.raise_for_status().json()
    conforms(batch, "Batch")
    found = await broker.batches.take("owner")
    assert found is not None
    lease, facts, before = found[0], FACTS, BatchStatus.VALIDATING
    for status, more in changes:
        facts = replace(facts, **more)
        if before is BatchStatus.IN_PROGRESS:
            await broker.batches.update(lease, speed=BatchSpeed(7.5, 90.0, 3, 4, "pages"))
            batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
            conforms(batch, "Batch")
            progress = {"tokens_per_second": 7.5, "seconds_left": 90.0, "running": 3, "waiting": 4, "held_by": "pages"}
            assert batch["progress"] == progress
        if status is BatchStatus.CANCELLING:
            conforms((await http.post(f"/v1/batches/{batch['id']}/cancel")).json(), "Batch")
        else:
            await broker.batches.update(lease, facts, change=(before, status))
        batch, before = (await http.get(f"/v1/batches/{batch['id']}")).json(), status
        conforms(batch, "Batch")
        assert batch["status"] == status and batch[f"{status}_at"] >= batch["created_at"]
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert batch["metadata"] == {"name": "night"} and batch["usage"]["total_tokens"] == 12
    listed = (await http.get("/v1/batches")).json()
    conforms(listed, "ListBatchesResponse")
    assert listed["data"][0] == batch
    again = await http.post(f"/v1/batches/{batch['id']}/cancel")
    assert again.status_code in (200, 409)


async def test_a_key_answers_its_batch_after_the_input_was_deleted(
    http: httpx.AsyncClient, broker: Broker, conforms: Conforms
) -> None:
    file_id = (await upload(http))["id"]
    body = BODY | {"input_file_id": file_id}
    key = {"idempotency-key": "night"}
    made = (await http.post("/v1/batches", json=body, headers=key)).raise_for_status().json()
    refused = await http.delete(f"/v1/files/{file_id}")  # the batch reads it
    conforms(refused.json(), "ErrorResponse")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "file_in_use")
    assert (await http.get(f"/v1/files/{file_id}/content")).status_code == 200
    found = await broker.batches.take("owner")
    assert found is not None
    await broker.batches.update(found[0], change=(BatchStatus.VALIDATING, BatchStatus.FAILED))
    (await http.delete(f"/v1/files/{file_id}")).raise_for_status()
    again = (await http.post("/v1/batches", json=body, headers=key)).json()
    assert (again["id"], again["status"]) == (made["id"], "failed")
    assert (await http.post("/v1/batches", json=body | {"metadata": {}}, headers=key)).status_code == 422
    for headers in ({}, {"idempotency-key": "new"}):
        assert (await http.post("/v1/batches", json=body, headers=headers)).status_code == 404


async def test_an_address_has_its_share_of_batches(config: Config) -> None:
    async with serving(replace(config, broker=replace(config.broker, max_open_batches=2))) as (_, url):
        made = []
        for source in ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.2"):
            transport = httpx.AsyncHTTPTransport(local_address=source)
            async with httpx.AsyncClient(base_url=url, transport=transport) as http:
                made.append(await http.post("/v1/batches", json=BODY | {"input_file_id": (await upload(http))["id"]}))
        assert [response.status_code for response in made] == [200, 200, 429, 200]
        error = made[2].json()["error"]
        assert (error["code"], error["limit"], error["value"]) == ("too_many_batches", 2, 2)
        assert "of this address" in error["message"]


WRONG_BODIES: list[tuple[dict[str, Any], str, str]] = [
    ({"endpoint": "/v1/embeddings"}, "endpoint", "must be one of /v1/chat/completions, "),
    ({"endpoint": f"http://127.0.0.1:8000/v1/{'x' * 99}"}, "endpoint", "must be one of /v1/chat/completions, "),
    ({"endpoint": ""}, "endpoint", "must be one of /v1/chat/completions, "),
    ({"completion_window": "15d"}, "completion_window", "must be a time from 1s to 14d, such as 24h, got '15d'"),
    ({"completion_window": "٢٤h"}, "completion_window", "must be a time from 1s to 14d, such as 24h, got '٢٤h'"),
    ({"completion_window": 24}, "completion_window", "must be a time from 1s to 14d, such as 24h, got 24"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "must be an object of at most 16 strings"),
    ({"metadata": {"k" * 65: ""}}, "metadata", "keys up to 64"),
    ({"metadata": {"k": "x" * 513}}, "metadata", "strings up to 512"),
    ({"output_expires_after": {"seconds": 3_600}}, "output_expires_after.anchor", "is missing"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds", "at least 3600"),
]


async def test_wrong_values_are_refused_by_name(http: httpx.AsyncClient, conforms: Conforms) -> None:
    body = BODY | {"input_file_id": "file-none"}
    for wrong, param, words in WRONG_BODIES:
        response = await http.post("/v1/batches", json=body | wrong)
        conforms(response.json(), "ErrorResponse")
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert words in error["message"]
        assert len(response.content) < 600


async def test_an_unknown_input_is_named_as_the_client_wrote_it(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/batches", json=BODY | {"input_file_id": "file-none"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "input_file_id")
