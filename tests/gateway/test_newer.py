"""Jobs of a newer version at a gateway of this one: readable fields are shown, and nothing is a 500."""

from collections.abc import AsyncIterator

import httpx
import pytest
from served_gateway import read_frames

from ktqueue.broker.broker import Broker
from ktqueue.broker.jobs import JobRecord
from ktqueue.broker.lease import Lease
from ktqueue.core import codec
from ktqueue.core.events import JobState, TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest

CARD = ModelCard(
    name="tale", created=1, max_model_len=512, vocab_size=256, architecture="test", quantization="none",
    max_num_seqs=8, digest="0123456789abcdef" * 2,
)  # fmt: skip


@pytest.fixture
async def lease(broker: Broker) -> AsyncIterator[Lease]:
    taken = await Lease.register(broker, CARD)
    yield taken
    await taken.close()


async def submit(broker: Broker, monkeypatch: pytest.MonkeyPatch, version: int) -> JobRecord:
    with monkeypatch.context() as other:
        other.setattr(codec, "VERSION", version)
        return await broker.jobs.submit(GenerationRequest(model="tale", prompt="Once", user="me"))


async def test_a_newer_record_can_be_seen_listed_and_cancelled(
    http: httpx.AsyncClient, broker: Broker, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await submit(broker, monkeypatch, 2)
    shown = (await http.get(f"/v1/jobs/{job.id}")).json()
    assert {key: shown[key] for key in ("id", "state", "model", "user", "priority", "metadata", "position")} == {
        "id": job.id,
        "state": "queued",
        "model": "tale",
        "user": None,
        "priority": None,
        "metadata": {},
        "position": 1,
    }
    assert [one["id"] for one in (await http.get("/v1/jobs")).json()["data"]] == [job.id]
    assert 'ktqueue:jobs_bound{digest="",format="2",model_name="tale"} 1.0' in (await http.get("/metrics")).text
    assert (await http.delete(f"/v1/jobs/{job.id}")).json()["state"] == "cancelled"
    assert (await http.get(f"/v1/jobs/{job.id}")).json()["error"]["code"] == "cancelled"


async def test_a_newer_journal_is_shown_as_far_as_it_can_be_read(
    http: httpx.AsyncClient, broker: Broker, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await submit(broker, monkeypatch, 1)
    (claim,) = await lease.claim(1)
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    await lease.commit([(claim.job_id, TokenEvent(seq=1, token_ids=(7,), text="x"))])
    with monkeypatch.context() as other:
        other.setattr(codec, "VERSION", 2)
        events = [TokenEvent(seq=2, token_ids=(8,), text="y"), TokenEvent(seq=3, state=JobState.DONE, usage=usage)]
        await lease.commit([(job.id, event) for event in events])
    async with http.stream("GET", f"/v1/jobs/{job.id}/events") as answer:
        assert answer.status_code == 200
        frames = await read_frames(answer)
    first = {"seq": 1, "index": 0, "text": "x", "token_ids": [7]}
    assert frames.data == [first, {"seq": 2, "format": 2}, {"seq": 3, "format": 2}]
    shown = (await http.get(f"/v1/jobs/{job.id}")).json()
    assert (shown["state"], shown["digest"], shown["result"]) == ("done", CARD.digest[:12], None)
    assert (await http.delete(f"/v1/jobs/{job.id}")).status_code == 409  # the job has ended already


async def test_models_show_the_digests_that_are_served(http: httpx.AsyncClient, broker: Broker, lease: Lease) -> None:
    assert (await http.get("/v1/models/tale")).json()["digests"] == ["0123456789ab"]
