"""Shares of tenants under load: tokens by weight, a newcomer within one turn of each other, and any number of them."""

import random
from collections import Counter

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Claim, Lease
from ktqueue.core.events import JobState, TokenEvent, Usage
from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams
from ktqueue.core.tenants import TenantLimits

QUEUED = 1_000  # jobs of the tenant that has most
LARGEST = 400  # tokens of an answer
MANY = 300  # tenants or callers: more than one claim takes jobs, and looks at


async def submit(
    broker: Broker, tenant: str, caller: str = "", *, tokens: int = 100, weight: int = 1, batch: bool = False
) -> str:
    request = GenerationRequest(
        model="tale",
        prompt="Once",
        sampling=SamplingParams(max_tokens=tokens),
        job_class=JobClass.BATCH if batch else JobClass.INTERACTIVE,
    )
    job = await broker.jobs.submit(request, tenant=tenant, caller=caller, limits=TenantLimits(weight=weight))
    return job.id


async def end(lease: Lease, claims: list[Claim], tokens: list[int]) -> None:
    await lease.commit([
        (claim.job_id, TokenEvent(seq=1, state=JobState.DONE, usage=Usage(prompt_tokens=1, completion_tokens=count)))
        for claim, count in zip(claims, tokens, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
async def test_tokens_are_shared_by_weight_and_a_newcomer_waits_for_one_job_of_each_other(
    broker: Broker, card: ModelCard, seed: int
) -> None:
    """The queues of all tenants are always full, and one of them has a thousand jobs of many callers."""
    draw = random.Random(seed)
    weights = {f"t{number}": draw.choice((1, 2, 3, 5, 10)) for number in range(draw.randint(2, 5))}
    is_batch = seed % 2 == 1
    lease = await Lease.register(broker, card)
    waiting, used = Counter[str](), Counter[str]()

    async def fill(tenant: str, count: int) -> None:
        while waiting[tenant] < count:
            caller = f"c{draw.randint(0, 20)}" if tenant == "t0" else ""
            tokens = draw.randint(1, LARGEST)
            await submit(broker, tenant, caller, tokens=tokens, weight=weights[tenant], batch=is_batch)
            waiting[tenant] += 1

    async def serve(rows: int) -> list[str]:
        claims = await lease.claim(rows)
        assert len(claims) == rows
        tokens = [draw.randint(1, claim.request.sampling.max_tokens or 1) for claim in claims]
        await end(lease, claims, tokens)
        served = [claim.owner.tenant for claim in claims]
        for tenant, count in zip(served, tokens, strict=True):
            waiting[tenant] -= 1
            used[tenant] += count + 1
        return served

    await fill("t0", QUEUED)
    for turn in range(120):
        for tenant in weights:
            await fill(tenant, 12)
        await serve(draw.randint(1, 8))
        if turn == 10:
            used.clear()  # from here on everybody has had a turn
    shares = [used[tenant] / weight for tenant, weight in weights.items()]
    assert max(shares) - min(shares) <= 4 * LARGEST, (weights, used)
    for number in range(3):
        weights[f"new{number}"] = 1
        await fill(f"new{number}", 1)
        served: list[str] = []
        while f"new{number}" not in served:
            for tenant in weights:
                await fill(tenant, 12 if tenant.startswith("t") else 0)
            served += await serve(1)
        assert max(Counter(served).values()) == 1, served
    await lease.close()


@pytest.mark.parametrize("of_one_tenant", [False, True])
async def test_any_number_of_tenants_and_callers_has_one_turn_before_anybody_has_two(
    broker: Broker, card: ModelCard, *, of_one_tenant: bool
) -> None:
    lease = await Lease.register(broker, card)
    names = [f"n{number}" for number in range(MANY)]
    for name in names:
        for _ in range(2):
            await submit(broker, *(("one", name) if of_one_tenant else (name, "")))
    late = ("one", "late") if of_one_tenant else ("late", "")

    async def owners(rows: int) -> list[str]:
        claims = await lease.claim(rows)
        await end(lease, claims, [100] * len(claims))
        return [claim.owner.caller if of_one_tenant else claim.owner.tenant for claim in claims]

    served = await owners(10)
    await submit(broker, *late)  # its turn is at the time of the last one, so after those who have had none
    while len(served) < MANY + 1:
        found = await owners(MANY + 1 - len(served))
        assert found
        served += found
    assert Counter(served) == dict.fromkeys([*names, "late"], 1)
    rest = [await owners(64) for _ in range(6)]
    assert Counter(owner for found in rest for owner in found) == dict.fromkeys(names, 1)
    await lease.close()
