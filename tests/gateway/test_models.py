"""GET /v1/models, other names of a model, its digest in answers, and its sampling defaults."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from scripted_worker import CARD, USAGE, ScriptedWorker, Step, ended, token
from served_gateway import PostStream

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim
from ktqueue.core.events import FinishReason, Timings
from ktqueue.core.request import GenerationRequest

NAMED = replace(
    CARD,
    digest="0123456789abcdef",
    aliases=("gpt-4o", "teller"),
    sampling_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.95},
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me"}]}


@pytest.fixture
async def teller(broker: Broker) -> AsyncIterator[ScriptedWorker]:
    """A worker whose model has aliases, a digest and sampling defaults."""
    async with ScriptedWorker(broker, card=NAMED) as worker:
        yield worker


@pytest.mark.parametrize("name", ["tale", "gpt-4o", "teller"])
async def test_an_alias_means_the_model_and_answers_have_its_name(
    http: httpx.AsyncClient, teller: ScriptedWorker, name: str
) -> None:
    body = (await http.post("/v1/chat/completions", json={**CHAT, "model": name})).json()
    assert body["model"] == "tale"
    assert teller.claims[0].request.model == "tale"
    assert (await http.get(f"/v1/models/{name}")).json()["id"] == name


async def test_every_name_is_listed_with_the_model_as_its_root(http: httpx.AsyncClient, teller: ScriptedWorker) -> None:
    page = (await http.get("/v1/models")).json()
    listed = page["data"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("tale", "teller", False)
    assert (listed[1]["display_name"], listed[1]["created_at"]) == ("gpt-4o", "2023-11-14T22:13:20+00:00")
    assert (listed[1]["lifecycle"], listed[1]["max_input_tokens"]) == ("active", listed[1]["max_model_len"])
    assert [(model["id"], model["root"]) for model in listed] == [
        ("tale", "tale"), ("gpt-4o", "tale"), ("teller", "tale")
    ]  # fmt: skip


async def test_jobs_may_be_submitted_by_alias_without_a_gateway(broker: Broker, teller: ScriptedWorker) -> None:
    record = await broker.jobs.submit(GenerationRequest(model="gpt-4o", prompt="Once"))
    assert record.model == "tale"


async def test_answers_and_chunks_name_the_digest(
    http: httpx.AsyncClient, teller: ScriptedWorker, stream: PostStream
) -> None:
    body = (await http.post("/v1/chat/completions", json={**CHAT, "model": "tale"})).json()
    assert body["system_fingerprint"] == "fp_0123456789ab"
    chunks = (await stream("/v1/completions", {"model": "tale", "prompt": "Once"})).data
    assert {chunk["system_fingerprint"] for chunk in chunks} == {"fp_0123456789ab"}


async def test_the_model_s_defaults_stand_in_for_what_a_request_leaves_out(
    http: httpx.AsyncClient, teller: ScriptedWorker
) -> None:
    await http.post("/v1/chat/completions", json={**CHAT, "model": "tale"})
    await http.post("/v1/chat/completions", json={**CHAT, "model": "tale", "temperature": 0, "top_k": -1, "top_p": 1})
    left_out, chosen = (claim.request.sampling for claim in teller.claims)
    assert (left_out.temperature, left_out.top_k, left_out.top_p) == (0.6, 20, 0.95)
    assert (chosen.temperature, chosen.top_k, chosen.top_p) == (0, 0, 1)


async def test_timings_are_part_of_usage_on_request(
    http: httpx.AsyncClient, teller: ScriptedWorker, stream: PostStream
) -> None:
    timings = Timings(queue=0.25, tokenise=0.5, prefill=1, decode=2)

    async def timed(claim: Claim) -> AsyncIterator[Step]:
        yield token("Once", finish_reason=FinishReason.STOP)
        yield {**ended(claim), "usage": replace(USAGE, timings=timings)}

    teller.script = timed
    body = {**CHAT, "model": "tale"}
    expected = {"queue_seconds": 0.25, "tokenise_seconds": 0.5, "prefill_seconds": 1, "decode_seconds": 2}
    assert "timings" not in (await http.post("/v1/chat/completions", json=body)).json()["usage"]
    whole = (await http.post("/v1/chat/completions", json={**body, "timings": True})).json()
    assert whole["usage"]["timings"] == expected
    frames = await stream("/v1/chat/completions", {**body, "timings": True, "stream_options": {"include_usage": True}})
    assert frames.data[-1]["usage"]["timings"] == expected
