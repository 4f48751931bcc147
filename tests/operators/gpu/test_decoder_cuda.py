"""GpuDecoder on a GPU: captured decode steps, both methods of the hand-off, tables that change between replays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import SEQUENCES, Cache, make_model, make_planner_for

from ktqueue.operators.decoder import DecoderOutput
from ktqueue.operators.experts import CpuExperts
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.experts.placement import READ_EVERY_STEPS
from ktqueue.operators.step import StepContext

pytestmark = pytest.mark.gpu
ROWS = 3


@pytest.fixture(scope="module", autouse=True)
def device() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return "cuda"


class Captured:
    """Decode steps that are replayed. They have one row more than there are sequences, which is padding."""

    def __init__(self, decoder: GpuDecoder, cache: Cache) -> None:
        self._cache = cache
        rows = ROWS + 1
        self._pages = 24
        ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        self._ids, self._positions, self._slots = (
            torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(3)
        )
        self._table = torch.zeros(rows, self._pages, **ints)
        self._contexts = torch.ones(rows, **ints)
        live = torch.tensor([ROWS], **ints)
        starts = torch.arange(rows + 1, **ints)
        self._plan = cache.planner.decode_plan(rows, self._pages)
        self._host(self._empty())
        step = StepContext(starts, self._contexts, self._table, self._slots, cache.kv, self._plan, live)
        scored = torch.arange(rows, device="cuda")
        self._read = step, scored  # by every replay, so they must live

        def forward() -> torch.Tensor:
            output: DecoderOutput = decoder(
                input_ids=self._ids[None], position_ids=self._positions[None], logits_to_keep=scored, step=step
            )
            return output.logits

        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            forward()
            forward()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = forward()

    def _empty(self) -> dict[str, list[Any]]:
        scratch = self._cache.kv.pages - 1
        slot = scratch * self._cache.kv.layout.page_size
        return {"ids": [0], "positions": [0], "slots": [slot], "contexts": [1], "pages": [[scratch]]}

    def _host(self, rows: dict[str, list[Any]]) -> None:
        """Give these rows and padding to the fixed tensors and to the plan."""
        padding = self._empty()
        count = len(self._ids)
        full = {key: (values + count * padding[key])[:count] for key, values in rows.items()}
        table = torch.zeros(count, self._pages, dtype=torch.int32)
        for row, pages in enumerate(full["pages"]):
            table[row, : len(pages)] = torch.tensor(pages)
        contexts = torch.tensor(full["contexts"], dtype=torch.int32)
        starts = torch.arange(count + 1, dtype=torch.int32)
        self._plan.update(StepContext(starts, contexts, table, torch.tensor(full["slots"]), self._cache.kv))
        for target, values in ((self._ids, "ids"), (self._positions, "positions"), (self._slots, "slots")):
            target.copy_(torch.tensor(full[values]))
        self._table.copy_(table)
        self._contexts.copy_(contexts)

    def step(self, tokens: dict[str, int]) -> torch.Tensor:
        """Feed each sequence one token: logits [rows, vocab]."""
        cache, size = self._cache, self._cache.kv.layout.page_size
        rows: dict[str, list[Any]] = {"ids": [], "positions": [], "slots": [], "contexts": [], "pages": []}
        for name, token in tokens.items():
            position, pages = cache.fed[name], cache.pages[name]
            if position // size == len(pages):
                pages.append(cache._free.pop())
            cache.fed[name] = position + 1
            rows["ids"].append(token)
            rows["positions"].append(position)
            rows["slots"].append(pages[position // size] * size + position % size)
            rows["contexts"].append(position + 1)
            rows["pages"].append(list(pages))
        self._host(rows)
        self._graph.replay()
        torch.cuda.synchronize()
        return self._logits[0, : len(tokens)].float().cpu()


def record_bytes(decoder: GpuDecoder) -> int:
    return int(decoder.statistics()["expert_bytes"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["flags", "host_functions"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_captured_steps_equal_eager_ones(
    family: str, share: float, method: str, dtype: torch.dtype, make_decoder: Callable[..., Any]
) -> None:
    model = make_model(family).to(dtype)
    memory = int(share * record_bytes(make_decoder(model, "Q8_0")))
    decoder = make_decoder(model, "Q8_0", handoff=method, expert_memory_bytes=memory)
    eager, replayed = (Cache(decoder, device="cuda", planner=make_planner_for) for _ in range(2))
    replayed._free.remove(replayed.kv.pages - 1)  # the scratch page: see Captured
    with torch.inference_mode():
        captured = Captured(decoder, replayed)
        prompts = {name: ids[:-5] for name, ids in SEQUENCES.items() if len(ids) > 5} | {"s0": SEQUENCES["s0"][:1]}
        for cache in (eager, replayed):
            cache.step(prompts)
        for i in range(2 * READ_EVERY_STEPS):  # experts move meanwhile
            tokens = {name: (7 * i + len(name)) % 90 for name in prompts}
            if i >= 4:
                tokens = dict.fromkeys(prompts, i % 3)
            expected = eager.step({name: [token] for name, token in tokens.items()})
            decoder.after_step()
            found = captured.step(tokens)
            decoder.after_step()
            tolerance = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(found, expected, atol=tolerance * expected.abs().max().item(), rtol=0)
    if share == 0.5:
        assert decoder.statistics()["expert_hit_rate"] > 0
    if share < 1:
        statistics = decoder.statistics()
        assert (statistics["expert_prediction_hits"] > 0) == (method == "flags")


def test_a_model_on_the_gpu_may_have_experts_on_the_cpu(
    tiny_model: Callable[..., Any], given_weights: Callable[..., Any]
) -> None:
    """This is how rules/modules.yaml does it: tensors are copied to the host and back."""
    experts = tiny_model().model.layers[0].mlp.experts
    operator = CpuExperts.from_module(experts, activations="float32")
    operator.load(given_weights(experts, "F32"))
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 1], [5, 2], [3, 3], [1, 0], [2, 4], [5, 5], [0, 4]])
    weights = torch.rand(7, 2, generator=torch.Generator().manual_seed(2))
    expected = operator(x, ids, weights)
    found = operator(x.cuda(), ids.cuda(), weights.cuda())
    assert found.device.type == "cuda"
    torch.testing.assert_close(found.cpu(), expected)
