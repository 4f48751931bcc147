"""Owners share the rows and pages of an engine, and nobody waits for the many requests of another."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.core.tenants import Owner
from ktqueue.engine.detokenizer import Detokenizer
from ktqueue.engine.engine import Engine
from ktqueue.engine.row_shares import over_share
from ktqueue.engine.sequence import Request, Sequence


def names(outputs: Any) -> Any:
    return {output.request_id for output in outputs if output.token_ids}


@pytest.mark.parametrize("scarce", ["rows", "pages"])
def test_an_owner_with_few_requests_waits_for_none_of_one_with_many(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, scarce: str
) -> None:
    now = itertools.count(1000)
    rows, pages = (4, 400) if scarce == "rows" else (40, 16)
    engine = make_engine(model, vocabulary, max_num_seqs=rows, num_pages=pages, clock=lambda: float(next(now)))
    answer = SamplingParams(max_tokens=12, ignore_eos=True)
    for i in range(12):
        engine.add(f"a{i}", list(range(i, i + 8)), answer, owner=Owner("many"))
    first = names(engine.step())
    assert len(first) < 12
    for owner in ("x", "y"):
        engine.add(f"b{owner}", [7] * 8, answer, owner=Owner("few", owner))
    second = names(engine.step()) | names(engine.step())
    assert {"a0", "a1", "bx", "by"} <= second
    assert engine.stats().preemptions >= 1
    assert engine.stats().over_share > 0
    engine.abort("bx")
    engine.abort("by")
    engine.step()
    assert engine.stats().over_share == 0
    run(engine)


def test_rows_are_shared_by_weight_and_then_among_callers() -> None:
    def sequences(*owners: Owner) -> list[Sequence]:
        requests = []
        for number, owner in enumerate(owners):
            requests.append(
                Request(
                    f"{number}", np.zeros(1, np.int32), SamplingParams(), job_class=JobClass.INTERACTIVE, arrival=0.0,
                    serial=number, seed=1, max_tokens=1, end_ids=frozenset(), owner=owner,
                )
            )  # fmt: skip
        return [Sequence(request, 0, Detokenizer(lambda _: b""), None, 1) for request in requests]

    def within(found: list[Sequence]) -> list[str]:
        return [one.request.id for one in found if one not in over_share(found, 8, lambda one: (one.request.serial,))]

    a, b = Owner("a"), Owner("b", weight=3)
    assert within(sequences(*[a] * 20)) == [f"{number}" for number in range(20)]
    assert within(sequences(*[a, b] * 20)) == [f"{n}" for n in (0, 1, 2, 3, 5, 7, 9, 11)]
    x, y, z = (Owner("a", caller) for caller in "xyz")
    assert within(sequences(x, x, x, x, y, z, b, b, b)) == ["0", "4", "5", "6", "7", "8"]
