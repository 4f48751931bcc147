"""Experts that a step fetches: the twins against their definition, the kernels (interpreted) against the twins."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.kernels import fetch

from ..interpreted import by_kernel, by_twin

AREA, RECORD = 640, 192


def case(experts: int, tokens: int, k: int, slots: int, parts: int = 2) -> dict[str, Any]:
    """A third of the experts is resident; the last of several tokens is padding."""
    random = torch.Generator().manual_seed(experts * tokens + slots)
    ids = torch.stack([torch.randperm(experts, generator=random)[:k] for _ in range(tokens)])
    ids[-1] = -1 if tokens > 1 else ids[-1]
    resident = torch.full((experts,), -1, dtype=torch.int64)
    resident[::3] = 64 * torch.arange(len(resident[::3]))
    return {
        "ids": ids,
        "resident": resident,
        "addresses": torch.arange(1, experts * parts + 1).reshape(experts, parts) * 4096,
        "offsets": torch.full((experts,), 7, dtype=torch.int64),
        "sources": torch.full((slots, parts), 9, dtype=torch.int64),
        "cpu_ids": torch.full((tokens, k), 5, dtype=torch.int64),
    }


def divide(
    arguments: dict[str, Any], share: float, run: Callable[..., Any] = by_twin, allowed: float = 1.0
) -> dict[str, Any]:
    run(
        fetch.divide, arguments["ids"], arguments["resident"], arguments["addresses"], share, torch.tensor([allowed]),
        AREA, RECORD,
        offsets=arguments["offsets"], sources=arguments["sources"], cpu_ids=arguments["cpu_ids"],
    )  # fmt: skip
    return arguments


CASES = [(8, 1, 2, 2), (8, 3, 8, 8), (128, 1, 8, 3), (128, 64, 8, 40), (128, 5, 8, 3), (60, 17, 4, 60)]


@pytest.mark.parametrize("share", [0.0, 0.3125, 0.5, 1.0])
@pytest.mark.parametrize(("experts", "tokens", "k", "slots"), CASES)
def test_a_share_of_the_used_absent_experts_is_fetched(
    experts: int, tokens: int, k: int, slots: int, share: float
) -> None:
    found = divide(case(experts, tokens, k, slots), share)
    used = {expert for expert in found["ids"].flatten().tolist() if expert >= 0}
    absent = sorted(expert for expert in used if found["resident"][expert] < 0)
    fetched = absent[: min(int(share * len(absent)), slots)]
    assert [row for row in found["sources"].tolist() if any(row)] == [
        found["addresses"][expert].tolist() for expert in fetched
    ]
    assert not found["sources"][len(fetched) :].any()
    for expert in range(experts):
        place = AREA + RECORD * fetched.index(expert) if expert in fetched else found["resident"][expert]
        assert found["offsets"][expert] == place
    for expert, left in zip(found["ids"].flatten().tolist(), found["cpu_ids"].flatten().tolist(), strict=True):
        assert left == (expert if expert in absent and expert not in fetched else -1)


@pytest.mark.parametrize("share", [0.0, 0.3125, 1.0])
@pytest.mark.parametrize(("experts", "tokens", "k", "slots"), CASES)
def test_the_kernel_divides_like_its_twin(experts: int, tokens: int, k: int, slots: int, share: float) -> None:
    expected = divide(case(experts, tokens, k, slots), share)
    found = divide(case(experts, tokens, k, slots), share, by_kernel)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("run", [by_twin, by_kernel])
def test_nothing_is_fetched_while_it_is_not_allowed(run: Callable[..., Any]) -> None:
    found, expected = divide(case(128, 5, 8, 3), 1.0, run, allowed=0.0), divide(case(128, 5, 8, 3), 0.0)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert not found["sources"].any()


@pytest.mark.parametrize("run", [by_twin, by_kernel])
def test_chosen_experts_arrive(run: Callable[..., Any]) -> None:
    """Records have more than 20 KB, and their parts are apart. The second slot is empty."""
    sizes = [(0, 16_448), (16_448, 4_096)]
    record = sum(size for _, size in sizes)
    host = torch.randint(0, 256, (3 * record,), dtype=torch.uint8)
    begin = host.data_ptr() + (-host.data_ptr()) % 16
    sources = torch.tensor([[begin + 32, begin + 17_000 // 16 * 16], [0, 0], [begin + 64, begin + 24_000]])
    memory = torch.zeros(AREA + 3 * record + 64, dtype=torch.uint8)
    parts = torch.tensor(sizes) // 8
    run(fetch.fetch, sources, parts, sizes, memory, AREA, record)
    shift = begin - host.data_ptr()
    expected = torch.zeros_like(memory)
    for slot, row in ((0, (32, 17_000 // 16 * 16)), (2, (64, 24_000))):
        for (start, size), source in zip(sizes, row, strict=True):
            to = AREA + slot * record + start
            expected[to : to + size] = host[shift + source : shift + source + size]
    assert torch.equal(memory, expected)
