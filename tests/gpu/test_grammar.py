"""Answers that must match a grammar are the same on a GPU and on the CPU, and cost no wait for the device.

The tests also run on CPU tensors. On a machine with a GPU:

    python -m pytest -m gpu tests/gpu/test_grammar.py
"""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.engine.gpu.device_selector import DeviceSelector
from ktqueue.engine.token_masks import MaskedRows
from ktqueue.engine.token_selector import HostSelector
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.openai.json_schema import lark_of_schema
from ktqueue.operators import native
from ktqueue.operators.gpu.staging import ResultFetcher
from ktqueue.workers.generation.request_encoder import RequestEncoder
from ktqueue.workers.startup.build import build

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["fox", "crow"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def there(request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available():
        native.set_threads()
    if "cuda" in request.node.name and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


class Row:
    """What a selector reads of a sequence."""

    def __init__(self, sampling: SamplingParams, number: int) -> None:
        self.request = type("Request", (), {"sampling": sampling})
        self.edits = None
        self.noise_stream = number + 1
        self.generated = 3


@pytest.mark.parametrize("vocab", [97, 8192, 151_936])
@pytest.mark.parametrize("device", DEVICES)
def test_masks_choose_the_tokens_of_the_host(device: str, vocab: int) -> None:
    noise = np.random.default_rng(7)
    samplings = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.9, top_p=0.9, logprobs=5),
        SamplingParams(temperature=1.2, top_k=7),
    ]
    rows: list[Any] = [Row(samplings[i % 4], i) for i in range(13)]
    logits = noise.normal(size=(13, vocab)).astype(np.float32) * 4
    words = -(-vocab // 32)
    for masked_rows in (list(range(13)), [0, 3, 5, 6, 12]):
        masks = np.zeros((len(masked_rows), words), dtype=np.int32)
        allowed: list[set[int]] = []
        for row in range(len(masked_rows)):
            ids = noise.choice(vocab, size=int(noise.choice([1, 3, vocab // 2])), replace=False)
            allowed.append(set(ids.tolist()))
            for token_id in ids.tolist():
                masks[row].view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        masked = MaskedRows(masked_rows, masks)
        expected = HostSelector(lambda _: b"").select(torch.from_numpy(logits.copy()), range(13), rows, masked=masked)
        selector = DeviceSelector(lambda _: b"", device)
        on_device = torch.from_numpy(logits).to(device)
        found = selector.select(on_device.clone(), range(13), rows, masked=masked)
        if device == "cuda":  # now its buffers have their sizes, and only the one fetch may wait
            again = on_device.clone()
            torch.cuda.set_sync_debug_mode("error")
            try:
                assert selector.select(again, range(13), rows, masked=masked).token_ids == found.token_ids
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert found.token_ids == expected.token_ids and found.finite == expected.finite
        for row, ids_allowed in zip(masked_rows, allowed, strict=True):
            assert found.token_ids[row] in ids_allowed
        assert found.logprobs.keys() == expected.logprobs.keys()
        for row, place in found.logprobs.items():
            other = expected.logprobs[row]
            assert [one.token_id for one in place.top] == [one.token_id for one in other.top]
            assert place.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_documents_are_valid_without_another_wait(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = []
    fetch = ResultFetcher.fetch

    def counted(self: ResultFetcher, values: torch.Tensor, meanwhile: Callable[[], None]) -> Any:
        fetches.append(len(values))
        return fetch(self, values, meanwhile)

    monkeypatch.setattr(ResultFetcher, "fetch", counted)
    tokenizer = load_tokenizer("demo")
    built = build(EngineConfig(model="demo", device=device, max_num_seqs=16, num_pages=400, max_model_len=600))
    encoder = RequestEncoder(tokenizer, 600)
    try:
        for seed in range(8):
            sampling = SamplingParams(seed=seed, temperature=0.9, max_tokens=400, n=1)
            grammar = lark_of_schema(SCHEMA, "schema") if seed % 4 else None
            request = GenerationRequest(model="demo", prompt=f"Fox {seed}", sampling=sampling, grammar=grammar)
            prompt = encoder(request)
            built.engine.add(str(seed), prompt.token_ids, sampling, matcher=prompt.matcher)
        texts: dict[str, str] = {}
        steps = 0
        while built.engine.has_work:
            for output in built.engine.step(lambda: True):
                assert output.error is None
                texts[output.request_id] = texts.get(output.request_id, "") + output.text
            steps += 1
    finally:
        encoder.close()
        built.engine.close()
    for name, text in texts.items():
        if int(name) % 4:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert len(fetches) <= steps  # at most one wait in each step
