"""Tiny random models of every class that the decoders compute, and sequences fed to them in chunks of all kinds."""

from functools import partial
from typing import Any

import torch
import transformers
from laguna_sizes import LAGUNA_SIZES
from latent_families import GROWING, LATENT_FAMILIES, YARN
from llama4_sizes import LLAMA4_SIZES
from mimo_sizes import MIMO_SIZES
from step_sizes import STEP_SIZES
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ktqueue.loading.huggingface.causal_models import CAUSAL_MODELS
from ktqueue.operators.decoder_facts import DecoderFacts, facts_of
from ktqueue.operators.gpu.attention.backends import make_planner
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.kv_cache import KVCache, KVHeads, KVLayout
from ktqueue.operators.rotary import original_length
from ktqueue.operators.step import StepContext

VOCAB = 96
PAGE = 4
LENGTHS = (5, 23, 40)
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_group": 2, "topk_group": 1}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA = {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24, "pad_token_id": 0}
GLOBAL = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
KINDS = ["full_attention", "sliding_attention", "full_attention"]
GEMMA4 = {**GEMMA, **GLOBAL, "layer_types": KINDS, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0}
GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 6.0}
SIGMOID = {
    **MOE,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
LINEAR = {
    **MOE,
    "head_dim": 32,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LONGROPE = {**YARN, **FACTORS, "rope_type": "longrope"}
PLAIN = {"rope_type": "default", "rope_theta": 1e3}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {**MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe with dense layers": ("qwen3_moe", {**MOE, "head_dim": 16, "mlp_only_layers": [1]}),
    "qwen3_moe with a window": ("qwen3_moe", {**MOE, "head_dim": 16, "use_sliding_window": True, "sliding_window": 7}),
    "qwen3_moe with yarn": ("qwen3_moe", {**MOE, "head_dim": 16, "rope_parameters": YARN}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 96}),
    "qwen2_moe with dense layers": (
        "qwen2_moe",
        {**MOE, "shared_expert_intermediate_size": 96, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "qwen2_moe with windows": (
        "qwen2_moe",
        {**MOE, **WINDOWS, "shared_expert_intermediate_size": 48, "use_sliding_window": True, "sliding_window": 6},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.5}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": 10, "head_dim": 24}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": {**GROWING}}),
    "ministral": ("ministral", {"head_dim": 16, **WINDOWS}),
    "cwm": ("cwm", {"head_dim": 16, **WINDOWS, "rope_parameters": {**LLAMA3}}),
    "smollm3": ("smollm3", {**WINDOWS, "use_sliding_window": True, "no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "gemma": ("gemma", {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}),
    "mellum": (
        "mellum",
        {
            **MOE,
            **WINDOWS,
            "head_dim": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "norm_topk_prob": True,
            "rope_parameters": {"sliding_attention": {**PLAIN}, "full_attention": {**YARN}},
        },
    ),
    "granite_swa": ("granite_swa", {**SCALES, **WINDOWS}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "glm4_moe": (
        "glm4_moe",
        {**SIGMOID, "head_dim": 32, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "glm4_moe without norms": ("glm4_moe", {**SIGMOID, "head_dim": 16, "n_group": 1, "topk_group": 1}),
    "minimax_m2": ("minimax_m2", {**MOE, "num_local_experts": 6, "head_dim": 32, "partial_rotary_factor": 0.5}),
    "bailing_moe_v2": ("bailing_moe_v2", {**SIGMOID, "head_dim": 32}),
    "mimo_v2_flash": ("mimo_v2_flash", MIMO_SIZES),
    "step3p5": ("step3p5", STEP_SIZES),
    "laguna": ("laguna", LAGUNA_SIZES),
    "laguna with a gate for each number": (
        "laguna",
        {**LAGUNA_SIZES, "gating": "per-element", "layer_types": None, "num_attention_heads_per_layer": None},
    ),
    "dots1": ("dots1", {**SIGMOID, "head_dim": 16, "sliding_window": 8, "max_window_layers": 1}),
    "gpt_oss": ("gpt_oss", {**MOE, "num_local_experts": 6, "head_dim": 16, "sliding_window": 8}),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {
            "num_experts": 6,
            "moe_topk": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 9.0, "factor": 1.0},
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "head_dim": 16,
            "use_bias": True,
        },
    ),
    "granitemoe": ("granitemoe", {**SCALES, "num_local_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-3}),
    "granite": ("granite", SCALES),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.3,
        },
    ),
    "phi3": ("phi3", {"rope_parameters": PARTIAL, "sliding_window": 9, "pad_token_id": 0}),
    "phi3 with longrope": ("phi3", {"rope_parameters": LONGROPE, "pad_token_id": 0}),
    "afmoe": (
        "afmoe",
        {**MOE, "head_dim": 16, "num_shared_experts": 1, "route_scale": 1.5, "mup_enabled": True, **WINDOWS},
    ),
    "gemma3": ("gemma3_text", {**GEMMA, "rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma4 with experts": ("gemma4_text", {**GEMMA4, **GEMMA4_MOE}),
    "gemma4_unified": ("gemma4_unified_text", {**GEMMA4, "attention_k_eq_v": False}),
    "exaone_moe": (
        "exaone_moe",
        {**MOE, **WINDOWS, **GROUPS, "head_dim": 16, "num_shared_experts": 1, "routed_scaling_factor": 1.5},
    ),
    "hy_v3": ("hy_v3", {**MOE, "head_dim": 16, "router_scaling_factor": 1.7, "pad_token_id": 0}),
    "solar_open": ("solar_open", {**SIGMOID, "head_dim": 16, "pad_token_id": 0}),
    "qwen3_next": ("qwen3_next", LINEAR),
    "qwen3_next with dense layers": (
        "qwen3_next",
        {
            **LINEAR,
            "mlp_only_layers": [1],
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 24,
            "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", LINEAR),
    "qwen3_5": ("qwen3_5_text", LINEAR),
    "qwen3 with longrope": ("qwen3", {"head_dim": 16, "rope_parameters": LONGROPE}),
    "phimoe with longrope": ("phimoe", {"num_local_experts": 4, "rope_parameters": {**LONGROPE, **MSCALES}}),
    "llama4": ("llama4_text", {**LLAMA4_SIZES, "moe_layers": [0, 1]}),
    "llama4 without norms": ("llama4_text", {**LLAMA4_SIZES, "num_experts_per_tok": 2, "use_qk_norm": False}),
    "qwen3 with dynamic": ("qwen3", {"head_dim": 16, "rope_parameters": {**YARN, "rope_type": "dynamic"}}),
    "qwen3 with GELU": ("qwen3", {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}),
}


def make_model(family: str, **changes: Any) -> Any:
    """Make a random float32 model of transformers with its own attention."""
    kind, values = {**FAMILIES, **LATENT_FAMILIES}[family]
    return random_model(kind, {**COMMON, **values, **changes})


def random_model(kind: str, sizes: dict[str, Any], device: str = "cpu") -> Any:
    """Make a random float32 model of a transformers model type on `device`. Norms, biases and sinks are not trivial."""
    assert kind in CAUSAL_MODELS
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    torch.manual_seed(3)
    factory: Any = transformers.AutoModelForCausalLM
    with torch.device(device):
        model = factory.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "bias", "sinks", "A_log", "scale")):
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.uniform_(-0.2, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model


def make_planner_for(layout: KVLayout, facts: DecoderFacts, device: str) -> AttentionPlanner:
    """Make the planner that a worker would make."""
    layers = [layer for layer in facts.layers if layer.linear is None]
    scores: Any = {"windows": [layer.sliding_window for layer in layers], "cap": facts.score_cap}
    scores |= {"sinks": [layer.sinks for layer in layers], "layer_heads": [layer.heads for layer in layers]}
    scores["chunk"] = max(layer.chunk for layer in facts.layers)
    return make_planner(layout, heads=facts.heads, scaling=facts.scaling, device=device, dtype=facts.dtype, **scores)


class Cache:
    """Sequences that are fed in any chunks. planner: makes the planner of a GPU; None: attention on the CPU. others:
    fields of the layout that differ from the decoder's."""

    def __init__(
        self, decoder: Any, pages: int = 64, *, device: str = "cpu", planner: Any = None, **others: Any
    ) -> None:
        facts = facts_of(decoder) if isinstance(decoder, PreTrainedModel) else decoder.facts
        linear = tuple(layer.linear for layer in facts.layers if layer.linear is not None)
        heads = tuple(KVHeads(layer.kv_heads, layer.head_dim) for layer in facts.layers if layer.linear is None)
        layout = KVLayout(
            layers=len(facts.layers) - len(linear),
            linear=linear,
            kv_heads=heads[0].kv_heads,
            head_dim=heads[0].head_dim,
            by_layer=heads if len({*heads}) > 1 else (),
            page_size=PAGE,
            latent=facts.latent.latent if facts.latent else None,
            index=facts.latent.indexer.key if facts.latent and facts.latent.indexer else 0,
            original_length=0 if isinstance(decoder, PreTrainedModel) else original_length(decoder.rotary.config),
            **{"dtype": facts.dtype, **others},
        )
        self.kv = KVCache(layout, pages, device, slots=2 * len(SEQUENCES) if linear else 0)
        self._slots: dict[str, tuple[int, int]] = {}  # a sequence's state moves to its other slot in each step
        self.pages: dict[str, list[int]] = {}
        self.fed: dict[str, int] = {}
        self._decoder = decoder
        self._device = device
        self.planner: Any = planner(layout, facts, device) if planner else None
        self._free = list(range(pages))[::-1]

    def step(
        self, chunks: dict[str, list[int]], scored: list[int] | None = None, live_tokens: int | None = None
    ) -> torch.Tensor:
        """Feed each sequence its next tokens. Returns logits [scored, vocab] of the scored tokens, by default all.

        live_tokens: number of real tokens, which come first; None: all.
        """
        starts = [0]
        contexts: list[int] = []
        slots: list[int] = []
        ids: list[int] = []
        positions: list[int] = []
        for name, chunk in chunks.items():
            pages, before = self.pages.setdefault(name, []), self.fed.get(name, 0)
            after = self.fed[name] = before + len(chunk)
            while len(pages) * PAGE < after:
                pages.append(self._free.pop())
            ids += chunk
            offset = self.kv.layout.original_length
            offset *= len(SEQUENCES.get(name, ())) > offset
            positions += range(before + offset, after + offset)
            slots += [pages[position // PAGE] * PAGE + position % PAGE for position in range(before, after)]
            starts.append(len(ids))
            contexts.append(after)
        table = torch.zeros(len(chunks), max(len(self.pages[name]) for name in chunks), dtype=torch.int32)
        sources, targets = [], []
        for name in chunks if self.kv.layout.linear else ():
            source, target = self._slots.setdefault(name, (2 * len(self._slots), 2 * len(self._slots) + 1))
            self._slots[name] = target, source
            sources.append(source)
            targets.append(target)
        for row, name in enumerate(chunks):
            table[row, : len(self.pages[name])] = torch.tensor(self.pages[name])
        step = StepContext(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
            table,
            torch.tensor(slots),
            self.kv,
            state_sources=torch.tensor(sources, dtype=torch.int32),
            state_targets=torch.tensor(targets, dtype=torch.int32),
        )
        inputs = {
            "input_ids": torch.tensor([ids]),
            "position_ids": torch.tensor([positions]),
            "logits_to_keep": torch.tensor(range(len(ids)) if scored is None else scored, dtype=torch.int64),
        }
        if self.planner is not None:
            step = self._planned(step, live_tokens)
            inputs = {name: tensor.to(self._device) for name, tensor in inputs.items()}
        logits: torch.Tensor = self._decoder(**inputs, use_cache=False, step=step).logits[0].float().cpu()
        return logits

    def end(self, name: str) -> None:
        """Forget a sequence and free its pages."""
        del self.fed[name]
        self._free += self.pages.pop(name)

    def _planned(self, host: StepContext, live_tokens: int | None) -> StepContext:
        live = None if live_tokens is None else torch.tensor([live_tokens], dtype=torch.int32, device=self._device)
        plan = self.planner.plan(host)
        return StepContext(
            host.query_starts.to(self._device),
            host.context_lengths.to(self._device),
            host.page_table.to(self._device),
            host.slot_mapping.to(self._device),
            self.kv,
            plan,
            live,
            host.state_sources.to(self._device),
            host.state_targets.to(self._device),
        )


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


SEQUENCES = {f"s{i}": tokens(length, i) for i, length in enumerate(LENGTHS)}
STEPS = [  # chunks of a prompt beside decode rows
    {"s0": (0, 4), "s2": (0, 11)},
    {"s2": (11, 12), "s1": (0, 22), "s0": (4, 5)},
    {"s1": (22, 23), "s2": (12, 39)},
    {"s2": (39, 40)},
]


def feed(decoder: Any, steps: list[dict[str, tuple[int, int]]] = STEPS, **options: Any) -> dict[str, torch.Tensor]:
    """Feed the sequences step by step. Returns logits [tokens, vocab] of each. options: of Cache."""
    cache = Cache(decoder, **options)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in SEQUENCES}
    for step in steps:
        logits = cache.step({name: SEQUENCES[name][first:last] for name, (first, last) in step.items()})
        sizes = [last - first for first, last in step.values()]
        for name, part in zip(step, torch.split(logits, sizes), strict=True):
            found[name].append(part)
    return {name: torch.cat(parts) for name, parts in found.items() if parts}


def answers(model: Any) -> dict[str, torch.Tensor]:
    """Return the logits [tokens, vocab] that the model of transformers gives for each sequence, float32 on the CPU."""
    found: dict[str, torch.Tensor] = {}
    parts: Any = {name.rpartition(".")[2]: module for name, module in model.named_modules()}
    rotary = parts["rotary_emb"]
    for name, ids in SEQUENCES.items():
        if hasattr(rotary, "rope_init_fn") and rotary.rope_type != "default":  # see tests/contract/test_transformers.py
            rotary.rope_init_fn = partial(ROPE_INIT_FUNCTIONS[rotary.rope_type], seq_len=len(ids))
        with torch.no_grad():
            found[name] = model(torch.tensor([ids], device=model.device)).logits[0].float().cpu()
    return found


def tolerance(family: str) -> float:
    """Return how far logits may be apart, relative to the largest.

    With linear attention float32 itself is less exact: against float64, transformers differs by 5e-5 and CpuDecoder by
    4e-5 in the worst of these sequences.
    """
    kind, _ = {**FAMILIES, **LATENT_FAMILIES}[family]
    return 2e-4 if kind.startswith(("qwen3_next", "qwen3_5")) else 1e-5


def token_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative error of the logits of the median token.

    It says how exact the arithmetic is. A mean would say how many routers chose another expert because two scores
    nearly tie: in half precision a few tokens of a small random model always do, ours and transformers' not the same.
    """
    errors = [(found[name] - logits).norm(dim=1) / logits.norm(dim=1) for name, logits in expected.items()]
    return float(torch.cat(errors).median())
