"""A step of many rows computes the logits of some of them at a time, and no token changes.

Each test also runs on CPU tensors.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from device_engine import on_device

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine import step_sampler
from ktqueue.engine.engine import Engine
from ktqueue.engine.gpu import graph_runner
from ktqueue.loading.load import load_model
from ktqueue.operators.gpu.decoder import GpuDecoder

pytestmark = pytest.mark.usefixtures("small_steps_overlap")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
AT_ONCE = 17  # one more than the rows that log probabilities of a prompt take at once
MORE: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"n": 2}, {"presence_penalty": 1.0}]
Found = dict[tuple[str, int], tuple[list[int], list[Any]]]


@pytest.fixture
def make_engine(by_decoder: str) -> Iterator[Any]:
    made: list[Engine] = []

    def make(device: str, model: str) -> Engine:
        config = EngineConfig(
            device=device,
            max_num_seqs=60,
            max_num_batched_tokens=300,
            dtype="float32",
            num_pages=600,
            speculation="off",
            cuda_graphs=False,
        )
        made.append(on_device(load_model(model, rules=by_decoder, device=device, dtype=torch.float32), config))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def serve(engine: Engine, *, interactive: int) -> Found:
    """Tokens and log probabilities of each choice: greedy and sampled ones, siblings, and scored prompts.

    The first `interactive` requests are of that class. They arrive one by one, in the steps of the others."""
    noise, asked = random.Random(1), []
    for number in range(50):
        prompt = [noise.randrange(512) for _ in range(noise.randrange(2, 40))]
        drawn: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95} if number % 2 else {"temperature": 0.0}
        more = MORE[number % len(MORE)]
        asked.append((str(number), prompt, SamplingParams(seed=number, max_tokens=12, **drawn, **more)))
    for one in asked[interactive:]:
        engine.add(*one, job_class=JobClass.BATCH)
    waiting, found = asked[:interactive], Found()
    while waiting or engine.has_work:
        if waiting:
            engine.add(*waiting.pop())
        for output in engine.step():
            assert output.error is None, output.error
            tokens, logprobs = found.setdefault((output.request_id, output.index), ([], []))
            tokens += output.token_ids
            logprobs += [*output.logprobs, *output.prompt_logprobs]
        engine.check()
    return found


def assert_same(found: Found, expected: Found) -> None:
    """Tokens are equal, and log probabilities nearly: a matrix product may depend on the number of its rows in the last
    bits."""
    assert found.keys() == expected.keys()
    for name, (tokens, scores) in found.items():
        assert tokens == expected[name][0]
        for one, other in zip(scores, expected[name][1], strict=True):
            entries, others = ([] if it is None else [it.chosen, *it.top] for it in (one, other))
            assert [entry.token_id for entry in entries] == [entry.token_id for entry in others]
            assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in others], abs=1e-4)


@pytest.mark.parametrize("interactive", [0, 6])
@pytest.mark.parametrize("device", DEVICES)
def test_no_token_changes(
    device: str, interactive: int, make_engine: Any, small_experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, of a small model, since the demo model takes long: dividing rows ignores the weights."""
    model = "demo" if device == "cuda" else small_experts
    expected = serve(make_engine(device, model), interactive=interactive)
    sizes: list[int] = []

    def logits(decoder: GpuDecoder, x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return head(decoder, x)

    head = GpuDecoder.logits
    monkeypatch.setattr(GpuDecoder, "logits", logits)
    monkeypatch.setattr(step_sampler, "SAMPLED_ROWS", AT_ONCE)
    monkeypatch.setattr(graph_runner, "SAMPLED_ROWS", AT_ONCE)
    engine = make_engine(device, model)
    sizes.clear()
    assert_same(serve(engine, interactive=interactive), expected)
    assert max(sizes) == AT_ONCE
    assert (engine.stats().overlapped_steps > 3) == (interactive > 0)
