"""A request that an earlier worker began continues at the exact next token, with its text and limits."""

from collections.abc import Callable
from typing import Any

import pytest

from ktqueue.core.events import FinishReason
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import EmittedChoice

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9]
RESUMED = SamplingParams(
    seed=11,
    temperature=1.2,
    top_p=0.95,
    n=2,
    max_tokens=18,
    min_tokens=4,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias={4: 2.0, 60: -3.0},
    logprobs=1,
    stop=("QqQ", "zz"),
)


@pytest.mark.parametrize("caching", [True, False])
def test_resume_at_every_token(
    make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, gather_outputs: Any, caching: bool
) -> None:
    whole = make_engine(make_model(), vocabulary)
    whole.add("x", PROMPT, RESUMED)
    expected = run(whole)
    for cut in range(19):
        first = make_engine(make_model(), vocabulary)
        first.add("x", PROMPT, RESUMED)
        journal: dict[Any, Any] = {}
        for _ in range(cut):
            gather_outputs(journal, first.step())
        emitted = []
        for index in range(2):
            result = journal.get(("x", index))
            emitted.append(
                EmittedChoice(
                    token_ids=tuple(result.token_ids), text_length=len(result.text), finish_reason=result.finish_reason
                )
                if result
                else EmittedChoice()
            )
        model = make_model()
        second = make_engine(model, vocabulary, enable_prefix_caching=caching, max_num_batched_tokens=6)
        second.add("x", PROMPT, RESUMED, emitted=emitted)
        rest = run(second)
        usage = None
        for index in range(2):
            old, new, want = journal.get(("x", index)), rest.get(("x", index)), expected["x", index]
            assert (old.token_ids if old else []) + (new.token_ids if new else []) == want.token_ids
            assert (old.text if old else "") + (new.text if new else "") == want.text
            assert (old.logprobs if old else []) + (new.logprobs if new else []) == want.logprobs
            assert ((new and new.finish_reason) or (old and old.finish_reason)) == want.finish_reason
            usage = usage or (new and new.usage)
        assert usage is not None
        assert usage.completion_tokens == sum(len(expected["x", i].token_ids) for i in range(2))


def test_resume_with_uneven_choices(
    make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    sampling = SamplingParams(seed=2, n=4, max_tokens=10)
    whole = make_engine(make_model(), vocabulary)
    whole.add("x", PROMPT, sampling)
    expected = run(whole)
    tokens = [expected["x", i].token_ids for i in range(4)]
    text = [expected["x", i].text for i in range(4)]
    for cuts in ((3, 0, 10, 7), (0, 5, 0, 1), (10, 10, 10, 10), (10, 10, 0, 0), (0, 0, 0, 9), (9, 9, 9, 9)):
        emitted = [
            EmittedChoice(
                token_ids=tuple(tokens[i][:cut]),
                text_length=len("".join(vocabulary.token_bytes(t).decode() for t in tokens[i][:cut])),
                finish_reason=FinishReason.LENGTH if cut == 10 else None,
            )
            for i, cut in enumerate(cuts)
        ]
        engine = make_engine(make_model(), vocabulary, max_num_batched_tokens=5)
        engine.add("x", PROMPT, sampling, emitted=emitted)
        rest = run(engine)
        for i, cut in enumerate(cuts):
            assert cut < 10 or ("x", i) not in rest or rest["x", i].finish_reason is None, "it had already ended"
            if ("x", i) in rest:
                assert tokens[i][:cut] + rest["x", i].token_ids == tokens[i]
                assert text[i].endswith(rest["x", i].text)
        (usage,) = [result.usage for result in rest.values() if result.usage]
        assert usage.completion_tokens == 40


def test_a_resumed_choice_whose_end_was_not_written_ends_at_once(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    engine = make_engine(model, vocabulary)
    sampling = SamplingParams(temperature=0.0, max_tokens=3, n=2)
    full = EmittedChoice(token_ids=(1, 2, 3), text_length=2)
    engine.add("x", PROMPT, sampling, emitted=[full, full])
    results = run(engine)
    assert model.computed_tokens == 0
    for index in range(2):
        assert results["x", index].finish_reason is FinishReason.LENGTH
        assert results["x", index].token_ids == [] and results["x", index].text == chr(33 + 3)
    assert [results["x", i].usage is not None for i in range(2)] == [False, True]


def test_a_cached_page_is_not_overwritten_by_a_sibling(
    make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    """The first choice ends. Its sibling continues within a page that the first choice had filled and cached."""
    sampling = SamplingParams(seed=2, n=2, max_tokens=10, ignore_eos=True)
    whole = make_engine(make_model(), vocabulary, page_size=16)
    whole.add("x", PROMPT, sampling)
    expected = run(whole)
    first = expected["x", 0].token_ids
    engine = make_engine(make_model(), vocabulary, page_size=16)
    engine.add("x", PROMPT, sampling, emitted=[EmittedChoice(token_ids=tuple(first[:9]))])
    assert run(engine)["x", 1].token_ids == expected["x", 1].token_ids
    engine.check()
    longer = [*PROMPT, *first, 1, 2]
    later = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engine.add("later", longer, later)
    fresh = make_engine(make_model(), vocabulary)
    fresh.add("later", longer, later)
    assert run(engine)["later", 0].token_ids == run(fresh)["later", 0].token_ids
