"""A worker whose tokenizer has more tokens than the model: a request with one of them fails, and nothing else."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from larger_tokenizer import SPECIAL, WORD, write_larger_tokenizer

from ktqueue.broker.broker import Broker
from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import InvalidRequest
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.engine.outputs import EmittedChoice
from ktqueue.loading.tokenizer.tokenizer import load_served_tokenizer, load_tokenizer
from ktqueue.workers.generation.request_encoder import RequestEncoder
from ktqueue.workers.startup.build import Built, build

SIZE = 8192  # of the built-in model
STORY = "Once upon a time"


def asking(prompt: str = STORY, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(model="demo", prompt=prompt, sampling=SamplingParams(**{"max_tokens": 4, **sampling}))


UNKNOWN = [
    (asking(f"I like {WORD}s"), "prompt"),
    (asking(SPECIAL), "prompt"),
    (GenerationRequest(model="demo", messages=({"role": "user", "content": f"say {WORD}"},)), "messages"),
    (GenerationRequest(model="demo", prompt_token_ids=(5, SIZE)), "prompt_token_ids[1]"),
    (GenerationRequest(model="demo", prompt_token_ids=(2**31 - 1,), prompt_only=True), "prompt_token_ids[0]"),
    (asking(logit_bias={SIZE: 1.0}), "logit_bias"),
    (asking(allowed_token_ids=(3, SIZE + 1)), "allowed_token_ids"),
    (asking(bad_words=(WORD,)), "bad_words"),
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("larger")
    write_larger_tokenizer(folder)
    rows = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, threads=1)
    return replace(rows, tokenizer=str(folder), num_pages=256, max_model_len=512)


@pytest.fixture
def built(settings: EngineConfig) -> Built:
    return build(settings)


async def test_only_the_request_fails(
    built: Built, settings: EngineConfig, broker: Broker, start_worker: Any, finished: Any
) -> None:
    async with start_worker(built.engine, settings, tokenizer=built.tokenizer):
        beside = await broker.jobs.submit(asking(max_tokens=200, ignore_eos=True))
        for request, param in UNKNOWN:
            last = (await finished((await broker.jobs.submit(request)).id)).last
            assert last.state is JobState.FAILED and last.error is not None
            assert (last.error.status, last.error.param) == (InvalidRequest.status, param)
            assert last.error.limit == SIZE - 1
        ends_nothing = await broker.jobs.submit(asking(stop_token_ids=(SIZE, 2**31 - 1), min_tokens=2))
        assert (await finished(ends_nothing.id)).state is JobState.DONE
        assert (await finished(beside.id)).state is JobState.DONE
        assert (await broker.jobs.get(beside.id)).attempts == 1


def test_what_another_worker_wrote_is_checked(built: Built) -> None:
    """Its model may have more tokens."""
    words = f"emitted has token id {SIZE}, but the vocabulary has ids 0 to {SIZE - 1}"
    with pytest.raises(InvalidRequest, match=words):
        built.engine.add("resumed", [5], SamplingParams(seed=1), emitted=[EmittedChoice(token_ids=(7, SIZE))])
    assert not built.engine.has_work


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_forces_a_text_with_the_tokens_of_the_model(built: Built, temperature: float) -> None:
    encode = RequestEncoder(built.tokenizer, 512)
    request = replace(asking(temperature=temperature, max_tokens=40), grammar=f'start: "a {WORD} {SPECIAL}"')
    prompt = encode(request)
    built.engine.add("forced", prompt.token_ids, request.sampling, matcher=prompt.matcher)
    text = ""
    while built.engine.has_work:
        for output in built.engine.step():
            assert output.error is None
            text += output.text
    assert text == f"a {WORD} {SPECIAL}"
    encode.close()


def test_it_says_so_at_its_start(settings: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    build(settings)
    (line,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert line == (
        f"the tokenizer has token ids to {SIZE + 1}, but the model only to {SIZE - 1}: requests with the others are "
        "refused"
    )
    caplog.clear()
    build(replace(settings, tokenizer=None))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_model_says_where_answers_end_whatever_its_tokenizer_says(tmp_path: Path) -> None:
    write_larger_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL}))
    tokenizer = load_served_tokenizer("demo", str(tmp_path), SIZE)
    assert tokenizer.eos_token_ids == load_tokenizer("demo").eos_token_ids == {SIZE - 1}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_served_tokenizer(str(model), str(tmp_path), SIZE).eos_token_ids == {7, 9}
    (model / "generation_config.json").write_text('{"eos_token_id": 8}')
    assert load_served_tokenizer(str(model), str(tmp_path), SIZE + 1).eos_token_ids == {8, SIZE}


def test_an_answer_without_an_end_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_larger_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    built = build(EngineConfig(model="synthetic:tiny", tokenizer=str(tmp_path), num_pages=16, threads=1))
    assert built.tokenizer.eos_token_ids == frozenset()
    assert "names no token of the model that ends an answer" in caplog.text
    built.engine.add("endless", [5], SamplingParams(max_tokens=3, min_tokens=2))
    while built.engine.has_work:
        built.engine.step()
