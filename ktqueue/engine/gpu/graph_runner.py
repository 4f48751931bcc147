"""Runs a model on a device. Decode steps replay a captured step where that is faster, and so do steps with short
prompts, if the model allows it. All other steps run eagerly.

A captured step has a fixed size: see decode_bucket.py and prompt_bucket.py. Before each launch, the attention planner
plans the step on the host.
"""

from collections.abc import Callable, Generator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext

import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.gpu.capture_choice import CaptureChoice
from ktqueue.engine.gpu.decode_bucket import DecodeBucket
from ktqueue.engine.gpu.device_model import OverlappingModel, StreamingModel, can_overlap
from ktqueue.engine.gpu.graph_capture import Capturer
from ktqueue.engine.gpu.parted_step import PartedStep
from ktqueue.engine.gpu.prompt_bucket import PromptBucket
from ktqueue.engine.logits import Logits, LogitsInParts
from ktqueue.engine.memory_plan import SAMPLED_ROWS
from ktqueue.engine.runner import DeviceTokens, LaunchedStep, Model
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.staging import Staging
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext, StepInputs, result_of

Progress = Callable[[int, int, str], None]
"""progress(done, total, description)"""

_FIRST_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_BUCKET_STEP = 64  # beyond them
MOST_CAPTURED_ROWS = 256
"""Larger steps run eagerly: the device computes longer than the host launches, and each capture takes memory."""


def buckets_up_to(rows: int) -> list[int]:
    """The row counts that decode steps are padded to, in rising order. The last is `rows`, if steps may be so large."""
    last = min(rows, MOST_CAPTURED_ROWS)
    below = [*_FIRST_BUCKETS, *range(_FIRST_BUCKETS[-1] + _BUCKET_STEP, last, _BUCKET_STEP)]
    return [count for count in below if count < last] + [last]


class GraphRunner:
    """Runner of a model on `device`, with attention by `planner`.

    `buckets`: row counts of decode steps to capture; `prompts`: token counts of steps with prompts. The largest are
    captured first. Without any, every step runs eagerly; with any, `kv` needs a scratch page. `max_pages`: the most
    pages of a row. `progress` is called after each capture. `overlaps`: whether steps may be overlapped, if the model
    allows it, for which inputs and plans of their own take memory.
    """

    def __init__(
        self,
        model: Model,
        vocab: int,
        kv: KVCache,
        planner: AttentionPlanner,
        capturer: Capturer,
        *,
        device: str,
        buckets: list[int],
        max_pages: int,
        prompts: Many[int] = (),
        progress: Progress | None = None,
        overlaps: bool = False,
    ) -> None:
        self._model = model
        self._vocab = vocab
        self._planner = planner
        self._device = torch.device(device)
        self._staging = Staging(device)
        self._parted = model if isinstance(model, OverlappingModel) else None
        self._overlapped_inputs = (Staging(device), planner.another()) if overlaps and can_overlap(model) else None
        self._fast = torch.cuda.Stream(device, priority=-1) if is_gpu(device) else None  # type: ignore[no-untyped-call]
        self._prepared: Batch | None = None
        self._streams = model.streams if isinstance(model, StreamingModel) else _never
        self._choice = CaptureChoice()
        # Of the current step, and of the next if it is launched already: the rows of its bucket and whether it ran
        # eagerly. None if it needs no choice.
        self._ways: list[tuple[int, bool] | None] = []
        self.replayed = 0
        captures = len(prompts) + len(buckets)
        before = capturer.used_bytes() if captures else 0
        sizes = max_pages, kv, planner, device
        with torch.inference_mode():
            of_prompts = [PromptBucket(tokens, *sizes) for tokens in sorted(prompts, reverse=True)]
            of_decode = [DecodeBucket(rows, *sizes) for rows in sorted(buckets, reverse=True)]
            self.prompt_buckets, self.buckets = of_prompts[::-1], of_decode[::-1]
            in_order: list[PromptBucket | DecodeBucket] = [*of_prompts, *of_decode]
            capturer.compile(bucket.padding_step(self._forward) for bucket in in_order)
            for done, bucket in enumerate(in_order, start=1):
                bucket.replay = capturer.capture(bucket.padding_step(self._forward))
                if progress is not None:
                    progress(done, captures, "prompt graphs" if done <= len(prompts) else "decode graphs")
        self.graph_bytes = (
            max(0, capturer.used_bytes() - before) if captures else 0
        )  # other memory may have been freed meanwhile
        """Device memory of the captured steps, in bytes."""

    def execute(self, batch: Batch, tokens: DeviceTokens | None = None) -> Logits:
        """See Runner."""
        with torch.inference_mode():
            prepared, self._prepared = self._prepared, None
            bucket = self._bucket(batch)
            compared = bucket is not None and self._streams(bucket.rows)
            eager = bucket is None or (prepared is not batch and compared and self._choice.is_eager(bucket.rows))
            way = (bucket.rows, eager) if bucket is not None and compared else None
            self._ways = [way] if tokens is None else [*self._ways[:1], way]
            if bucket is None or eager:
                assert tokens is None, "the batch is not prepared"
                if bucket is None and (prompts := self._prompt_bucket(batch)) is not None:
                    self.replayed += 1
                    return prompts.run(batch)
                return self._eager(batch)
            if prepared is not batch:
                bucket.prepare(batch)
            self.replayed += 1
            return bucket.run(batch, tokens)

    def prepare(self, batch: Batch) -> bool:
        """See Runner. Eager steps are not prepared."""
        with torch.inference_mode():
            bucket = self._bucket(batch)
            if bucket is None or (self._streams(bucket.rows) and self._choice.is_eager(bucket.rows)):
                return False
            bucket.prepare(batch)
            self._prepared = batch
            return True

    @property
    def may_overlap(self) -> bool:
        """See OverlappingRunner."""
        return self._parted is not None and self._overlapped_inputs is not None and self._parted.may_overlap

    def begin(self, batch: Batch) -> PartedStep:
        """See OverlappingRunner."""
        assert self._overlapped_inputs is not None, "this model's steps cannot be overlapped"
        step = PartedStep(self._in_parts(batch, *self._overlapped_inputs, overlapped=True), self._device)
        if self._fast is not None:
            self._fast.wait_stream(torch.cuda.current_stream(self._device))
        return step

    def beside(self) -> AbstractContextManager[object]:
        """See OverlappingRunner."""
        return nullcontext() if self._fast is None else torch.cuda.stream(self._fast)

    def execute_beside(self, batch: Batch, overlapped: LaunchedStep) -> Logits:
        """See OverlappingRunner."""
        with torch.inference_mode():
            bucket = self._bucket(batch)
            if bucket is not None:
                self._prepared = None
                bucket.prepare(batch)
                self.replayed += 1
                return bucket.run(batch)
        step = PartedStep(self._in_parts(batch, self._staging, self._planner, overlapped=False), self._device)
        while step.launch():
            overlapped.keep_ahead()
        assert step.logits is not None
        return step.logits

    def end_overlap(self) -> None:
        """See OverlappingRunner."""
        assert self._parted is not None
        if self._fast is not None:  # pages may have been copied there for a step that was not planned after all
            torch.cuda.current_stream(self._device).wait_stream(self._fast)
        self._parted.end_overlap()

    def wait(self) -> None:
        """See Runner."""
        if is_gpu(self._device):
            torch.cuda.current_stream(self._device).synchronize()

    def learn(self, seconds: float) -> None:
        """See Runner."""
        way = self._ways.pop(0) if self._ways else None
        if way is not None:
            rows, eager = way
            self._choice.learn(rows, eager=eager, seconds=seconds)

    def _bucket(self, batch: Batch) -> DecodeBucket | None:
        """The smallest bucket for a decode step, or None if there is none."""
        rows = batch.scored.shape[0]
        return next((bucket for bucket in self.buckets if bucket.rows >= rows), None) if batch.decodes else None

    def _prompt_bucket(self, batch: Batch) -> PromptBucket | None:
        """The smallest bucket for a step with prompts, or None if it runs eagerly."""
        if batch.decodes:
            return None
        return next((bucket for bucket in self.prompt_buckets if bucket.holds(batch)), None)

    def _eager(self, batch: Batch) -> Logits:
        try:
            if self._parted is not None and len(batch.scored) > SAMPLED_ROWS:
                return result_of(self._in_parts(batch, self._staging, self._planner, overlapped=False))
            return self._forward(*self._staged(batch, self._staging, self._planner))
        except torch.OutOfMemoryError:
            if is_gpu(self._device):  # experts may be on their way to memory that the next step fetches others to
                torch.cuda.synchronize(self._device)
            raise

    def _in_parts(
        self, batch: Batch, staging: Staging, planner: AttentionPlanner, *, overlapped: bool
    ) -> Generator[None, None, Logits]:
        """Launch an eager step a layer at a time. Returns the logits [scored, vocab]. They are computed when they are
        sampled, if there are more rows than are sampled at once."""
        model, vocab = self._parted, self._vocab
        assert model is not None
        inputs = self._staged(batch, staging, planner)
        x = yield from model.forward_in_parts(inputs, overlapped=overlapped)

        def head(x: torch.Tensor) -> torch.Tensor:
            return model.logits(x)[:, :vocab].float()

        return LogitsInParts(x, head, vocab) if len(x) > SAMPLED_ROWS else head(x)

    @staticmethod
    def _staged(batch: Batch, staging: Staging, planner: AttentionPlanner) -> StepInputs:
        """The inputs of the batch, on the device."""
        host = batch.step
        tensors = [batch.input_ids, batch.position_ids, batch.scored, host.query_starts, host.context_lengths]
        tensors += [host.page_table, host.slot_mapping, host.state_sources, host.state_targets]
        staged = staging.put([tensor.numpy() for tensor in tensors])
        input_ids, position_ids, scored, starts, contexts, table, slots, sources, targets = staged
        plan = planner.plan(host)
        step = StepContext(starts, contexts, table, slots, host.kv, plan, state_sources=sources, state_targets=targets)
        return StepInputs(input_ids, position_ids, scored, step)

    def _forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, scored: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=scored, step=step
        ).logits
        return logits[0, :, : self._vocab].float()


def _never(tokens: int) -> bool:
    return False
