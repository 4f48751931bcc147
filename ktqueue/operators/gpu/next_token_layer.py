"""GpuNextTokenLayer: the layer behind a GpuDecoder's own that predicts the token after the next. Knows no file.

operators/next_token_layer.py has the formula. Its routed experts have memory of their own, and share the hand-off to
the CPU with those of the model, since both never run at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ktqueue.operators.decoder_facts import DecoderFacts
from ktqueue.operators.gpu.cache_bounds import CacheBound
from ktqueue.operators.gpu.dense import DenseLinear
from ktqueue.operators.gpu.experts.memory import ExpertMemory
from ktqueue.operators.gpu.experts.step import RoutedLayer
from ktqueue.operators.gpu.handoff.handoff import Handoff
from ktqueue.operators.gpu.kernels.norm import add_rms_norm
from ktqueue.operators.gpu.kernels.rope import Rotary
from ktqueue.operators.gpu.layer import DecoderLayer
from ktqueue.operators.gpu.pending_residual import PendingResidual
from ktqueue.operators.gpu.settings import GpuSettings, Trials
from ktqueue.operators.step import DecoderOutput, StepContext


class NextTokenBase(Protocol):
    """The model that the layer belongs to. tables: None before its device is prepared."""

    facts: DecoderFacts
    device: str
    tables: Rotary | None

    @property
    def handoff(self) -> Handoff | None:
        """The way to the CPU's experts; None if it has none."""

    def keep_hidden(self, hidden: torch.Tensor) -> None:
        """Write the input of the head of each token to [pages, page_size, hidden], from the next step on."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [tokens] int64 -> the input of the first layer [tokens, hidden]."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [scored, hidden], the output of a last norm -> [scored, vocabulary] float32."""


class GpuNextTokenLayer:
    """Called like GpuDecoder, on a cache of one layer. Its tokens are those after its positions: see NextTokenLayer.

    routed: its routed experts, or none. joining: the matrix M [hidden, 2 * hidden]. norms: of the embedding, of h, and
    before the head, [hidden] each. bounds: of its keys and values.
    """

    def __init__(
        self,
        model: NextTokenBase,
        layer: DecoderLayer,
        routed: list[RoutedLayer],
        joining: DenseLinear,
        norms: Sequence[torch.Tensor],
        bounds: list[CacheBound],
    ) -> None:
        self.cache_bounds = bounds
        self.hidden_size, self.hidden_dtype = model.facts.hidden, model.facts.dtype
        self.hidden = torch.empty(0)
        self._model = model
        self._layer = layer
        self._routed = routed
        self._joining = joining
        self._token_norm, self._hidden_norm, self._norm = norms
        self._experts: ExpertMemory | None = None

    def keep_hidden(self, hidden: torch.Tensor) -> None:
        """See NextTokenLayer."""
        self.hidden = hidden
        self._model.keep_hidden(hidden)

    def prepare_device(self, settings: GpuSettings) -> None:
        """Put experts into GPU memory, and connect the others. Call it after the model's `prepare_device`.

        settings.max_tokens: of a pass that has scored tokens, since others need no experts. Nothing is streamed or
        decoded. Raises torch.OutOfMemoryError.
        """
        facts, never = self._model.facts, settings.max_tokens + 1
        own = replace(settings, expert_streaming="off", decode_experts_from=never)
        self._experts = ExpertMemory(
            self._routed, facts.hidden, facts.dtype, self._model.device, own, Trials(), handoff=self._model.handoff
        )

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        step: StepContext,
        use_cache: bool = False,
    ) -> DecoderOutput:
        """Run one step. The output of each scored token, the last of its row, is written to the place of the next token
        in `hidden`. Raises RuntimeError before `prepare_device`."""
        rotary, memory, facts = self._model.tables, self._experts, self._model.facts
        if memory is None or rotary is None:
            raise RuntimeError("the device of the layer for further tokens is not prepared yet")
        kept = self.hidden.flatten(0, 1)
        token = add_rms_norm(self._model.embed(input_ids[0]), self._token_norm, facts.epsilon)
        before = add_rms_norm(kept[step.slot_mapping], self._hidden_norm, facts.epsilon)
        residual = self._joining(torch.cat([token, before], dim=1))
        attention = self._layer.attention
        query = attention.query(residual, PendingResidual(), position_ids[0], rotary, step)
        tokens, scored = len(residual), len(logits_to_keep)
        if scored == 0:  # only keys and values are needed
            return DecoderOutput(torch.empty(1, 0, facts.vocabulary, device=residual.device))
        attended = attention.attend(query, step)
        live = step.live_tokens
        if scored < tokens:
            residual, attended, live = residual[logits_to_keep], attended[logits_to_keep], None
        experts = memory.step(scored, scored, decodes=False, captured=step.live_tokens is not None)
        pending = self._layer.mlp(residual, attended, experts, live)
        x = pending.add_to(residual, self._norm, facts.epsilon)
        kept.index_copy_(0, step.next_slots(), x if facts.normed_further else residual)
        return DecoderOutput(self._model.logits(x)[None])

    def after_step(self) -> None:
        """See GpuDecoder."""
        if self._experts is not None:
            self._experts.after_step()

    def statistics(self) -> Mapping[str, float]:
        """See DeviceModel. Its experts are not counted with those of the model."""
        return {}

    def close(self) -> None:
        """Free the memory of `prepare_device`."""
        if self._experts is not None:
            self._experts.close()
            self._experts = None
