"""GpuDecoder: a whole causal language model on a GPU, its routed experts on the CPU, on the GPU or on both.

Takes the place of the model that transformers built: token ids go in, logits come out. Launches kernels only and never
waits for the device, so that a step can be captured. Runs on CPU tensors too, by the kernels' twins. Knows no file.
"""

import copy
import itertools
from typing import Any, Self, get_args

import torch
from torch import nn

from ktqueue.operators import native
from ktqueue.operators.base import Operator, register
from ktqueue.operators.decoder import DecoderOutput
from ktqueue.operators.decoder_facts import CLASSES, LATENT_CLASSES, DecoderFacts, LayerFacts, facts_of
from ktqueue.operators.gpu.dense import DEFAULT_DENSE, DenseType, DenseWeights
from ktqueue.operators.gpu.experts.memory import ExpertMemory, ExpertStatistics
from ktqueue.operators.gpu.experts.step import PendingResidual, RoutedLayer, StepExperts
from ktqueue.operators.gpu.kernels.expert_products import ExpertRecord
from ktqueue.operators.gpu.kernels.rope import Rotary
from ktqueue.operators.gpu.kernels.router import Scoring
from ktqueue.operators.gpu.layer import DecoderLayer
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.latent_shape import cosines_and_sines
from ktqueue.operators.native_handoff import HandoffStatistics
from ktqueue.operators.options import KernelOptions, kernel_options
from ktqueue.operators.packed import ModuleWeights
from ktqueue.operators.step import StepContext

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@register("GpuDecoder")
class GpuDecoder(Operator):
    """Called as the causal language model that it replaces, always with a step whose `attention` is given.

    `load`, then `prepare_device`, then steps; `after_step` when the device has finished one, `close` at the end.
    """

    def __init__(self, facts: DecoderFacts, rotary: nn.Module, options: KernelOptions, dense: DenseType) -> None:
        super().__init__()
        self.facts = facts
        self.rotary = rotary
        self._options = options
        self._dense: DenseType = dense
        self._layers: list[DecoderLayer] = []
        self._routed: list[RoutedLayer] = []
        self._dense_bytes = 0
        self._experts: ExpertMemory | None = None
        self._tables: list[Rotary] = []  # of growing length

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> Self:
        """From a model of one of decoder_facts.CLASSES or LATENT_CLASSES. Options: `dense`, a DenseType; of the CPU's
        experts `activations` and `isa`. Raises ValueError.
        """
        dense = options.pop("dense", DEFAULT_DENSE)
        if dense not in get_args(DenseType):
            raise ValueError(f"GpuDecoder: dense must be {' or '.join(get_args(DenseType))}, got {dense!r}")
        chosen = kernel_options("GpuDecoder", options, "dense")
        try:
            facts = facts_of(module, DTYPES, (*CLASSES, *LATENT_CLASSES))
        except ValueError as error:
            name = type(module).__name__
            raise ValueError(
                f"{name} cannot be replaced by GpuDecoder: {error} (rules/modules.yaml does without it)"
            ) from error
        return cls(facts, module.model.rotary_emb, chosen, dense)  # type: ignore[union-attr, arg-type]

    def load(self, weights: ModuleWeights) -> None:
        """Put dense weights onto the device, pack experts for the CPU. Raises ValueError if they do not fit."""
        facts = self.facts
        dense = DenseWeights(weights, facts.dtype, self.device, self._dense)
        self._embedding = dense.linear("model.embed_tokens")
        for index, layer in enumerate(facts.layers):
            routed = None
            if layer.experts > 0:
                routed = len(self._routed)
                given = weights.experts(f"{layer.name}.mlp.experts")
                three = given.gate.quant, given.up.quant, given.down.quant
                self._routed.append(
                    RoutedLayer(
                        packed=native.ExpertLayer(given, activation=layer.activation, **self._options),
                        record=ExpertRecord(*three, hidden=facts.hidden, intermediate=given.gate.rows),
                        experts=layer.experts,
                        experts_per_token=layer.experts_per_token,
                        renormalise=layer.renormalise,
                        activation=layer.activation,
                        exact=self._options["activations"] == "float32",
                        scoring=_scoring(layer, weights, self.device),
                    )
                )
            self._layers.append(DecoderLayer(index, layer, facts, dense, routed))
        for earlier, later in itertools.pairwise(self._layers):
            if earlier.routes and later.routes:
                earlier.predict_next_experts(later)
        self._norm = dense.vector("model.norm.weight")
        self._head = self._embedding if facts.tied else dense.linear("lm_head")
        self._dense_bytes = dense.bytes

    def prepare_device(self, settings: GpuSettings) -> None:
        """Put experts into GPU memory and connect the CPU's; once, after `load` and before the first step.

        Raises ValueError for a setting that this machine has not got; torch.OutOfMemoryError.
        """
        if not self._layers:
            raise RuntimeError("GpuDecoder has no weights yet")
        self._experts = ExpertMemory(self._routed, self.facts.hidden, self.facts.dtype, self.device, settings)

    @property
    def expert_layers_run(self) -> int:
        """Layers with routed experts that the CPU has run, all steps together."""
        statistics = self.handoff_statistics
        return statistics.tasks if statistics else 0

    @property
    def experts_used(self) -> int:
        """Different experts that those runs used, added up."""
        statistics = self.handoff_statistics
        return statistics.experts_used if statistics else 0

    @property
    def handoff_statistics(self) -> HandoffStatistics | None:
        """Of the CPU's experts; None before `prepare_device` and where all are on the GPU."""
        return self._experts.handoff.statistics if self._experts and self._experts.handoff else None

    @property
    def expert_statistics(self) -> ExpertStatistics | None:
        """Of experts in GPU memory; None before `prepare_device`."""
        return self._experts.statistics if self._experts else None

    def statistics(self) -> dict[str, float]:
        """What is to be watched. `experts`, `experts_on_gpu`, `expert_hit_rate` (if known), `expert_fetched_share_one`
        (in steps of one token) and `expert_fetched_share_several` tell how things stand; `expert_moves`,
        `expert_streamed_bytes`, `expert_predictions` and, of these, what was used, `expert_prediction_hits`, only grow.
        """
        told = self.expert_statistics
        if told is None:
            return {}
        known: dict[str, float] = {} if told.hit_rate is None else {"expert_hit_rate": told.hit_rate}
        run = self.handoff_statistics
        if run is not None:
            known |= {"expert_predictions": run.predicted, "expert_prediction_hits": run.predicted_used}
        return known | {
            "experts": told.experts,
            "experts_on_gpu": told.on_gpu,
            "expert_bytes": sum(layer.experts * layer.record.bytes for layer in self._routed),
            "expert_moves": told.moves,
            "expert_streamed_bytes": told.streamed_bytes,
            "expert_fetched_share_one": told.fetched_shares.one,
            "expert_fetched_share_several": told.fetched_shares.several,
        }

    def device_bytes(self) -> dict[str, int]:
        """Bytes of experts as the CPU has them; of dense weights and what `prepare_device` took on the device."""
        pool = self._experts.bytes if self._experts else 0
        held = {"cpu": sum(layer.packed.bytes for layer in self._routed)}
        held[self.device] = held.get(self.device, 0) + self._dense_bytes + pool
        return held

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        step: StepContext,
        use_cache: bool = False,
    ) -> DecoderOutput:
        """One step. input_ids, position_ids: [1, tokens] int64; logits_to_keep: [scored] int64, rising; all on the
        device. Raises RuntimeError before `prepare_device`."""
        if self._experts is None:
            raise RuntimeError("GpuDecoder's device is not prepared yet")
        residual, positions = self._embedding.embed(input_ids[0]), position_ids[0]
        tokens, scored = len(positions), len(logits_to_keep)
        decodes = len(step.context_lengths) == tokens == scored
        experts = self._experts.step(tokens, scored, decodes=decodes, captured=step.live_tokens is not None)
        x = self._run_layers(residual, positions, step, logits_to_keep if scored < tokens else None, experts)
        if scored == 0:
            return DecoderOutput(torch.empty(1, 0, self.facts.vocabulary, device=x.device))
        return DecoderOutput(self._head(x, dtype=torch.float32)[None])

    def _run_layers(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        step: StepContext,
        kept: torch.Tensor | None,
        experts: StepExperts,
    ) -> torch.Tensor:
        """Run all layers and the last norm: [scored, hidden]. kept: [scored] int64, the tokens that are scored; None:
        all. Writes to the residual [tokens, hidden]."""
        rotary = self._rotary(step.kv)
        pending = PendingResidual()
        for layer in self._layers[:-1]:
            query = layer.attention.query(residual, pending, positions, rotary, step)
            attended = layer.attention.attend(query, step)
            pending = layer.mlp(residual, attended, experts, step.live_tokens)
        # Behind the keys and values of the last layer only the rows that are scored matter.
        last = self._layers[-1]
        query = last.attention.query(residual, pending, positions, rotary, step)
        if kept is not None and len(kept) == 0:
            return residual[kept]
        attended = last.attention.attend(query, step)
        if kept is not None:
            residual, attended = residual[kept], attended[kept]
        pending = last.mlp(residual, attended, experts, step.live_tokens if kept is None else None)
        return pending.add_to(residual, self._norm, self.facts.epsilon)

    def after_step(self) -> None:
        """To be called once the device has finished a step: raises RuntimeError if the CPU's experts failed in it,
        and lets hot experts move."""
        if self._experts is not None:
            self._experts.after_step()

    def close(self) -> None:
        """Stop the CPU's experts and free what `prepare_device` took."""
        if self._experts is not None:
            self._experts.close()
            self._experts = None

    def _rotary(self, kv: KVCache) -> Rotary:
        """The rotary tables for all positions that the cache holds. Earlier, shorter ones stay: captured steps read
        them."""
        positions = min(kv.pages * kv.layout.page_size, self.facts.positions)
        if not self._tables or len(self._tables[-1].cosine) < positions:
            on_host = copy.deepcopy(self.rotary).to("cpu")  # the same angles as CpuDecoder has
            with torch.no_grad():
                angles = on_host(torch.empty(0), torch.arange(positions)[None])
            table = Rotary(*(one.contiguous().to(self.device) for one in cosines_and_sines(angles)))
            self._tables.append(table)
        return self._tables[-1]


def _scoring(layer: LayerFacts, weights: ModuleWeights, device: str) -> Scoring:
    """Of a layer's router; its bias is on `device`."""
    bias = None
    if layer.sigmoid:
        given = weights.vector(f"{layer.name}.mlp.gate.e_score_correction_bias")
        bias = torch.from_numpy(given).to(device, torch.float32, copy=True)
    return Scoring(layer.sigmoid, layer.scale, layer.groups, layer.groups_used, bias)
