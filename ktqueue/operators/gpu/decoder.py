"""GpuDecoder: a whole causal language model on a GPU. Its routed experts are on the CPU, on the GPU or on both.

It replaces the model that transformers built: token ids go in, logits come out. It only launches kernels and never
waits for the device, so a step can be captured. On CPU tensors it runs the kernels' twins. Knows no file.
"""

import copy
import itertools
from collections.abc import Generator
from dataclasses import replace
from typing import Any, Self, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ktqueue.core.expert_work import ExpertUses, ExpertWork
from ktqueue.operators import native
from ktqueue.operators.base import KernelOptions, Operator, kernel_options
from ktqueue.operators.decoder import query_growth
from ktqueue.operators.decoder_facts import DecoderFacts, chosen_by_all, facts_of
from ktqueue.operators.decoder_weights import in_own_order
from ktqueue.operators.gpu.cache_bounds import CacheBound, cache_bounds
from ktqueue.operators.gpu.dense import DEFAULT_DENSE, DenseType, DenseWeights
from ktqueue.operators.gpu.device import launches_dependents
from ktqueue.operators.gpu.experts.memory import ExpertMemory
from ktqueue.operators.gpu.experts.step import RoutedLayer, StepExperts
from ktqueue.operators.gpu.handoff.handoff import Handoff
from ktqueue.operators.gpu.kernels.operation import dependent_launches
from ktqueue.operators.gpu.kernels.panel_layout import ExpertRecord
from ktqueue.operators.gpu.kernels.rope import Rotary
from ktqueue.operators.gpu.layer import DecoderLayer
from ktqueue.operators.gpu.next_token_layer import GpuNextTokenLayer
from ktqueue.operators.gpu.pending_residual import PendingResidual
from ktqueue.operators.gpu.settings import GpuSettings, Trials
from ktqueue.operators.indexer import KeyChoice
from ktqueue.operators.layer_facts import LayerFacts, RouterFacts
from ktqueue.operators.named_ranges import NamedRange, name_methods
from ktqueue.operators.native_handoff import HandoffStatistics
from ktqueue.operators.packed import ModuleWeights
from ktqueue.operators.rotary import rotary_tables
from ktqueue.operators.step import DecoderOutput, StepContext, StepInputs, result_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EARLY_TOKENS = 128
"""Of the largest captured decode step whose kernels are launched early. With 256, such a step was slower."""


class GpuDecoder(Operator):
    """Replaces a causal language model and is called like it, always with a step that has `attention`.

    Order of calls: `load`, `prepare_device`, then for each step the module and `after_step`, at the end `close`.
    """

    capturable = True

    def __init__(self, facts: DecoderFacts, rotary: nn.Module, options: KernelOptions, dense: DenseType) -> None:
        super().__init__()
        self.facts = facts
        self.rotary = rotary
        self._options = options
        self._dense: DenseType = dense
        self._layers: list[DecoderLayer] = []
        self._routed: list[RoutedLayer] = []
        self._bounds: list[CacheBound] = []
        self._dense_bytes = 0
        self._decodes = False  # dense matrices, to memory that all steps share
        self._further_bytes = 0  # of experts of a layer that predicts further tokens
        self._experts: ExpertMemory | None = None
        self.tables: Rotary | None = None
        self._hidden: torch.Tensor | None = None  # [slots, hidden]: see keep_hidden
        self._launches_early = False
        self._choices: torch.Tensor | None = None
        self.trials = Trials()
        """Read by `prepare_device`."""

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """Make one for a model of one of the SUPPORTED classes.

        Options: `dense`, a DenseType, and `activations` and `isa` for the CPU's experts. Raises ValueError.
        """
        dense = options.pop("dense", DEFAULT_DENSE)
        if dense not in get_args(DenseType):
            raise ValueError(f"GpuDecoder: dense must be one of {', '.join(get_args(DenseType))}, got {dense!r}")
        chosen = kernel_options("GpuDecoder", options, "dense")
        try:
            facts = facts_of(module, DTYPES, "GpuDecoder")
        except ValueError as error:
            name = type(module).__name__
            raise ValueError(
                f"{name} cannot be replaced by GpuDecoder: {error} (rules/modules.yaml does without it)"
            ) from error
        return cls(facts, module.model.rotary_emb, chosen, dense)  # type: ignore[union-attr, arg-type]

    def load(self, weights: ModuleWeights) -> None:
        """Put dense weights on the device and pack experts for the CPU. Raises ValueError if their shapes are wrong."""
        facts = self.facts
        weights, dense = self._in_own_order(weights)
        self._embedding = dense.embedding("model.embed_tokens", is_head=facts.tied)
        choice = KeyChoice()
        attentive, linear = itertools.count(), itertools.count()
        for layer in facts.layers:
            routed = None
            if layer.router is not None:
                routed = len(self._routed)
                self._routed.append(self._routed_layer(layer, layer.router, weights, dense))
            index = next(attentive if layer.linear is None else linear)
            self._layers.append(DecoderLayer(index, layer, facts, dense, routed, choice))
        for earlier, later in itertools.pairwise(self._layers):
            if earlier.routes and later.routes:
                earlier.predict_next_experts(later)
        self._norm = dense.norm("model.norm", centred=facts.centred)
        self._head = self._embedding if facts.tied else dense.linear("lm_head")
        self._bounds = cache_bounds(facts, weights)
        self._dense_bytes = dense.bytes
        self._decodes = dense.decodes

    def cache_bounds(self) -> list[CacheBound]:
        """The largest keys and values of each layer that has them. Call it after all of the model is loaded."""
        return self._rotated(self._bounds)

    def load_next_token_layer(self, weights: ModuleWeights) -> GpuNextTokenLayer:
        """Load the layer behind the model's own, which predicts the token after the next: see CpuDecoder."""
        facts = self.facts
        weights, dense = self._in_own_order(weights)
        layer = facts.further_layer
        routed = [] if layer.router is None else [self._routed_layer(layer, layer.router, weights, dense)]
        own = DecoderLayer(0, layer, facts, dense, 0 if routed else None, KeyChoice())
        joining = dense.linear(f"{layer.name}.eh_proj")
        names = "enorm", "hnorm", "shared_head.norm"
        norms = [dense.norm(f"{layer.name}.{name}", centred=facts.centred) for name in names]
        self._dense_bytes += dense.bytes
        self._further_bytes += sum(experts.packed.bytes for experts in routed)
        bounds = self._rotated(cache_bounds(replace(facts, layers=(layer,)), weights))
        return GpuNextTokenLayer(self, own, routed, joining, norms, bounds)

    def keep_hidden(self, hidden: torch.Tensor) -> None:
        """See NextTokenBase."""
        self._hidden = hidden.flatten(0, 1)

    def _in_own_order(self, weights: ModuleWeights) -> tuple[ModuleWeights, DenseWeights]:
        """The weights in the kernels' order, and what puts them on the device."""
        facts = self.facts
        weights = in_own_order(weights, facts)
        return weights, DenseWeights(weights, facts.dtype, self.device, self._dense, float_norms=facts.float_norms)

    def _routed_layer(
        self, layer: LayerFacts, router: RouterFacts, weights: ModuleWeights, dense: DenseWeights
    ) -> RoutedLayer:
        """Pack the routed experts of a layer for the CPU."""
        experts = weights.experts(f"{layer.name}.{layer.experts}")
        quants = experts.gate.quant, experts.up.quant, experts.down.quant
        return RoutedLayer(
            packed=native.ExpertLayer(experts, layer.expert_gate, **self._options),
            record=ExpertRecord(*quants, hidden=self.facts.hidden, intermediate=experts.gate.rows),
            experts=router.experts,
            experts_per_token=router.chosen,
            renormalise=router.renormalise,
            gate=layer.expert_gate,
            exact=self._options["activations"] == "float32",
            scoring=dense.scoring(layer.name, router),
            biases=dense.expert_biases(experts),
        )

    def _rotated(self, bounds: list[CacheBound]) -> list[CacheBound]:
        """The bounds of rotated keys. With longrope and YaRN, (cosine, sine) is longer than 1."""
        cosine, sine = rotary_tables(copy.deepcopy(self.rotary).to("cpu"), 1, self.facts.rotary_kinds)
        growth = max(1.0, float(cosine.hypot(sine).max()))
        return [bound._replace(key=bound.key * growth) for bound in bounds]

    def prepare_device(self, settings: GpuSettings) -> None:
        """Put rotary tables and experts into GPU memory and connect the CPU's experts. Call it once, between `load` and
        the first step.

        Raises ValueError for a setting that this machine does not support, and torch.OutOfMemoryError.
        """
        if not self._layers:
            raise RuntimeError("GpuDecoder has no weights yet")
        on_host = copy.deepcopy(self.rotary).to("cpu")  # the same angles as in CpuDecoder
        positions = settings.positions or self.facts.positions
        tables = *rotary_tables(on_host, positions, self.facts.rotary_kinds), query_growth(self.facts, positions)
        self.tables = Rotary(*(table.to(self.device) for table in tables))
        self._experts = ExpertMemory(
            self._routed, self.facts.hidden, self.facts.dtype, self.device, settings, self.trials
        )
        self._experts.choices = self._choices
        self._launches_early = launches_dependents(self.device)

    @property
    def expert_layers_run(self) -> int:
        """Number of expert layers that the CPU has run in all steps."""
        statistics = self.handoff_statistics
        return statistics.tasks if statistics else 0

    @property
    def experts_used(self) -> int:
        """Number of different experts of each of those runs, summed."""
        statistics = self.handoff_statistics
        return statistics.experts_used if statistics else 0

    @property
    def handoff(self) -> Handoff | None:
        """The way to the CPU's experts; None before `prepare_device`, or if all experts are on the GPU."""
        return self._experts.handoff if self._experts else None

    @property
    def handoff_statistics(self) -> HandoffStatistics | None:
        """Statistics of the CPU's experts, if there is a hand-off."""
        return self.handoff.statistics if self.handoff else None

    def name_layers(self, named_range: NamedRange) -> None:
        """Run the parts of each layer inside ranges with their names. Call it between `load` and the first step."""
        for number, layer in enumerate(self._layers):
            parts = {"query": f"layer {number} query", "attend": f"layer {number} attention"}
            name_methods(layer.attention, parts, named_range)
            name_methods(layer, {"mlp": f"layer {number} mlp"}, named_range)

    def expert_work(self) -> ExpertWork:
        """See CountsExperts."""
        return self._experts.work() if self._experts else ExpertWork()

    def expert_uses(self) -> ExpertUses | None:
        """See CountsExperts. They are known if the CPU has some of the experts."""
        return self._experts.uses() if self._experts else None

    @property
    def depends_on_uses(self) -> bool:
        """See PlacesExperts."""
        return self._experts is not None and self._experts.depends_on_uses

    def count_each_step(self) -> None:
        """See PlacesExperts."""
        if self._experts is not None:
            self._experts.count_each_step()

    @torch.inference_mode()
    def place_experts(self, uses: ExpertUses) -> None:
        """See PlacesExperts."""
        if self._experts is not None:
            self._experts.place(uses)

    def record_choices(self, tokens: int) -> None:
        """See RecordsChoices."""
        shape = len(self._routed), tokens, chosen_by_all(self.facts)
        self._choices = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def choices(self, scored: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.uint16]:
        """See RecordsChoices."""
        assert self._choices is not None
        step = self._choices[:, :tokens].cpu().numpy().astype(np.uint16)
        found = step[:, scored]
        if self.facts.layers[-1].router is not None and self._hidden is None and len(scored) < tokens:
            found[-1] = step[-1, : len(scored)]
        return found.swapaxes(0, 1)

    def statistics(self) -> dict[str, float]:
        """Values for the worker's metrics.

        Gauges: `experts`, `experts_on_gpu`, `expert_bytes`, `expert_hit_rate` (share of recent uses whose expert was on
        the GPU, if known), and `expert_fetched_share_one` (in steps of one token) and `expert_fetched_share_several`.
        Counters: `expert_uses` and `expert_uses_on_gpu` (whose expert was in GPU memory), `expert_moves`,
        `expert_streamed_steps` (long steps that copied experts), `expert_streamed_bytes`, `expert_predictions`, and
        `expert_prediction_hits`, the predictions that came true. If each step is counted, also `expert_gpu_experts` and
        `expert_fetched_bytes`: see ExpertWork. Empty before `prepare_device`.
        """
        return self._experts.statistics() if self._experts else {}

    def device_bytes(self) -> dict[str, int]:
        """Bytes by device: experts on the CPU; dense weights and the memory of `prepare_device` on this device."""
        on_device = self._dense_bytes + (self._experts.bytes if self._experts else 0)
        on_device += self.tables.bytes if self.tables else 0
        by_device = {"cpu": sum(layer.packed.bytes for layer in self._routed) + self._further_bytes}
        by_device[self.device] = by_device.get(self.device, 0) + on_device
        return by_device

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        step: StepContext,
        use_cache: bool = False,
    ) -> DecoderOutput:
        """Compute one step: see StepInputs. Raises RuntimeError before `prepare_device`."""
        decodes = step.live_tokens is not None and len(logits_to_keep) == input_ids.shape[1]
        is_short = decodes and input_ids.shape[1] <= EARLY_TOKENS
        parts = self.forward_in_parts(StepInputs(input_ids, position_ids, logits_to_keep, step))
        with dependent_launches(self._launches_early and is_short):
            return DecoderOutput(self.logits(result_of(parts))[None])

    @property
    def most_captured_tokens(self) -> int:
        """See CapturesPrompts. Steps of a model that has experts on the CPU are not captured with prompts."""
        return 0 if self._experts is None else self._experts.most_captured_tokens

    @property
    def may_overlap(self) -> bool:
        """Whether a step can run while others are computed: it streams all experts, and has nothing in common with
        them but weights and cache."""
        memory, own = self._experts, self._choices is None and self._hidden is None and not self._decodes
        return own and memory is not None and memory.may_overlap and not any(one.chooses for one in self.facts.layers)

    def forward_in_parts(self, inputs: StepInputs, *, overlapped: bool = False) -> Generator[None, None, torch.Tensor]:
        """Launch one step a layer at a time. Returns the input of the head, [scored, hidden], for `logits`. See
        `forward`, and ExpertMemory.step for `overlapped`. After that step, and the others that ran meanwhile, call
        `end_overlap`."""
        rotary, memory = self.tables, self._experts
        if memory is None or rotary is None:
            raise RuntimeError("GpuDecoder's device is not prepared yet")
        input_ids, position_ids, logits_to_keep, step = inputs
        positions, residual = position_ids[0], self.embed(input_ids[0])
        tokens, scored = len(positions), len(logits_to_keep)
        decodes = len(step.context_lengths) == tokens == scored
        reaching = scored if self._hidden is None else tokens
        captured = step.live_tokens is not None
        experts = memory.step(tokens, reaching, decodes=decodes, captured=captured, overlapped=overlapped)
        kept = logits_to_keep if scored < tokens else None
        yield
        return (yield from self._run_layers(residual, positions, rotary, step, kept, experts))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [tokens] int64 -> the input of the first layer [tokens, hidden]."""
        embedded = self._embedding.embed(ids)
        return embedded if self.facts.embedding_scale == 1 else embedded.mul_(self.facts.embedding_scale)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [scored, hidden], the output of a last norm -> [scored, vocabulary] float32."""
        if len(x) == 0:
            return torch.empty(0, self.facts.vocabulary, device=x.device)
        logits = self._head(x, dtype=torch.float32)
        if self.facts.logit_scale != 1:
            logits.mul_(self.facts.logit_scale)
        if cap := self.facts.logit_cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _run_layers(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        rotary: Rotary,
        step: StepContext,
        kept: torch.Tensor | None,
        experts: StepExperts,
    ) -> Generator[None, None, torch.Tensor]:
        """Run all layers, one after the other, and the last norm: [scored, hidden]. kept: [scored] int64, the tokens
        that are scored; None: all. Writes to the residual [tokens, hidden]."""
        pending = PendingResidual()
        for layer in self._layers[:-1]:
            query = layer.attention.query(residual, pending, positions, rotary, step)
            attended = layer.attention.attend(query, step)
            pending = layer.mlp(residual, attended, experts, step.live_tokens)
            yield
        last = self._layers[-1]
        query = last.attention.query(residual, pending, positions, rotary, step)
        if self._hidden is not None:
            pending = last.mlp(residual, last.attention.attend(query, step), experts, step.live_tokens)
            x = pending.add_to(residual, self._norm, self.facts.epsilon)
            self._hidden.index_copy_(0, step.slot_mapping, x)
            return x if kept is None else x[kept]
        # After the keys and values of the last layer, only the scored rows are needed.
        if kept is not None and len(kept) == 0:
            return residual[kept]
        attended = last.attention.attend(query, step)
        if kept is not None:
            residual, attended = residual[kept], attended[kept]
        pending = last.mlp(residual, attended, experts, step.live_tokens if kept is None else None)
        return pending.add_to(residual, self._norm, self.facts.epsilon)

    def streams(self, tokens: int) -> bool:
        """Whether an eager step of `tokens` tokens may stream experts."""
        return self._experts is not None and self._experts.streams(tokens)

    def after_step(self) -> None:
        """Call it when the device has finished a step. Moves experts that are used often. Raises RuntimeError if the
        CPU's experts failed in the step."""
        if self._experts is not None:
            self._experts.after_step()

    def end_overlap(self) -> None:
        """Call it when a step that was overlapped is done, and those that ran meanwhile."""
        if self._experts is not None:
            self._experts.end_overlap()

    def close(self) -> None:
        """Stop the CPU's experts and free the memory of `prepare_device`."""
        if self._experts is not None:
            self._experts.close()
            self._experts = self.tables = None
