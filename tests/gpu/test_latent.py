"""Latent attention on a GPU: the kernel attends as the reference does, eager and captured; a DeepSeek model says what
the CPU's engine says."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engine import on_device
from endless_vocabulary import NoEnd
from latent_sizes import LATENT_SIZES
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.loading.load import load_model
from ktqueue.operators import native, reference
from ktqueue.operators.gpu.attention.backends import make_planner
from ktqueue.operators.gpu.attention.expanded import Expansion
from ktqueue.operators.gpu.attention.latent import LatentPlan, expansion_of
from ktqueue.operators.gpu.attention.latent_inputs import latent_query_append
from ktqueue.operators.kv_cache import CacheScale, KVCache, KVLayout, store
from ktqueue.operators.latent_shape import (
    LatentShape,
    absorb_query,
    absorb_rotated,
    expand_values,
    make_key,
    rotate_query,
)
from ktqueue.operators.step import ScoreOptions, StepContext

from .test_attention import BOUNDS, STEPS, make_step, no_waiting
from .test_engine import DEVICES, NEW_TOKENS, RULES, requests, serve, settings_for

GPU = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # that sync_debug_mode is new
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
LATENT, ROTARY = 512, 64
SCALING = 192**-0.5


def random_cache(dtype: torch.dtype, pages: int) -> KVCache:
    torch.manual_seed(0)
    scales = (CacheScale(0.5, 0.5),) if dtype.itemsize == 1 else ()
    sizes: Any = {"kv_heads": 1, "head_dim": LATENT + ROTARY, "page_size": 16, "latent": LATENT}
    layout = KVLayout(layers=1, **sizes, dtype=dtype, scales=scales)
    kv = KVCache(layout, pages, "cuda")
    kv.keys[0].copy_(torch.randn(kv.keys[0].shape, device="cuda").to(dtype))
    return kv


def same(got: torch.Tensor, step: StepContext, query: torch.Tensor) -> None:
    """`got` is what the reference attends over layer 0, in float32 on the CPU."""
    twin = reference.paged_attention(
        query.cpu().float().transpose(0, 1),
        step.kv.keys[0].cpu().float() * step.kv.layout.scale(0).key,
        step.kv.values[0].cpu().float() * step.kv.layout.scale(0).value,
        step.query_starts,
        step.context_lengths,
        step.page_table,
        scaling=SCALING,
    )
    assert got.dtype == query.dtype and got.shape == twin.shape
    torch.testing.assert_close(got.cpu().float(), twin, rtol=BOUNDS[query.dtype], atol=BOUNDS[query.dtype])


TYPES = pytest.mark.parametrize(
    ("heads", "dtype", "cache"),
    [
        (16, torch.bfloat16, torch.bfloat16),
        (16, torch.bfloat16, torch.float8_e4m3fn),
        (16, torch.float32, torch.float32),
        (128, torch.float16, torch.float16),
    ],
)
"""Of queries and cache."""


@pytest.mark.parametrize("kind", STEPS)
@TYPES
class TestKernel:
    pytestmark = GPU

    def test_eager_steps(self, heads: int, dtype: torch.dtype, cache: torch.dtype, kind: str) -> None:
        kv = random_cache(cache, 400)
        step = make_step(kv, *STEPS[kind])
        plans = make_planner(kv.layout, heads=heads, scaling=SCALING, windows={0}, device="cuda", dtype=dtype)
        query = torch.randn(len(step.slot_mapping), heads, LATENT + ROTARY, device="cuda").to(dtype)
        with no_waiting():
            got = plans.plan(step).attend(0, query, kv, ScoreOptions(SCALING))
        same(got, step, query)

    def test_expanded_rows(self, heads: int, dtype: torch.dtype, cache: torch.dtype, kind: str) -> None:
        """Long rows attend over expanded latents as all rows do over the latents themselves."""
        kv = random_cache(cache, 400)
        step = make_step(kv, *STEPS[kind])
        plan = make_planner(kv.layout, heads=heads, scaling=SCALING, windows={0}, device="cuda", dtype=dtype).plan(step)
        expansion = expansion_of(plan)
        if kind == "decode":
            assert expansion is None
            return
        assert isinstance(expansion, Expansion)
        up = (torch.randn(heads, 256, LATENT, device="cuda") / LATENT**0.5).to(dtype)
        query = torch.randn(len(step.slot_mapping), heads, 128 + ROTARY, device="cuda").to(dtype)
        out = torch.full((len(query), heads, 128), float("nan"), dtype=dtype, device="cuda")
        with no_waiting():
            expansion.attend(0, query, up, out, kv, SCALING)
        absorbed = absorb_rotated(query.float(), up[:, :128].float()).to(dtype)
        attended = plan.attend(0, absorbed, kv, ScoreOptions(SCALING)).float()
        expected = torch.einsum("qhl,hvl->qhv", attended, up[:, 128:].float())
        short = [] if expansion.others is None else expansion.others.tolist()
        assert out[short].isnan().all()
        long = [token for token in range(len(query)) if token not in short]
        error = (out[long].float() - expected[long]).norm() / expected[long].norm()
        assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("rows", [1, 8, 64])
class TestGraph:
    pytestmark = GPU

    def test_a_graph_follows_updates(self, rows: int) -> None:
        kv = random_cache(torch.bfloat16, 64 * 40 + 600)
        plans = make_planner(kv.layout, heads=16, scaling=SCALING, windows={0}, device="cuda")
        query = torch.randn(rows, 16, LATENT + ROTARY, device="cuda").to(torch.bfloat16)
        decode = plans.decode_plan(rows, 600)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = decode.attend(0, query, kv, ScoreOptions(SCALING))
        for longest in (1, 300, 9000, 40):
            contexts = [1 + (37 * row) % min(longest, 600) for row in range(rows - 1)] + [longest]
            step = make_step(kv, [1] * rows, contexts)
            with no_waiting():
                decode.update(step)
                graph.replay()
            same(got, step, query)


@TYPES
class TestPromptGraph:
    pytestmark = GPU

    def test_a_prompt_graph_follows_updates(self, heads: int, dtype: torch.dtype, cache: torch.dtype) -> None:
        """One capture without tokens, replays for chunks and decode rows of any lengths. With 128 heads, these take
        turns."""
        kv = random_cache(cache, 1300)
        plans = make_planner(kv.layout, heads=heads, scaling=SCALING, windows={0}, device="cuda", dtype=dtype)
        up = (torch.randn(heads, 256, LATENT, device="cuda") / LATENT**0.5).to(dtype)
        query = torch.randn(1024, heads, 128 + ROTARY, device="cuda").to(dtype)
        plan, options = plans.prompt_plan(16, 1024, 1024), ScoreOptions(SCALING)
        expansion = expansion_of(plan)
        assert expansion is not None
        graph = torch.cuda.CUDAGraph()
        for captured in (nullcontext(), torch.cuda.graph(graph)):  # the first compiles
            with captured:
                got = expansion.values(0, query, up, kv, options)
        absorbed = absorb_rotated(query.float(), up[:, :128].float()).to(dtype)
        others = ([1] * 16, [*range(1, 17)]), ([64, 300], [16000, 301]), ([2] * 15 + [994], [900] * 15 + [1000])
        for chunks, contexts in (([1024], [1024]), *(STEPS[name] for name in ("continued", "mixed")), *others):
            step, live = make_step(kv, chunks, contexts), sum(chunks)
            assert plan.holds(step)
            with no_waiting():
                plan.update(step)
                graph.replay()
            attended = plans.plan(step).attend(0, absorbed[:live], kv, options).float()
            expected = torch.einsum("qhl,hvl->qhv", attended, up[:, 128:].float()).flatten(1)
            errors = (got[:live].float() - expected).norm(dim=1) / expected.norm(dim=1)
            assert errors.max() < {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
            assert not got[live:].any()


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 300])
@pytest.mark.parametrize(
    ("heads", "dtype", "cache"),
    [
        (16, torch.bfloat16, torch.bfloat16),
        (128, torch.bfloat16, torch.float8_e4m3fn),
        (16, torch.float32, torch.float32),
    ],
)
class TestFewerLaunches:
    pytestmark = GPU

    @pytest.mark.parametrize("absorbs", [True, False])
    def test_queries_and_keys(
        self, heads: int, dtype: torch.dtype, cache: torch.dtype, tokens: int, absorbs: bool
    ) -> None:
        """Two thirds of the tokens are at other positions than their places."""
        torch.manual_seed(0)
        shape = LatentShape(heads, 128, ROTARY, 128, LATENT, SCALING, interleaved=True, low_rank=0, epsilon=1e-6)
        down = torch.randn(tokens, heads * 192 + shape.key, device="cuda").to(dtype)
        up = (torch.randn(heads, 256, LATENT, device="cuda") / 128**0.5).to(dtype)[:, :128]
        norm, angles = torch.randn(LATENT, device="cuda").to(dtype), torch.rand(400, ROTARY // 2, device="cuda") * 6
        positions = torch.arange(tokens, device="cuda") * 3 % 400
        cosine, sine, kv = angles.cos(), angles.sin(), random_cache(cache, 40)
        slots = torch.randperm(640, device="cuda")[:tokens]
        expected = kv.keys[0].clone()
        angles_of = cosine[positions], sine[positions]
        key, scale = make_key(down[:, -shape.key :], norm, *angles_of, shape), kv.layout.scale(0).key
        store(expected.flatten(0, 1), slots, key[:, None], scale)
        with no_waiting():
            got = latent_query_append(
                down[:, : -shape.key],
                down[:, -shape.key :],
                shape,
                norm=norm,
                key_up=up if absorbs else None,
                cosine=cosine,
                sine=sine,
                positions=positions,
                slot_mapping=slots,
                cache=kv.keys[0],
                scale=scale,
            )
        query = down[:, : -shape.key].float()
        twin = absorb_query(query, up.float(), *angles_of, shape) if absorbs else rotate_query(query, *angles_of, shape)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), twin, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
        step, least = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 1e-5)}.get(cache, (2**-3, 2**-9))
        torch.testing.assert_close(kv.keys[0].float(), expected.float(), rtol=step, atol=least)

    def test_values(self, heads: int, dtype: torch.dtype, cache: torch.dtype, tokens: int) -> None:
        """As attention and the product after it, captured and replayed for longer contexts."""
        kv = random_cache(cache, 64 * 40 + 900)
        plans = make_planner(kv.layout, heads=heads, scaling=SCALING, windows={0}, device="cuda", dtype=dtype)
        query = torch.randn(tokens, heads, LATENT + ROTARY, device="cuda").to(dtype)
        up = (torch.randn(heads, 256, LATENT, device="cuda") / LATENT**0.5).to(dtype)[:, 128:].transpose(1, 2)
        decode = plans.decode_plan(tokens, 600)
        assert isinstance(decode, LatentPlan)
        decode.values(0, query, up, kv, ScoreOptions(SCALING))  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = decode.values(0, query, up, kv, ScoreOptions(SCALING))
        for longest in (1, 300, 9000):
            contexts = [1 + (37 * row) % min(longest, 100) for row in range(tokens - 1)] + [longest]
            decode.update(make_step(kv, [1] * tokens, contexts))
            graph.replay()
            expected = expand_values(decode.attend(0, query, kv, ScoreOptions(SCALING)).float(), up.float())
            torch.testing.assert_close(got.float(), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random DeepSeek-V3: low-rank queries, sigmoid scores in groups, a shared expert, a dense first layer."""
    config = DeepseekV3Config(
        **LATENT_SIZES | {"q_lora_rank": 48, "qk_rope_head_dim": 16},
        vocab_size=512,
        num_hidden_layers=3,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("latent")
    make: Any = DeepseekV3ForCausalLM
    make(config).float().save_pretrained(made)
    return str(made)


@pytest.mark.parametrize(("kind", "memory"), [("GpuDecoder", 0), ("GpuDecoder", 1 << 30), ("LatentAttention", 0)])
@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_says_what_the_cpus_says(device: str, kind: str, memory: int, folder: str, tmp_path: Path) -> None:
    """As one operator with captured steps, and as transformers' modules. memory: of the GPU, for experts."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if torch.cuda.is_available():
        native.set_threads()
    host = load_model(folder, rules=str(RULES / "exact.yaml"))
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    asked = [(prompt, sampling) for prompt, _ in requests(512, 12)]
    config = settings_for("cpu")
    expected = serve(Engine(host.module, NoEnd(512), host.kv_layout(16), config, 200, 512), asked)
    assert len({tuple(one) for one in expected}) == 12
    rules = RULES / "modules.yaml"
    if kind == "GpuDecoder":
        rules = tmp_path / "rules.yaml"
        rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n")
    model = load_model(folder, rules=str(rules), device=device)
    assert kind in {type(module).__name__ for module in model.module.modules()}
    engine = on_device(model, settings_for(device, gpu_expert_memory_bytes=memory))
    assert serve(engine, asked) == expected
    stats = engine.stats()
    assert (stats.replayed_steps == stats.steps) == (memory > 0), "without the CPU's experts, prompts are captured too"
