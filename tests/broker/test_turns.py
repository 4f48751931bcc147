"""Tenants, and the callers of a tenant, take turns in tokens: nobody waits for the backlog of another."""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim, Lease
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ConfigError, QueueFull
from ktqueue.core.events import JobState, TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams
from ktqueue.core.tenants import Owner, TenantLimits

OLD, NEW = "o" * 2048, "n" * 2048  # prompts with a prefix that the queue compares
ANSWER = 100  # tokens of an answer, if a test does not say otherwise

MakeRequest = Callable[..., GenerationRequest]
Submit = Callable[..., Awaitable[str]]


@pytest.fixture
async def lease(broker: Broker, card: ModelCard) -> Any:
    opened = await Lease.register(broker, card)
    yield opened
    await opened.close()


@pytest.fixture
def submit(broker: Broker, make_request: MakeRequest) -> Submit:
    """Submit a job of a tenant. Its name is that of the tenant and caller, and a number."""
    numbers: Counter[str] = Counter()

    async def submit_one(
        tenant: str,
        caller: str = "",
        *,
        tokens: int = ANSWER,
        weight: int = 1,
        n: int = 1,
        prompt: str = "Once",
        **fields: Any,
    ) -> str:
        owner = f"{tenant}{caller and '-'}{caller}"
        numbers[owner] += 1
        request = make_request(prompt, sampling=SamplingParams(max_tokens=tokens, n=n), **fields)
        limits = TenantLimits(weight=weight)
        job = await broker.jobs.submit(
            request, job_id=f"{owner}-{numbers[owner]}", tenant=tenant, caller=caller, limits=limits
        )
        return job.id

    return submit_one


def ids(claims: Iterable[Claim]) -> list[str]:
    return [claim.job_id for claim in claims]


def owners(claims: Iterable[Claim]) -> Counter[str]:
    return Counter(claim.job_id.rpartition("-")[0] for claim in claims)


async def end(lease: Lease, claims: Iterable[Claim], tokens: int = ANSWER) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=tokens)
    await lease.commit([(one, TokenEvent(seq=1, state=JobState.DONE, usage=usage)) for one in ids(claims)])


@pytest.mark.parametrize("job_class", list(JobClass))
async def test_one_job_does_not_wait_for_the_backlog_of_another_tenant(
    broker: Broker, lease: Lease, submit: Submit, job_class: JobClass
) -> None:
    for _ in range(40):
        await submit("acme", job_class=job_class)
    await end(lease, await lease.claim(8))
    late = await submit("globex", job_class=job_class)
    assert (await broker.jobs.get(late)).position == 1
    assert (await broker.jobs.get("acme-40")).position == 33
    assert ids(await lease.claim(3)) == [late, "acme-9", "acme-10"]


async def test_turns_are_by_weight_and_a_long_answer_costs_more_than_a_short_one(lease: Lease, submit: Submit) -> None:
    for _ in range(60):
        await submit("acme", weight=3)
        await submit("globex")
        await submit("initech", tokens=2 * ANSWER)
    counts = owners(await lease.claim(50))
    assert abs(counts["acme"] - 3 * counts["globex"]) <= 3
    assert abs(counts["globex"] - 2 * counts["initech"]) <= 2


async def test_what_an_answer_really_used_decides_and_a_pause_earns_nothing(lease: Lease, submit: Submit) -> None:
    """One tenant asks for much more than it uses. It is charged what it uses, also for the time when it was away."""
    for _ in range(80):
        await submit("acme", tokens=ANSWER)
        await submit("globex", tokens=200)
    used: Counter[str] = Counter()
    for _ in range(60):
        claims = await lease.claim(1)
        for owner in owners(claims):
            used[owner] += ANSWER if owner == "acme" else 20
        await end(lease, claims, ANSWER if "acme" in owners(claims) else 20)
    assert abs(used["acme"] - used["globex"]) <= 300
    (away,) = await lease.claim(1)
    await submit("initech")
    while (claims := await lease.claim(4)) and len(claims) == 4:
        await end(lease, claims)
    for _ in range(20):
        await submit("acme")
        await submit("initech")
    await end(lease, [away], 1)
    counts = owners(await lease.claim(10))
    assert abs(counts["acme"] - counts["initech"]) <= 1


async def test_many_addresses_have_no_more_than_their_tenants_share(
    broker: Broker, lease: Lease, submit: Submit
) -> None:
    for number in range(100):
        await submit("default", f"10.0.0.{number}")
    for _ in range(20):
        await submit("acme")
        await submit("default", "192.0.2.1")
    await submit("default", "192.0.2.2")
    assert (await broker.jobs.get("default-192.0.2.2-1")).position == 122  # after 101 addresses and 20 jobs
    counts = owners(await lease.claim(30))
    assert counts["acme"] == 15
    rest = owners(await lease.claim(92))
    assert rest["acme"] == 5
    assert max(rest.values()) == 5
    assert rest["default-192.0.2.1"] == rest["default-192.0.2.2"] == 1


@pytest.mark.parametrize("seed", range(3))
async def test_jobs_of_one_caller_go_by_arrival_and_priority_as_if_there_were_no_turns(
    broker: Broker, lease: Lease, submit: Submit, seed: int
) -> None:
    rng = random.Random(seed)
    places: dict[str, float] = {}
    waiting: set[str] = set()
    running: list[Claim] = []
    for _ in range(120):
        dice = rng.random()
        if dice < 0.5:
            priority = rng.choice((0, 0, 0, -1, 2))
            job = await submit("acme", priority=priority)
            places[job] = (await broker.jobs.get(job)).created_at + priority * broker.config.priority_seconds
            waiting.add(job)
            assert (await broker.jobs.get(job)).position == 1 + sum(places[one] < places[job] for one in waiting)
        elif dice < 0.8:
            claims = await lease.claim(rng.randint(1, 4))
            order = sorted(waiting, key=places.__getitem__)[: len(claims)]
            assert ids(claims) == order
            waiting -= set(order)
            running += claims
        elif running:
            back = rng.sample(ids(running), rng.randint(1, len(running)))
            await lease.release(back)
            waiting |= set(back)
            running = [claim for claim in running if claim.job_id not in back]
    assert len(places) > 30


@pytest.mark.parametrize("seed", range(3))
async def test_tenants_with_backlogs_get_tokens_by_weight_whatever_happens(
    broker: Broker, lease: Lease, card: ModelCard, submit: Submit, raw: Any, seed: int
) -> None:
    """Answers of random length, jobs that return, cancelled ones, and workers and gateways of older versions."""
    rng = random.Random(seed)
    weights = {"acme": 1, "globex": 2, "initech": 5}
    tag, queue = broker.keys.tag, f"{broker.keys.tag}:queue:interactive:tale"
    used: Counter[str] = Counter()
    most, submitted, ended = 300, set(), set()

    async def refill() -> None:
        depths = Counter(name.decode().split("-")[0] for name in raw.zrange(queue, 0, -1))
        for tenant, weight in weights.items():
            while depths[tenant] < 12:
                depths[tenant] += 1
                job = await submit(tenant, weight=weight, tokens=rng.choice((50, most)))
                submitted.add(job)
                if rng.random() < 0.1:  # as an older gateway submits it
                    line = raw.hget(f"{tag}:job:{job}", "line").decode()
                    raw.zrem(f"{tag}:{line}", job)
                    raw.hdel(f"{tag}:job:{job}", "line", "caller", "cost")
        raw.set("sink", 0)

    for turn in range(60):
        await refill()
        claims = await lease.claim(rng.randint(1, 6))
        assert claims
        dice = rng.random()
        if dice < 0.2:
            await lease.release(ids(claims))
            again = await lease.claim(len(claims))
            assert set(ids(claims)) <= set(ids(again))
            claims = again
        elif dice < 0.3:
            ended.add((await broker.jobs.cancel(raw.zrange(queue, -1, -1)[0].decode())).id)
        elif dice < 0.4:  # an older worker takes the first job of the queue
            first = raw.zrange(queue, 0, 0)[0].decode()
            raw.zrem(queue, first)
            raw.hset(f"{tag}:job:{first}", mapping={"state": "done"})
            ended.add(first)
        for claim in claims:
            tokens = rng.randint(1, claim.request.sampling.max_tokens or most)
            await end(lease, [claim], tokens)
            ended.add(claim.job_id)
            used[claim.job_id.split("-")[0]] += tokens + 1
        if turn == 5:
            used.clear()  # from here on everybody has had a turn
    shares = [used[tenant] / weight for tenant, weight in weights.items()]
    assert max(shares) - min(shares) <= 4 * most, used
    while claims := await lease.claim(8):
        await end(lease, claims)
        ended |= set(ids(claims))
    assert ended == submitted


@pytest.mark.parametrize("kind", ["line", "turns", "callers", "accounts", "*"])
async def test_jobs_whose_turns_are_lost_are_still_taken(
    lease: Lease, submit: Submit, raw: Any, broker: Broker, kind: str
) -> None:
    names = [await submit(tenant, "a") for _ in range(6) for tenant in ("acme", "globex")]
    for name in ("line", "turns", "callers", "accounts"):
        for key in raw.keys(f"*:{name}:*") if kind in (name, "*") else ():
            raw.delete(key)
    assert 1 <= ((await broker.jobs.get(names[-1])).position or 0) <= 12
    assert sorted(ids(await lease.claim(16))) == sorted(names)


async def test_a_job_of_an_older_gateway_goes_by_arrival_at_the_latest(
    lease: Lease, submit: Submit, raw: Any, broker: Broker
) -> None:
    older = await submit("globex")
    line = raw.hget(f"{broker.keys.tag}:job:{older}", "line").decode()
    raw.delete(f"{broker.keys.tag}:{line}", f"{broker.keys.tag}:turns:interactive:tale")
    raw.hdel(f"{broker.keys.tag}:job:{older}", "line", "cost")
    raw.zadd(f"{broker.keys.tag}:queue:interactive:tale", {"deleted": 0})
    for _ in range(8):
        await submit("acme")
    assert older in ids(await lease.claim(2))


async def test_a_job_that_loses_its_worker_goes_first_and_is_charged_once(
    lease: Lease, submit: Submit, raw: Any, broker: Broker
) -> None:
    for _ in range(4):
        await submit("acme")
        await submit("globex")
    claims = await lease.claim(4)
    accounts = raw.hgetall(f"{broker.keys.tag}:accounts:interactive:tale")
    await lease.release(ids(claims))
    assert (await broker.jobs.get("globex-3")).position == 6
    for _ in range(4):
        await submit("initech")  # whose turn is next
    assert ids(await lease.claim(4)) == ids(claims)
    again = raw.hgetall(f"{broker.keys.tag}:accounts:interactive:tale")
    assert {name: again[name] for name in accounts} == accounts


async def test_a_cached_prefix_goes_before_the_turn_of_others_for_some_tokens_only(
    lease: Lease, submit: Submit
) -> None:
    await submit("acme", prompt=OLD)
    await lease.claim(1)
    await submit("globex", prompt=NEW)
    for _ in range(12):
        await submit("acme", prompt=OLD)
    claims = ids(await lease.claim(12))
    assert claims[0] == "acme-2"  # its prefix is in the cache
    assert 1 <= claims.index("globex-1") <= 4  # each one costs 612 tokens, and 2,048 may go first


async def test_the_accounts_of_callers_are_bounded(lease: Lease, submit: Submit, raw: Any, broker: Broker) -> None:
    accounts = f"{broker.keys.tag}:caller_accounts:interactive:7:default:tale"
    await submit("default", "192.0.2.1")
    raw.hset(accounts, mapping={f"10.0.0.{number}": "0 0 0" for number in range(1_023)})
    await submit("default", "192.0.2.2")
    assert raw.hlen(accounts) <= 1
    assert ids(await lease.claim(2)) == ["default-192.0.2.1-1", "default-192.0.2.2-1"]
    assert raw.keys("*:line:*") == []
    assert [name for name in raw.keys("*:accounts:*") if raw.pttl(name) < 0] == []


async def test_jobs_that_older_workers_took_leave_their_lines(
    broker: Broker, lease: Lease, submit: Submit, raw: Any
) -> None:
    for caller in ("a", "b"):
        names = [await submit("acme", caller) for _ in range(4)]
        for name in names[:3]:
            raw.zrem(f"{broker.keys.tag}:queue:interactive:tale", name)
            raw.hset(f"{broker.keys.tag}:job:{name}", "state", "done")
    (depth,) = await broker.jobs.depth()
    assert (depth.interactive, depth.callers) == (2, {"interactive": 2, "batch": 0})
    while not await broker.reaper().scrub(keys=7, pause=0):
        pass
    assert {raw.zcard(line) for line in raw.keys("*:line:*")} == {1}
    assert sorted(ids(await lease.claim(8))) == ["acme-a-4", "acme-b-4"]
    (depth,) = await broker.jobs.depth()
    assert depth.callers == {"interactive": 0, "batch": 0}


async def test_a_full_queue_takes_one_job_of_tenants_and_callers_without_waiting_jobs(
    config: BrokerConfig, card: ModelCard, make_request: MakeRequest
) -> None:
    async with await Broker.open(replace(config, max_queued_interactive=16)) as broker:
        lease = await Lease.register(broker, card)
        taken: Counter[tuple[str, str]] = Counter()
        others = [("acme", "b"), ("acme", "b"), ("acme", "c"), ("globex", ""), ("globex", "d")]
        for tenant, caller in [("acme", "a")] * 20 + others:
            try:
                await broker.jobs.submit(make_request(), tenant=tenant, caller=caller)
                taken[tenant, caller] += 1
            except QueueFull as full:
                assert full.limit == 16
        assert taken == {("acme", "a"): 16, ("acme", "b"): 1, ("globex", ""): 1}
        await lease.close()


async def test_a_full_worker_takes_a_job_of_an_owner_with_fewer_rows(lease: Lease, submit: Submit) -> None:
    for _ in range(4):
        await submit("acme", "a", weight=2)
        await submit("acme", "b", weight=2)
    rows = {claim.owner: 0 for claim in await lease.claim(2)}
    a, b = rows
    assert (a.tenant, {a.caller, b.caller}, a.weight) == ("acme", {"a", "b"}, 2)
    rows = {a: 5, b: 3}
    assert ids(await lease.claim(0, 0, extra=1, rows=rows)) == []  # the turn is that of `a`
    await submit("globex")
    assert ids(await lease.claim(0, 0, extra=0, rows=rows)) == []
    assert ids(await lease.claim(0, 0, extra=1, rows={a: 2, b: 1, Owner("globex"): 1})) == []
    (claim,) = await lease.claim(0, 0, extra=1, rows=rows)
    assert (claim.job_id, claim.owner) == ("globex-1", Owner("globex"))
    assert ids(await lease.claim(0, 0, extra=1, rows={a: 3, b: 5})) == [f"acme-{a.caller}-2"]
    assert ids(await lease.claim(0, 0, extra=1, rows=rows)) == [f"acme-{b.caller}-2"]
    assert ids(await lease.claim(0, 0, extra=1, rows={b: 8})) == [f"acme-{a.caller}-3"]
    await submit("initech", n=2)
    assert ids(await lease.claim(0, 0, extra=1, rows=rows)) == []


@pytest.mark.parametrize("reads_owners", [True, False])
async def test_a_job_that_is_handed_over_names_its_owner_to_workers_that_can_read_it(
    broker: Broker, lease: Lease, submit: Submit, raw: Any, *, reads_owners: bool
) -> None:
    if not reads_owners:  # as an older worker registers
        raw.hdel(f"{broker.keys.tag}:worker:{lease.id}", "owners")
    await lease.claim(8, wait=True)
    await submit("acme", "10.0.0.1", weight=3)
    while not (claims := await lease.wait_for_work(5)):
        pass
    assert claims[0].owner == (Owner("acme", "10.0.0.1", 3) if reads_owners else Owner())


@pytest.mark.parametrize("weight", [0, 1_001, 1.5, None])
def test_a_weight_must_be_valid(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight"):
        TenantLimits(weight=weight)
