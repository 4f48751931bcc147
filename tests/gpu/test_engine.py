"""The engine on a GPU gives the tokens of the CPU's engine: greedy and sampled, with and without graphs, on every path.

Each test also runs on CPU tensors, with the kernels' twins; captured steps are then called again instead of replayed.
"""

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engine import few_on_the_cpu, on_device
from endless_vocabulary import NoEnd
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.request import SamplingParams
from ktqueue.engine.draft_model import DraftSource
from ktqueue.engine.engine import Engine
from ktqueue.loading.load import load_model
from ktqueue.operators import native
from ktqueue.operators.gpu.staging import ResultFetcher
from ktqueue.workers.startup.build import build
from ktqueue.workers.startup.gpu_memory import planner_of

RULES = Path(__file__).parents[2] / "rules"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NEW_TOKENS = 20
COUNTS = {} if torch.cuda.is_available() else {"demo": 8}  # requests, else 16: this model is slow on a CPU
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.3, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def there(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip tests that need a GPU if there is none, and turn torch's sync debugging off afterwards."""
    if torch.cuda.is_available():
        native.set_threads()
    if "cuda" in request.node.name and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    yield
    if torch.cuda.is_available() and torch.cuda.get_sync_debug_mode():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by name: the built-in model, a random dense one, a random one with experts."""
    made = {"demo": "demo"}
    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    kinds: list[tuple[str, Any, Any]] = [
        ("dense", Qwen3Config(**SIZES, intermediate_size=128), Qwen3ForCausalLM),
        ("experts", Qwen3MoeConfig(**SIZES, **experts), Qwen3MoeForCausalLM),
    ]
    for name, config, kind in kinds:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(name)
        kind(config).float().save_pretrained(folder)
        made[name] = str(folder)
    return made


def settings_for(device: str, **given: Any) -> EngineConfig:
    known: dict[str, Any] = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "dtype": "float32", "num_pages": 200}
    return EngineConfig(device=device, **known | given)


def requests(vocabulary: int, count: int, seed: int = 1) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of random lengths. A third is greedy, a third sampled with top_p, a third with other filters."""
    noise = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [noise.randrange(vocabulary) for _ in range(int(150 ** noise.random()))]
        drawn: dict[str, Any] = ({}, {"top_p": 0.95}, {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2})[i % 3]
        temperature = 0.8 if drawn else 0.0
        made.append((prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=NEW_TOKENS, **drawn)))
    return made


def serve(
    engine: Engine, asked: list[tuple[list[int], SamplingParams]], together: int = 7, go_on: bool = False
) -> list[list[int]]:
    """The tokens of all requests. `together` of them arrive before each step. All pages must be free at the end."""
    found: list[list[int]] = [[] for _ in asked]
    waiting = list(enumerate(asked))
    while waiting or engine.has_work:
        for i, (prompt, sampling) in waiting[:together]:
            engine.add(str(i), prompt, sampling)
        del waiting[:together]
        for one in engine.step(lambda: go_on):
            assert one.error is None, one.error
            found[int(one.request_id)] += one.token_ids
    engine.check()
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages
    return found


@pytest.fixture(scope="module")
def answers(models: dict[str, str]) -> Callable[[str], list[list[int]]]:
    """The tokens of the CPU's engine, by model name."""
    known: dict[str, list[list[int]]] = {}

    def of(name: str) -> list[list[int]]:
        if name not in known:
            model = load_model(models[name], rules=str(RULES / "exact.yaml"))
            config = settings_for("cpu")
            vocabulary = NoEnd(model.card_facts.vocab_size)
            engine = Engine(model.module, vocabulary, model.kv_layout(16), config, 200, 512)
            known[name] = serve(engine, requests(vocabulary.size, COUNTS.get(name, 16)))
        return known[name]

    return of


# On a CPU the demo model takes longest: two of its cases have each path, and steps with graphs and without.
@pytest.mark.parametrize(
    ("device", "name", "path", "graphs"),
    few_on_the_cpu(
        ("demo", "decoder", True),
        ("demo", "modules", False),
        *itertools.product(["dense", "experts"], ["decoder", "modules"], [True, False]),
    ),
)
def test_tokens_equal_the_cpu_s(
    device: str,
    name: str,
    path: str,
    graphs: bool,
    models: dict[str, str],
    answers: Callable[[str], list[list[int]]],
    by_decoder: str,
    tmp_path: Path,
) -> None:
    rules = by_decoder
    if path == "modules":
        options = "".join(f"  {op}: {{activations: float32}}\n" for op in ("CpuExperts", "CpuLinear"))
        (tmp_path / "rules.yaml").write_text(f"base: modules\noptions:\n{options}")
        rules = str(tmp_path / "rules.yaml")
    model = load_model(models[name], rules=rules, device=device)
    engine = on_device(model, settings_for(device, cuda_graphs=graphs))
    found = serve(engine, requests(model.card_facts.vocab_size, COUNTS.get(name, 16)))
    engine.close()
    assert found == answers(name)
    waits = device == "cuda" and path == "modules" and name != "dense"  # CpuExperts: no graphs
    assert (engine.stats().replayed_steps > 0) == (graphs and not waits)


@pytest.mark.parametrize(
    ("device", "speculation", "name", "graphs"),
    [
        *itertools.product(["cpu"], ["lookup", "model"], ["experts"], [True, False]),
        *(
            pytest.param(*case, marks=pytest.mark.gpu)
            for case in itertools.product(["cuda"], ["lookup", "model"], ["demo", "experts"], [True, False])
        ),
    ],
)
def test_steps_with_drafts_give_the_cpu_s_tokens(
    device: str,
    speculation: Any,
    name: str,
    graphs: bool,
    models: dict[str, str],
    answers: Callable[[str], list[list[int]]],
    by_decoder: str,
) -> None:
    """Each row has five drafts, however likely they are; or those of a model with the same weights, mostly right."""
    model, second = (load_model(models[name], rules=by_decoder, device=device) for _ in range(2))
    config = settings_for(device, cuda_graphs=graphs, speculation=speculation)
    layout = second.kv_layout(16)
    source = DraftSource(second.module, layout, 512, planner_of(second, layout, config))
    engine = on_device(model, config, source if speculation == "model" else None)
    engine.drafts.probed = 5
    found = serve(engine, requests(model.card_facts.vocab_size, COUNTS.get(name, 16)))
    engine.close()
    assert found == answers(name)
    stats = engine.stats()
    least = 0 if speculation == "lookup" else int(0.9 * stats.drafted_tokens)
    assert least < stats.accepted_tokens <= stats.drafted_tokens and (stats.replayed_steps > 0) == graphs


def scored(engine: Engine, prompts: list[list[int]]) -> list[list[float]]:
    """Log probabilities of the prompts' tokens and of their two likeliest tokens, beside two requests that decode."""
    for i in range(2):
        engine.add(f"decodes {i}", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        engine.step()
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=i % 2, prompt_logprobs=2))
    found: dict[str, list[float]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work:
        for one in engine.step():
            assert one.error is None, one.error
            for entry in one.prompt_logprobs:
                if entry is not None:
                    found[one.request_id] += [entry.chosen.logprob, *(token.logprob for token in entry.top)]
    engine.check()
    return list(found.values())


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["dense", "experts"])
@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_of_prompts_equal_the_cpu_s(
    device: str, name: str, graphs: bool, models: dict[str, str], by_decoder: str
) -> None:
    prompts = [prompt for prompt, _ in requests(512, 12, seed=3)] + [[9] * 150, [4]]
    reference = load_model(models[name], rules=str(RULES / "exact.yaml"))
    config = settings_for("cpu")
    expected = scored(Engine(reference.module, NoEnd(512), reference.kv_layout(16), config, 200, 512), prompts)
    engine = on_device(
        load_model(models[name], rules=by_decoder, device=device), settings_for(device, cuda_graphs=graphs)
    )
    found = scored(engine, prompts)
    engine.close()
    assert [len(values) for values in found] == [3 * (len(prompt) - 1) for prompt in prompts]
    for values, wanted in zip(found, expected, strict=True):
        assert values == pytest.approx(wanted, abs=2e-3)


@pytest.mark.parametrize("memory", [0, 1 << 30])
@pytest.mark.parametrize("handoff", ["auto", "host_functions"])
@pytest.mark.parametrize("device", DEVICES)
def test_experts_on_either_side(
    device: str,
    handoff: str,
    memory: int,
    models: dict[str, str],
    answers: Callable[[str], list[list[int]]],
    by_decoder: str,
) -> None:
    if device == "cpu" and handoff != "auto":
        pytest.skip("tensors of a CPU are handed off directly")
    model = load_model(models["experts"], rules=by_decoder, device=device)
    config = settings_for(device, handoff=handoff, gpu_expert_memory_bytes=memory)
    engine = on_device(model, config)
    assert serve(engine, requests(512, 16)) == answers("experts")
    engine.close()
    stats = engine.stats()
    assert 0 < stats.replayed_steps <= stats.steps
    assert (stats.replayed_steps == stats.steps) == (memory > 0), "without the CPU's experts, prompts are captured too"


@pytest.mark.parametrize("memory", [0, 1 << 30])
@pytest.mark.parametrize("device", DEVICES)
def test_few_pages_and_aborts_change_nothing(
    device: str, memory: int, models: dict[str, str], answers: Callable[[str], list[list[int]]], by_decoder: str
) -> None:
    model = load_model(models["experts"], rules=by_decoder, device=device)
    engine = on_device(model, settings_for(device, num_pages=16, gpu_expert_memory_bytes=memory))
    asked = requests(512, 16)
    engine.add("aborted", asked[0][0] * 2, asked[0][1])
    engine.step()
    engine.add("aborted too", asked[1][0] * 2, asked[1][1])
    engine.step()
    engine.abort("aborted")
    engine.abort("aborted too")
    assert serve(engine, asked) == answers("experts")
    assert engine.stats().preemptions > 0
    engine.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("rows", [1, 3, 12])
@pytest.mark.parametrize("device", DEVICES)
def test_a_decode_step_waits_once(
    device: str, rows: int, models: dict[str, str], by_decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises for every sync that it knows of, except the one for the tokens."""
    model = load_model(models["experts"], rules=by_decoder, device=device)
    engine = on_device(model, settings_for(device, enable_prefix_caching=False))
    fetches = []
    fetch = ResultFetcher.fetch

    def counted(self: ResultFetcher, values: torch.Tensor, meanwhile: Callable[[], None]) -> Any:
        fetches.append(1)
        return fetch(self, values, meanwhile)

    monkeypatch.setattr(ResultFetcher, "fetch", counted)
    draws: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 1, "logprobs": 2}]
    for drawn in draws:
        for i in range(rows):
            engine.add(f"{drawn}{i}", [i, 2, 3], SamplingParams(max_tokens=9, **drawn))
        engine.step()
        before = engine.stats()
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            fetches.clear()
            engine.step()
            assert len(fetches) == 1
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        after = engine.stats()
        assert after.replayed_steps - before.replayed_steps == after.prepared_steps - before.prepared_steps == 5
        while engine.has_work:
            engine.step()
    engine.close()


@pytest.mark.parametrize("pages", [200, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_prepared_steps_change_nothing(
    device: str, pages: int, models: dict[str, str], by_decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at different lengths, so some prepared steps are dropped."""
    model = load_model(models["experts"], rules=by_decoder, device=device)
    asked = [(ids, replace(one, max_tokens=3 + 3 * i)) for i, (ids, one) in enumerate(requests(512, 16))]
    answers = []
    for ahead, early in ((False, False), (True, False), (True, True)):
        engine = on_device(model, settings_for(device, num_pages=pages))
        if not ahead:
            monkeypatch.setattr(engine._next, "prepare", lambda *_: None)
        answers.append(serve(engine, asked, go_on=early))
        assert (engine.stats().prepared_steps > 20) == ahead
        assert (engine.stats().steps_ahead > 5) == early or device == "cpu"  # where torch's plans are not captured
        engine.close()
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("memory", [0, 1 << 30])
@pytest.mark.parametrize("device", DEVICES)
def test_aborts_during_a_step_change_nothing(
    device: str, memory: int, models: dict[str, str], answers: Callable[[str], list[list[int]]], by_decoder: str
) -> None:
    """Steps that were launched early write to pages that are freed and used again in the meantime."""
    model = load_model(models["experts"], rules=by_decoder, device=device)
    engine = on_device(model, settings_for(device, num_pages=40, gpu_expert_memory_bytes=memory))
    asked = requests(512, 16)
    for again in range(3):
        for i in range(6):
            engine.add(f"aborted{i}", asked[i][0], replace(asked[i][1], max_tokens=40))
        for _ in range(4 + again):
            engine.step(lambda: True)
        for i in range(6):
            engine.abort(f"aborted{i}")
        assert serve(engine, asked, go_on=True) == answers("experts")
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_cache_dtype", "memory"), [("auto", 0), ("fp8", 0), ("fp8", 1 << 30)])
def test_nothing_is_lost_on_cuda(kv_cache_dtype: str, memory: int) -> None:
    """A whole worker's engine in bfloat16: after 64 requests of random shapes, three times, no memory is lost.

    The share that long steps stream is learned from their times and changes the rounding, so tokens may differ.
    """
    settings = {"kv_cache_dtype": kv_cache_dtype, "gpu_expert_memory_bytes": memory, "enable_prefix_caching": False}
    config = settings_for("cuda", dtype="bfloat16", **settings)
    built = build(config)
    asked = requests(built.tokenizer.size, 64, seed=3)
    serve(built.engine, asked)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        assert all(serve(built.engine, asked))
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert built.engine.graph_bytes >= 0 and built.engine.stats().replayed_steps > 0
    built.engine.close()


@pytest.mark.gpu
def test_pages_fill_the_remaining_memory_on_cuda() -> None:
    built = build(EngineConfig(device="cuda", gpu_memory_utilization=0.5, max_num_seqs=4))
    free, total = torch.cuda.mem_get_info()
    assert 0.35 * total < total - free < 0.52 * total
    built.engine.close()


@pytest.mark.gpu
def test_dense_weights_that_do_not_fit_are_an_error_on_cuda() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # what other tests left would be enough
    _, total = torch.cuda.mem_get_info()
    # This process may have no more; others, such as tests that run at the same time, keep theirs.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        with pytest.raises(ConfigError, match="dense weights") as caught:
            build(EngineConfig(model="synthetic:qwen3-30b-a3b:q4_k_m:2", device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert caught.value.param == "engine.device"
