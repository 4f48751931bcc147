"""Jobs of a newer version at a gateway of this version: readable fields are shown, and no answer is a 500."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from scripted_worker import CARD as TALE_CARD
from served_gateway import read_frames

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease

CARD = replace(TALE_CARD, digest="0123456789abcdef" * 2)

NEWER_VERSION = """
import asyncio
import sys

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core import codec
from ktqueue.core.config import BrokerConfig
from ktqueue.core.events import JobState, TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest

REQUEST = GenerationRequest(model="tale", prompt="Once", user="me")
CARD = ModelCard(name="tale", created=1, max_model_len=512, vocab_size=256, architecture="test",
                 quantization="none", max_num_seqs=8, digest="0123456789abcdef" * 2)

dumps = codec.dumps

def write_format_3():
    codec.VERSION = 3
    codec.dumps = lambda value: dumps({**value, "v": 3} if "v" in value else value)

async def submit(broker):
    write_format_3()
    return (await broker.jobs.submit(REQUEST)).id

async def generate(broker):
    lease = await Lease.register(broker, CARD)
    job_id = (await broker.jobs.submit(REQUEST)).id
    await lease.claim(1)
    await lease.commit([(job_id, TokenEvent(seq=1, token_ids=(7,), text="x"))])
    write_format_3()
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    events = [TokenEvent(seq=2, token_ids=(8,), text="y"), TokenEvent(seq=3, state=JobState.DONE, usage=usage)]
    await lease.commit([(job_id, event) for event in events])
    await lease.close()
    return job_id

async def main(url, what):
    async with await Broker.open(BrokerConfig(url=url)) as broker:
        print(await {"submit": submit, "generate": generate}[what](broker))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def lease(broker: Broker) -> AsyncIterator[Lease]:
    taken = await Lease.register(broker, CARD)
    yield taken
    await taken.close()


async def run_newer_version(broker: Broker, what: str) -> str:
    """Submit a job, or also generate its events, in a process that writes format 3. Returns the job's id."""
    words = [sys.executable, "-c", NEWER_VERSION, broker.config.url or "", what]
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().strip()


async def test_a_newer_record_can_be_shown_listed_and_cancelled(
    http: httpx.AsyncClient, broker: Broker, lease: Lease
) -> None:
    job_id = await run_newer_version(broker, "submit")
    shown = (await http.get(f"/v1/jobs/{job_id}")).json()
    assert {key: shown[key] for key in ("id", "state", "model", "user", "priority", "metadata", "position")} == {
        "id": job_id,
        "state": "queued",
        "model": "tale",
        "user": None,
        "priority": None,
        "metadata": {},
        "position": 1,
    }
    assert [job["id"] for job in (await http.get("/v1/jobs")).json()["data"]] == [job_id]
    assert 'ktqueue:jobs_bound{digest="",format="3",model_name="tale"} 1.0' in (await http.get("/metrics")).text
    assert (await http.delete(f"/v1/jobs/{job_id}")).json()["state"] == "cancelled"
    assert (await http.get(f"/v1/jobs/{job_id}")).json()["error"]["code"] == "cancelled"


async def test_events_of_a_newer_version_are_shown_by_number(http: httpx.AsyncClient, broker: Broker) -> None:
    job_id = await run_newer_version(broker, "generate")
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        assert answer.status_code == 200
        frames = await read_frames(answer)
    first = {"seq": 1, "index": 0, "text": "x", "token_ids": [7]}
    assert frames.data == [first, {"seq": 2, "format": 3}, {"seq": 3, "format": 3}]
    shown = (await http.get(f"/v1/jobs/{job_id}")).json()
    assert (shown["state"], shown["digest"], shown["result"]) == ("done", CARD.digest[:12], None)
    assert (await http.delete(f"/v1/jobs/{job_id}")).status_code == 409  # the job has already ended


async def test_models_show_the_digests_that_are_served(http: httpx.AsyncClient, broker: Broker, lease: Lease) -> None:
    assert (await http.get("/v1/models/tale")).json()["digests"] == ["0123456789ab"]
