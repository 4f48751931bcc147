"""Tiny random models of each family, saved as transformers saves them, each with a tokenizer."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import decoder_families
import latent_families
import pytest
import torch
import transformers
from example_package import install_example
from laguna_sizes import LAGUNA_SIZES
from step_sizes import STEP_SIZES
from tiny_tokenizer import write_tokenizer

from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.checkpoint import _file_tensors, read_parts
from ktqueue.loading.load import LoadedModel
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext

VOCAB = 384
COMMON = {
    **decoder_families.COMMON, "vocab_size": VOCAB, "num_hidden_layers": 2, "eos_token_id": 382,
    "initializer_range": 0.2,
}  # fmt: skip
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIGMOID = {key: value for key, value in decoder_families.SIGMOID.items() if key != "num_experts"}
LATENT = {**latent_families.LATENT, "num_experts_per_tok": 2, "n_shared_experts": 2}
LOW_RANK = {**LATENT, "n_shared_experts": 1, "q_lora_rank": 48}
GROUPED, ONE_GROUP = {"n_group": 4, "topk_group": 2}, {"n_group": 1, "topk_group": 1}
GROWING = {**latent_families.GROWING, "original_max_position_embeddings": 8.0}  # as some tools write it
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 9.0, "factor": 1.0}
SCALES = {**decoder_families.SCALES, "logits_scaling": 0.5}
MIXED = ["full_attention", "sliding_attention"]
WINDOWS = {"sliding_window": 7, "layer_types": MIXED}
DECODER = {"num_key_value_heads": 4, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**ROUTED, "head_dim": 32, "norm_topk_prob": True},
    "qwen2_moe": {**ROUTED, "shared_expert_intermediate_size": 96},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {**ROUTED, "intermediate_size": 32},
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LOW_RANK, **GROUPED},
    "glm4_moe_lite": {**LOW_RANK, **ONE_GROUP},
    "deepseek_v32": {**LOW_RANK, **latent_families.INDEXER, **GROUPED},
    "glm_moe_dsa": {**LOW_RANK, **latent_families.INDEXER, **ONE_GROUP, "indexer_types": ["full", "shared"]},
    "axk1": {**LOW_RANK, **GROUPED},
    "mistral4": {**LOW_RANK, "rope_parameters": GROWING},
    "ministral3": {"head_dim": 16, "rope_parameters": {**GROWING, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "afmoe": {
        **ROUTED, "num_hidden_layers": 4, "head_dim": 16, "num_shared_experts": 1, "route_scale": 1.5,
        "mup_enabled": True, "sliding_window": 7,
    },
    "solar_open": {**SIGMOID, "head_dim": 16, "pad_token_id": 0},
    "glm4_moe": {**SIGMOID, "head_dim": 32, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    "bailing_moe_v2": {**SIGMOID, "head_dim": 32},
    "step3p5": {
        **STEP_SIZES, **WINDOWS, "mlp_layer_types": ["dense", "sparse"], "rope_theta": [1e4, 1e3],
        "partial_rotary_factors": [0.5, 1.0], "swiglu_limits": [0.0, 0.3], "swiglu_limits_shared": [0.4, 0.5],
    },
    "laguna": {
        **LAGUNA_SIZES, **WINDOWS, "num_attention_heads_per_layer": [4, 6], "mlp_layer_types": ["dense", "sparse"]
    },
    "mimo_v2_flash": {
        **ROUTED, **WINDOWS, "n_routed_experts": 8, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 16,
    },
    "dots1": {**SIGMOID, "head_dim": 16, "sliding_window": None},
    "qwen3_next": {
        **decoder_families.LINEAR, **ROUTED, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "minimax_m2": {
        **ROUTED, "num_local_experts": 8, "intermediate_size": 32, "head_dim": 32, "partial_rotary_factor": 0.5,
        "bos_token_id": None,
    },
    "gpt_oss": {**ROUTED, "num_local_experts": 8, "intermediate_size": 32, "head_dim": 16, "sliding_window": 7},
    "llama4_text": {  # as GGUF files imply
        "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size": 32, "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2, "head_dim": 16, "num_hidden_layers": 4,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 64,
        },
    },
    "qwen3": {"head_dim": 32},
    "qwen2": {},
    "granite": SCALES,
    "ernie4_5": {"head_dim": 32},
    "seed_oss": {"head_dim": 32, "attention_bias": True},
    "hunyuan_v1_dense": {"head_dim": 16, "rope_parameters": DYNAMIC},
    "llama": {},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7},
    "gemma3_text": {
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7, "num_hidden_layers": 6,
        "initializer_range": 0.15, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4_text": {
        **decoder_families.GLOBAL, "head_dim": 16, "sliding_window": 7, "layer_types": MIXED[::-1],
        "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "final_logit_softcapping": 30.0,
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
    "gemma": {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
    "biogpt": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "doge": {},
    "diffllama": {},
    "xglm": {"ffn_dim": 96},
    "bart": DECODER,
    "whisper": {
        **DECODER, "max_target_positions": 256, "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1
    },
    "mbart": DECODER,
    "exaone4": WINDOWS,
    "ministral": {**WINDOWS, "head_dim": 16},
    "smollm3": {**WINDOWS, "pad_token_id": 0},
    "gemma3n_text": {
        "head_dim": 16, "sliding_window": 7, "layer_types": [*MIXED, *MIXED], "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 384, "hidden_size_per_layer_input": 16,
        "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4,
    },
    "granitemoehybrid": {"layer_types": ["attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 96},
    "hunyuan_v1_moe": {
        "num_experts": 8, "moe_topk": 2, "intermediate_size": 32, "head_dim": 16, "rope_parameters": DYNAMIC
    },
    "granitemoe": {**SCALES, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    "exaone_moe": {
        **ROUTED, **ONE_GROUP, **WINDOWS, "mlp_layer_types": ["dense", "sparse"], "num_shared_experts": 1
    },
    "hy_v3": {
        **ROUTED, "num_shared_experts": 1, "head_dim": 16, "mlp_layer_types": ["sparse", "dense"], "pad_token_id": 0
    },
    "gpt_neox": {"num_key_value_heads": 4},
    "apertus": {},
    "phi3": {"pad_token_id": 0, "original_max_position_embeddings": 16},
    "stablelm": {},
    "bert": {"is_decoder": True},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt2": {},
    "openai-gpt": {},
}  # fmt: skip


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_model(model_type, **config) -> folder with a random float32 model; equal calls give the same model."""
    made: dict[str, Path] = {}

    def make(model_type: str = "qwen3_moe", *, shard: str | None = None, **changes: Any) -> Path:
        key = f"{model_type} {shard} {sorted(changes.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(model_type)
            model = decoder_families.random_model(model_type, {**COMMON, **FAMILIES[model_type], **changes})
            model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
            write_tokenizer(folder, VOCAB)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture
def changed(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """changed(model_type, **config) -> a folder with the weights of make_model and another config."""

    def change(model_type: str, **changes: Any) -> Path:
        folder = make_model(model_type)
        config = json.loads((folder / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        return tmp_path

    return change


@pytest.fixture(scope="session")
def tiny(make_model: Callable[..., Path]) -> Path:
    """A Hugging Face folder with a random Qwen3-MoE."""
    return make_model()


@pytest.fixture(scope="session")
def make_gguf(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_gguf(experts, dense, **as make_model) -> a converted file."""

    def make(experts: str = "f32", dense: str = "f32", **kwargs: Any) -> Path:
        target = tmp_path_factory.mktemp("gguf") / f"{experts}-{dense}.gguf"
        convert(make_model(**kwargs), target, experts=experts, dense=dense)
        return target

    return make


@pytest.fixture(scope="session")
def make_source(make_model: Callable[..., Path], make_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """make_source(kind, model_type, **config) -> the folder of make_model, or the same model as float32 GGUF."""

    def make(kind: Literal["folder", "gguf"], model_type: str, **changes: Any) -> Path:
        return make_model(model_type, **changes) if kind == "folder" else make_gguf(model_type=model_type, **changes)

    return make


@pytest.fixture(scope="session")
def tiny_gguf(make_gguf: Callable[..., Path]) -> Path:
    """The model of `tiny` as a float32 GGUF file."""
    return make_gguf()


@pytest.fixture
def parts_of(make_gguf: Callable[..., Path]) -> Callable[..., tuple[dict[str, Any], dict[str, CheckpointTensor]]]:
    """parts_of(model_type, **as make_gguf) -> metadata and tensors of a converted file, to be changed."""

    def read(model_type: str, **changes: Any) -> tuple[dict[str, Any], dict[str, CheckpointTensor]]:
        path = make_gguf(model_type=model_type, **changes)
        parts = read_parts(path)
        return dict(parts[0].metadata), _file_tensors(path, parts)

    return read


@pytest.fixture
def rule_file(tmp_path: Path) -> Callable[[str], str]:
    """rule_file(text) -> its path."""

    def write(text: str) -> str:
        path = tmp_path / f"{abs(hash(text))}.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The installed example package, on the path of this process."""
    packages = install_example(tmp_path_factory.mktemp("example"))
    sys.path.insert(0, str(packages))
    yield packages
    sys.path.remove(str(packages))


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[Path, list[int]], torch.Tensor]:
    """(folder, ids) -> [tokens, vocab] logits of the model as transformers loads and runs it."""

    def run(folder: Path, ids: list[int]) -> torch.Tensor:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([ids]), output_router_logits=False).logits[0]
        return logits

    return run


@pytest.fixture(scope="session")
def run_logits() -> Callable[..., torch.Tensor]:
    """(module, layout, ids, chunk) -> [tokens, vocab] logits of one row that is prefilled by `chunk` tokens, by default
    at once."""

    def run(module: Callable[..., Any], layout: KVLayout, ids: list[int], chunk: int | None = None) -> torch.Tensor:
        pages = -(-len(ids) // layout.page_size)
        slot = torch.zeros(1 if layout.linear else 0, dtype=torch.int32)
        cache = KVCache(layout, pages, slots=len(slot))
        found = []
        for positions in torch.split(torch.arange(len(ids)), chunk or len(ids)):
            step = StepContext(
                torch.tensor([0, len(positions)], dtype=torch.int32),
                positions[-1:].to(torch.int32) + 1,
                torch.arange(pages, dtype=torch.int32)[None],
                positions,
                cache,
                state_sources=slot,
                state_targets=slot,
            )
            with torch.inference_mode():
                logits: torch.Tensor = module(
                    input_ids=torch.tensor([[ids[position] for position in positions]]),
                    position_ids=positions[None],
                    use_cache=False,
                    logits_to_keep=torch.arange(len(positions)),
                    step=step,
                ).logits[0]
            found.append(logits)
        return torch.cat(found)

    return run


@pytest.fixture(scope="session")
def assert_equals_transformers(
    reference_logits: Callable[..., torch.Tensor], run_logits: Callable[..., torch.Tensor]
) -> Callable[..., None]:
    """(model, folder, ids): the loaded model's logits are those of transformers with the model of `folder`."""

    def check(model: LoadedModel, folder: Path, ids: Sequence[int] = range(3, 43)) -> None:
        expected = reference_logits(folder, [*ids])
        assert expected.std() > 0.5  # otherwise equality would prove little
        found = run_logits(model.module, model.kv_layout(16), [*ids])
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)

    return check
