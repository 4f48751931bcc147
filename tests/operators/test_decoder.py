"""CpuDecoder compared with the transformers model that it replaces: the same logits, whatever else is in the step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import PAGE, SEQUENCES, VOCAB, Cache, answers, feed, make_model, tolerance
from few_families import EVERY, FEW, features
from own_weights import OwnWeights
from transformers import AttentionInterface

from ktqueue.operators import attention, native
from ktqueue.operators.decoder import CpuDecoder, query_growth
from ktqueue.operators.decoder_facts import facts_of
from ktqueue.operators.step import StepContext

MakeDecoder = Callable[..., CpuDecoder]
"""make_decoder(model, quant="F32", **options)."""


@pytest.fixture
def make_decoder(given_weights: type[OwnWeights]) -> MakeDecoder:
    """make_decoder(model, quant="F32", **options) -> the operator with the model's own weights."""

    def make(model: Any, quant: str = "F32", **options: str) -> CpuDecoder:
        decoder = CpuDecoder.from_module(model, **options)
        weights = given_weights(model, quant)
        decoder.load(weights)
        assert weights.left <= {"lm_head.weight"}  # tied
        return decoder

    return make


@pytest.fixture(scope="module")
def few() -> set[tuple[str, Any]]:
    """The features of the few families that all tests run."""
    return {feature for family in FEW for feature in features(facts_of(make_model(family)))}


@pytest.mark.parametrize("family", EVERY)
def test_logits_equal_those_of_transformers(family: str, make_decoder: MakeDecoder, few: set[tuple[str, Any]]) -> None:
    """The few families that other tests are content with have each feature of this one."""
    model = make_model(family)
    decoder = make_decoder(model)
    assert {*features(decoder.facts)} <= few
    expected, found = answers(model), feed(decoder)
    for name, logits in expected.items():
        assert logits.std() > 0.1  # otherwise equality would prove little
        assert (found[name] - logits).abs().max() < tolerance(family) * logits.abs().max()


@pytest.mark.parametrize("isa", native.ISAS)
def test_an_indexer_chooses_with_every_instruction_set(isa: str, make_decoder: MakeDecoder) -> None:
    if isa not in native.isas():
        pytest.skip(f"this CPU has no {isa}")
    model = make_model("glm_moe_dsa", num_hidden_layers=1, indexer_types=["full"], mlp_layer_types=["dense"])
    expected, found = answers(model), feed(make_decoder(model, isa=isa))
    assert all((found[name] - logits).abs().max() < 1e-5 * logits.abs().max() for name, logits in expected.items())


@pytest.mark.parametrize("family", ["ernie4_5_moe", "hunyuan_v1_moe"])
def test_a_model_may_have_its_routers_in_float32(family: str) -> None:
    """transformers keeps them so when it loads the model in another type."""
    model = make_model(family).bfloat16()
    for name, parameter in model.named_parameters():
        if ".mlp.gate." in name:
            parameter.data = parameter.data.float()
    assert facts_of(model, [torch.bfloat16]).dtype == torch.bfloat16


@pytest.mark.parametrize(("period", "positions"), [(16384, 262144), (8192, 1 << 20), (4096, 4096), (16384, 100)])
def test_queries_grow_at_the_multiples_of_the_original_context(period: int, positions: int) -> None:
    """Ministral 3 counts positions from 0, and the decoders from 1."""
    model = make_model("ministral3", max_position_embeddings=positions)
    model.config.rope_parameters["original_max_position_embeddings"] = period
    grown = query_growth(facts_of(model), positions)
    whole = torch.arange(positions) // period
    assert torch.equal(grown, 1 + 0.5 * torch.log1p(whole.float()))


@pytest.mark.parametrize("quant", ["F16", "Q8_0"])
def test_rows_in_another_rotary_order_are_moved_as_they_are_packed(quant: str, make_decoder: MakeDecoder) -> None:
    """ERNIE rotates adjacent columns. A permutation of packed rows is exact, so the error is that of the format."""
    model = make_model("ernie4_5_moe")
    expected, found = answers(model), feed(make_decoder(model, quant, activations="float32"))
    errors = torch.cat([found[name] - logits for name, logits in expected.items()])
    assert errors.norm() / torch.cat([*expected.values()]).norm() < (0.1 if quant == "Q8_0" else 0.01)


@pytest.mark.parametrize("family", ["qwen2_moe with windows", "mistral", "gpt_oss", "gemma2"])
def test_transformers_modules_work_with_paged_attention(family: str) -> None:
    """Models that the decoder does not know take this path. Layers may have different windows."""
    model = make_model(family)
    expected = answers(model)
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    model.set_attn_implementation(attention.NAME)
    with torch.no_grad():
        found = feed(model)
    assert all((found[name] - logits).abs().max() < 1e-5 * logits.abs().max() for name, logits in expected.items())


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        *(("qwen2_moe", quant) for quant in ("F16", "BF16", "Q4_0", "Q8_0")),
        ("glm4_moe_lite", "BF16"),
        ("youtu", "Q4_0"),
    ],
)
def test_float32_activations_equal_the_dequantised_twin(
    family: str, quant: str, make_decoder: MakeDecoder, given_weights: type[OwnWeights]
) -> None:
    model = make_model(family)
    twin, weights = copy.deepcopy(model), given_weights(model, quant)
    for name, parameter in twin.named_parameters():
        if parameter.dim() == 2 and not name.endswith("gate.weight"):
            packed = weights.matrix(name)
            decoded = native.dequantize(packed.quant, packed.data, parameter.numel())
            parameter.data = torch.from_numpy(decoded).view(parameter.shape)
        elif parameter.dim() == 3:
            stacks = weights.experts(name.rpartition(".")[0])
            parts = (stacks.gate, stacks.up) if name.endswith("gate_up_proj") else (stacks.down,)
            parameter.data = torch.cat(
                [
                    torch.stack(
                        [
                            torch.from_numpy(native.dequantize(quant, data, part.rows * part.columns)).view(
                                part.rows, -1
                            )
                            for data in part.data
                        ]
                    )
                    for part in parts
                ],
                dim=1,
            )
    expected, found = answers(twin), feed(make_decoder(model, quant, activations="float32"))
    for name, logits in expected.items():
        assert (found[name] - logits).abs().max() < 1e-5 * logits.abs().max()
    rounded = feed(make_decoder(model, quant))
    errors = torch.cat([rounded[name] - logits for name, logits in expected.items()])
    tiles = quant == "BF16" and native.isa() == "amx"  # which use bf16 activations
    bound = 0.1 if quant.startswith("Q") else 0.01 if tiles else 1e-5
    assert errors.norm() / torch.cat([*expected.values()]).norm() < bound


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_next", "glm_moe_dsa"])
@pytest.mark.parametrize(("quant", "activations"), [("F32", "int8"), ("Q4_0", "int8"), ("Q8_0", "float32")])
def test_a_token_depends_only_on_its_sequence(
    family: str, quant: str, activations: str, make_decoder: MakeDecoder
) -> None:
    """Its bits are the same alone, in a batch, in other chunks, on other pages, and with other threads."""
    native.set_batch_invariant(True)
    decoder = make_decoder(make_model(family), quant, activations=activations, isa="")
    expected = feed(decoder)
    alone = feed(decoder, [{name: (0, len(ids))} for name, ids in SEQUENCES.items()])
    turns = [{name: (token, token + 1)} for name, ids in SEQUENCES.items() for token in range(len(ids))]
    try:
        native.set_threads(2, torch_threads=1)
        others = [
            feed(decoder),
            alone,
            feed(decoder, turns),
            feed(decoder, [{n: (0, len(SEQUENCES[n])) for n in ["s2", "s0", "s1"]}]),
        ]
    finally:
        native.set_threads(1)
        native.set_batch_invariant(False)
    for found in others:
        assert all(torch.equal(found[name], expected[name]) for name in SEQUENCES)


@pytest.mark.parametrize("family", ["qwen3_moe with a window", "qwen3_next", "mistral4", "deepseek_v32", "glm_moe_dsa"])
def test_scoring_fewer_tokens_changes_no_logits(family: str, make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(make_model(family), "Q8_0")
    chunks = {name: ids[:-1] for name, ids in SEQUENCES.items()}
    whole, last, none = Cache(decoder), Cache(decoder), Cache(decoder)
    scored = [3, 25, 26, 60]
    assert torch.equal(last.step(chunks, scored), whole.step(chunks)[scored])
    assert none.step(chunks, []).shape == (0, VOCAB)
    ends = {name: ids[-1:] for name, ids in SEQUENCES.items()}
    expected = whole.step(ends)
    assert torch.equal(last.step(ends), expected) and torch.equal(
        none.step(ends), expected
    )  # the cache is complete too


def test_sequences_share_pages_of_a_common_prefix(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(make_model("mixtral"))
    ids = SEQUENCES["s1"]
    cache = Cache(decoder)
    expected = cache.step({"a": ids})
    cache.pages["b"], cache.fed["b"] = cache.pages["a"][:3], 3 * PAGE
    assert torch.equal(cache.step({"b": ids[3 * PAGE :]}), expected[3 * PAGE :])


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3", "deepseek_v2"])
@pytest.mark.parametrize("activations", ["int8", "float32"])
def test_a_non_finite_sequence_spoils_no_other(family: str, activations: str, make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(make_model(family), "Q8_0", activations=activations)
    healthy, spoiled = Cache(decoder), Cache(decoder)
    for cache in (healthy, spoiled):
        cache.step({name: ids[:-1] for name, ids in SEQUENCES.items()})
    spoiled.kv.values[0][spoiled.pages["s1"][1], 2, 0, 5] = torch.nan
    ends = {name: ids[-1:] for name, ids in SEQUENCES.items()}
    expected, found = healthy.step(ends), spoiled.step(ends)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_router_picks_valid_experts_for_rows_that_are_not_finite(make_decoder: MakeDecoder) -> None:
    model = make_model("qwen3_moe")
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[2:4] = torch.tensor([[3e38], [-3e38]])  # one of the two overflows
    logits = feed(make_decoder(model))
    assert all(row.isnan().all() for row in logits.values())


def test_experts_are_counted_as_transformers_routes(make_decoder: MakeDecoder) -> None:
    model = make_model("qwen3_moe with dense layers")
    decoder = make_decoder(model)
    expected: list[int] = []
    uses: list[list[int]] = []

    def note(experts: Any, inputs: Any) -> None:
        expected.append(inputs[1].unique().numel())
        uses.append(inputs[1].flatten().bincount(minlength=experts.num_experts).tolist())

    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(note)
    with torch.no_grad():
        model(torch.tensor([SEQUENCES["s0"]]))
    feed(decoder, [{"s0": (0, 5)}])
    assert (decoder.expert_layers_run, decoder.experts_used) == (2, sum(expected))
    assert decoder.expert_uses() == uses
    work = decoder.expert_work()
    assert work.cpu_bytes * len(uses[0]) * len(uses) == decoder.expert_bytes * sum(expected)
    assert work.cpu_seconds > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.tensor([[96]])}, r"input_ids\[0\] must be from 0 to 95, got 96"),
        ({"position_ids": torch.tensor([[8]])}, r"position_ids\[0\] must be from 0 to 7, got 8"),
        ({"position_ids": torch.tensor([[-1]])}, r"position_ids\[0\] must be from 0 to 7, got -1"),
        ({"logits_to_keep": torch.tensor([1])}, r"logits_to_keep\[0\] must be from 0 to 0, got 1"),
        ({"logits_to_keep": torch.tensor([0, 0])}, "logits_to_keep must rise"),
        ({"input_ids": torch.tensor([[1, 2]])}, r"position_ids must have shape \[1, 2\], got \[1, 1\]"),
        ({"slot_mapping": torch.tensor([8])}, r"slot_mapping\[0\] must be from 0 to 7, got 8"),
        ({"page_table": torch.tensor([[2]], dtype=torch.int32)}, r"page_table\[0\]\[0\] must be from 0 to 1, got 2"),
        ({"context_lengths": torch.tensor([9], dtype=torch.int32)}, "more than the row's 1 pages hold"),
        ({"query_starts": torch.tensor([0, 2], dtype=torch.int32)}, "query_starts must run from 0 to the number of"),
    ],
)
def test_indices_out_of_range_are_refused(
    change: dict[str, torch.Tensor], message: str, make_decoder: MakeDecoder
) -> None:
    decoder = make_decoder(make_model("qwen3"))
    cache = Cache(decoder, pages=2)
    step: dict[str, Any] = {
        "query_starts": torch.tensor([0, 1], dtype=torch.int32),
        "context_lengths": torch.tensor([1], dtype=torch.int32),
        "page_table": torch.tensor([[0]], dtype=torch.int32),
        "slot_mapping": torch.tensor([0]),
    }
    inputs: dict[str, torch.Tensor] = {
        "input_ids": torch.tensor([[1]]),
        "position_ids": torch.tensor([[0]]),
        "logits_to_keep": torch.tensor([0]),
    }
    decoder(**inputs, use_cache=False, step=StepContext(**step, kv=cache.kv))
    before = [keys.clone() for keys in cache.kv.keys]
    for name, value in change.items():
        (step if name in step else inputs)[name] = value
    with pytest.raises(ValueError, match=message):
        decoder(**inputs, use_cache=False, step=StepContext(**step, kv=cache.kv))
    assert all(torch.equal(*pair) for pair in zip(cache.kv.keys, before, strict=True))


def test_models_that_the_decoder_does_not_compute_are_refused(make_decoder: MakeDecoder) -> None:
    def refused(model: Any, message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            CpuDecoder.from_module(model, **options)

    refused(torch.nn.Linear(2, 2), "Linear cannot be replaced by CpuDecoder: it knows AXK1ForCausalLM, ")
    refused(
        make_model("qwen3", hidden_act="relu"), "the activation of model.layers.0 is not one of silu, gelu, gelu_tanh"
    )
    refused(make_model("qwen3").bfloat16(), "computes in float32, but the model computes in another type")
    refused(make_model("granitemoe", logits_scaling=0.0), "logits_scaling must be above 0, got 0.0")
    halved = {"rope_type": "default", "rope_theta": 10_000.0}
    model = make_model("hunyuan_v1_moe", rope_parameters=halved)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4]
    refused(model, "only 8 of 16 columns are rotated before the norm of a head")
    model = make_model("qwen3")
    model.config.residual_multiplier = 0.5
    refused(model, "a residual multiplier and norms of query and key are not computed together")
    refused(make_model("qwen3"), "CpuDecoder knows no option 'speed'; it has: activations, isa", speed=1)
    refused(make_model("qwen3"), "activations must be int8 or float32, got 'int4'", activations="int4")
    with pytest.raises(RuntimeError, match="CpuDecoder has no weights yet"):
        feed(CpuDecoder.from_module(make_model("qwen3")))
    decoder = make_decoder(make_model("qwen3"))
    cache = Cache(decoder)
    cache.kv.keys = [keys.double() for keys in cache.kv.keys]
    with pytest.raises(ValueError, match="cache has the wrong element type"):
        cache.step({"a": [1]})
