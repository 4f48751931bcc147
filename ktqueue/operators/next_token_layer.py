"""NextTokenLayer: predicts the token after the next one from what a model computed. Knows no file."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from ktqueue_kernels import _kernels

from ktqueue.operators import native
from ktqueue.operators.decoder_facts import DecoderFacts
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.packed import PackedMatrix
from ktqueue.operators.step import DecoderOutput, StepContext


class NextTokenBase(Protocol):
    """The model that the layer belongs to."""

    facts: DecoderFacts

    def keep_hidden(self, hidden: torch.Tensor) -> None:
        """Write the input of the head of each token to [pages, page_size, hidden] float32, from the next step on.

        `hidden` has as many pages as the cache of all later steps.
        """

    def bind(self, decoder: _kernels.Decoder, kv: KVCache) -> None:
        """Let a decoder use `kv`, and the rotary tables of this model for all positions that it can hold."""


class NextTokenLayer:
    """The layer behind a CpuDecoder's own that predicts the token after the next one (multi-token prediction).

    Of position p it takes h, the input of the model's head, and the embedding e of the token at p + 1. Its own layer
    computes y of x = M [RMSNorm(e); RMSNorm(h)], and the model's head of RMSNorm(y) gives the logits of the token at
    p + 2. For the token after that, y takes the place of h (DeepSeek-V3, arXiv 2412.19437, equations 21 to 23). In
    families with `normed_further`, RMSNorm(y) does (Qwen3-Next). norms: of e, of h, and before the head.
    """

    hidden_dtype = torch.float32

    def __init__(
        self,
        model: NextTokenBase,
        decoder: _kernels.Decoder,
        embedding: PackedMatrix,
        joining: native.Linear,
        norms: Sequence[native.Floats],
    ) -> None:
        self.hidden_size = embedding.columns
        self.hidden = torch.empty(0)
        self._model = model
        self._decoder = decoder
        self._embedding = embedding.data.reshape(embedding.rows, -1)
        self._quant = embedding.quant
        self._joining = joining
        *self._norms, self._last_norm = norms
        self._kv: KVCache | None = None

    def keep_hidden(self, hidden: torch.Tensor) -> None:
        """Let the model write h of each token to `hidden`, and read it there: see NextTokenBase."""
        self.hidden = hidden
        self._model.keep_hidden(hidden)

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        step: StepContext,
        use_cache: bool = False,
    ) -> DecoderOutput:
        """Run one step on a cache of one layer, like CpuDecoder. Its tokens are those after its positions.

        What takes the place of h after each scored token, the last of its row, is written to the place of the next
        token in `hidden`.
        """
        if step.kv is not self._kv:
            self._model.bind(self._decoder, step.kv)
            self._kv = step.kv
        ids, kept = input_ids[0].numpy(), self.hidden.flatten(0, 1)
        rows = np.ascontiguousarray(self._embedding[ids]).reshape(-1)
        tokens = native.dequantize(self._quant, rows, len(ids) * self.hidden_size).reshape(len(ids), -1)
        tokens = tokens * np.float32(self._model.facts.embedding_scale)
        both = tokens, kept[step.slot_mapping].numpy()
        parts = [self._normed(x, norm) for x, norm in zip(both, self._norms, strict=True)]
        inputs = np.empty((len(ids), self.hidden_size), np.float32)
        self._joining.forward(np.ascontiguousarray(np.concatenate(parts, axis=1)), inputs)
        logits = torch.empty(len(logits_to_keep), self._model.facts.vocabulary)
        outputs = torch.empty(len(logits_to_keep), self.hidden_size)
        self._decoder.forward(
            input_ids.numpy(),
            position_ids.numpy(),
            logits_to_keep.numpy(),
            *step.arrays(),
            logits.numpy(),
            inputs,
            outputs.numpy(),
        )
        if len(outputs):
            normed = self._model.facts.normed_further
            passed = torch.from_numpy(self._normed(outputs.numpy(), self._last_norm)) if normed else outputs
            kept[step.next_slots()] = passed
        return DecoderOutput(logits[None])

    def _normed(self, x: native.Floats, norm: native.Floats) -> native.Floats:
        scale = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(self._model.facts.epsilon))
        found: native.Floats = (x / scale * norm).astype(np.float32)
        return found
