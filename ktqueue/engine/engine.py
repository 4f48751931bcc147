"""The engine: add requests, abort them, step. A step schedules, runs the model once, and commits.

Synchronous, one thread at a time; knows no asyncio and no Redis. Whatever the model raises goes to
the caller and leaves the engine unusable (its worker is crash-only); what is wrong with one
sequence ends that one alone.
"""

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from pathlib import Path

import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import EngineFailure, InvalidRequest, KtqueueError
from ktqueue.core.events import FinishReason, PositionLogprobs, Usage
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.core.vocabulary import Vocabulary
from ktqueue.engine.admission import Admission
from ktqueue.engine.batch import Batch, BatchBuilder
from ktqueue.engine.engine_parts import make_parts
from ktqueue.engine.gpu.device_model import device_model
from ktqueue.engine.gpu.graph_runner import Progress
from ktqueue.engine.outputs import EmittedChoice, EngineStats, SequenceOutput
from ktqueue.engine.pages import Pages
from ktqueue.engine.prepared_step import PreparedStep
from ktqueue.engine.runner import Model
from ktqueue.engine.scheduler import Plan, Scheduler
from ktqueue.engine.sequence import Request, Sequence, Status
from ktqueue.engine.step_profile import Profile, StepRecord
from ktqueue.engine.token_selector import Selection
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.kv_cache import KVLayout

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching of requests through one model.

    `model` is called as `Runner` says. `num_pages` pages of `layout` are allocated at once. A prompt
    and its completion hold at most `max_model_len` tokens. `planner` is of the attention on a device; without one all
    is done on the CPU. `progress` is told while decode steps are captured; they then hold `graph_bytes` of the device's
    memory. `clock` gives the time of `arrival` (seconds); `profile_path` takes one JSON line a step.
    """

    def __init__(
        self,
        model: Model,
        vocabulary: Vocabulary,
        layout: KVLayout,
        config: EngineConfig,
        num_pages: int,
        max_model_len: int,
        *,
        planner: AttentionPlanner | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.time,
        profile_path: Path | None = None,
    ) -> None:
        parts = make_parts(model, vocabulary, layout, config, num_pages, max_model_len, planner, progress)
        self.profile = Profile(profile_path)
        self._clock = clock
        self._page_size = layout.page_size
        self._scheduler = Scheduler(
            Pages(num_pages, parts.kv.copy_page),
            page_size=layout.page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.step_tokens,
            prefix_caching=config.enable_prefix_caching,
            batch_floor=config.batch_floor(config.max_num_seqs),
        )
        self._admission = Admission(
            vocabulary, max_model_len=max_model_len, seats=self._scheduler.seats, page_size=layout.page_size
        )
        self._builder = BatchBuilder(parts.kv)
        self._model = device_model(model)
        self._runner = parts.runner
        self._selector = parts.selector
        self.graph_bytes = parts.graph_bytes
        self._requests: dict[str, Request] = {}
        self._prepared: PreparedStep | None = None
        self._early: list[SequenceOutput] = []  # of resumed choices that had ended
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._out_of_memory = 0
        self._prepared_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests or self._early)

    @property
    def free_seqs(self) -> int:
        """Sequences that could be added and get a seat at once."""
        return max(0, self._scheduler.seats - self._scheduler.seats_taken - self._scheduler.waiting)

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        scheduler, profile = self._scheduler, self.profile
        return EngineStats(
            running=scheduler.seats_taken,
            waiting=scheduler.waiting,
            free_pages=scheduler.pages.available,
            total_pages=scheduler.pages.total,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            out_of_memory=self._out_of_memory,
            replayed_steps=self._runner.replayed,
            prepared_steps=self._prepared_steps,
            steps=profile.steps,
            schedule_seconds=profile.schedule_seconds,
            forward_seconds=profile.forward_seconds,
            sample_seconds=profile.sample_seconds,
            commit_seconds=profile.commit_seconds,
        )

    def model_stats(self) -> Mapping[str, float]:
        """What the model counts itself, by name."""
        return self._model.statistics()

    def check(self) -> None:
        """Raise AssertionError where the books don't balance. For tests: slow."""
        self._scheduler.check()

    def add(
        self,
        request_id: str,
        prompt_token_ids: Many[int],
        sampling: SamplingParams,
        *,
        job_class: JobClass = JobClass.INTERACTIVE,
        arrival: float | None = None,
        emitted: Many[EmittedChoice] = (),
    ) -> None:
        """Take a request in. `emitted[index]` is what an earlier worker journaled of that choice.

        A resumed choice goes on at the next position: its emitted tokens count for limits, penalties,
        noise and stop strings, and none is generated again. For that `sampling.seed` must be set.
        Raises InvalidRequest or ContextLengthExceeded; nothing has changed then.
        """
        if request_id in self._requests:
            raise InvalidRequest(f"request {request_id!r} is here already", param="request_id", value=request_id)
        request = self._admission.admit(
            request_id,
            prompt_token_ids,
            sampling,
            job_class=job_class,
            arrival=self._clock() if arrival is None else arrival,
            emitted=emitted,
        )
        self._requests[request_id] = request
        for sequence in request.sequences:
            choice = emitted[sequence.index] if sequence.index < len(emitted) else EmittedChoice()
            finish = sequence.resume(choice.token_ids, choice.text_length)
            if finish is not None:
                self._early.append(self._output(sequence, (), "", finish))
        unfinished = [one for one in request.sequences if one.status is not Status.FINISHED]
        if unfinished:
            leader, *leader.forks = unfinished
            self._scheduler.add(leader)
        elif not request.sequences:
            del self._requests[request_id]
            usage = self._usage(request)
            self._early.append(
                SequenceOutput(request_id=request_id, index=sampling.n - 1, request_done=True, usage=usage)
            )

    def abort(self, request_id: str) -> None:
        """Forget a request; its pages come back at once. An unknown id is no error."""
        request = self._requests.pop(request_id, None)
        self._early = [one for one in self._early if one.request_id != request_id]
        if request is not None:
            for sequence in request.sequences:
                self._scheduler.remove(sequence)

    def step(self, go_on: Callable[[], bool] = lambda: False) -> list[SequenceOutput]:
        """Run the model once over what the scheduler picks; the news of every sequence that got on.

        `go_on` is asked at the end, where the next step is at hand: whether to launch it at once, so that the device
        need not wait for the caller. Who is added from then on joins a step later than else.
        """
        outputs, self._early = self._early, []
        began = time.perf_counter()
        plan, batch, logits = self._next()
        for sequence in plan.hopeless:
            outputs.append(self._fail(sequence, self._too_long(sequence)))
        if batch is None:
            return outputs
        planned = time.perf_counter()
        if logits is None and (logits := self._execute(batch, plan)) is None:
            (sequence,) = plan.rows
            outputs.append(self._fail(sequence, EngineFailure("the device has no memory for this sequence alone")))
            return outputs
        ran = time.perf_counter()
        # From here to the wait in `select` the device is at work, and the host does what needs no token: books, the
        # sampler's numbers, the next step.
        ready = self._commit_pages(plan.rows)
        selection = self._select(logits, ready)
        self._model.after_step()
        sampled = time.perf_counter()
        for row, (_, sequence) in enumerate(ready):
            if selection.finite[row]:
                outputs.append(self._advance(sequence, selection.token_ids[row], selection.logprobs.get(row)))
            else:
                fault = EngineFailure("the model gave logits that are not finite numbers for this sequence")
                outputs.append(self._fail(sequence, fault))
        prepared = self._prepared
        if prepared is not None and prepared.quick and prepared.holds(self._scheduler.changes) and go_on():
            self._builder.tell(prepared.batch, prepared.plan.rows)
            prepared.logits = self._runner.execute(prepared.batch)
        self.profile.record(
            StepRecord(
                schedule=planned - began,
                forward=ran - planned + selection.waited,
                sample=sampled - ran - selection.waited,
                commit=time.perf_counter() - sampled,
                rows=len(plan.rows),
                sampled=len(ready),
                tokens=sum(plan.rows.values()),
            )
        )
        return outputs

    def close(self) -> None:
        """Close the profile, and what the model holds on a device."""
        if self._prepared is not None and self._prepared.logits is not None:
            self._runner.wait()
        self._model.close()
        self.profile.close()

    def _next(self) -> tuple[Plan, Batch | None, torch.Tensor | None]:
        """What to run now: the prepared step if it still holds, else what the scheduler says. Without a batch there are
        no rows; with logits it is launched."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.holds(self._scheduler.changes):
            self._prepared_steps += 1
            if prepared.logits is None:
                self._builder.tell(prepared.batch, prepared.plan.rows)
            return prepared.plan, prepared.batch, prepared.logits
        plan = self._scheduler.schedule()
        return plan, self._builder.build(plan.rows) if plan.rows else None, None

    def _prepare(self) -> None:
        """Make the next step as far as it can be known, while the device is at this one."""
        plan = self._scheduler.ahead()
        if plan is not None:
            batch = self._builder.build(plan.rows)
            quick = self._runner.prepare(batch)
            self._prepared = PreparedStep(plan, batch, self._scheduler.changes, quick)

    def _execute(self, batch: Batch, plan: Plan) -> torch.Tensor | None:
        """Run the model. While the device has too little memory for it, with half of the rows; None: not even for one,
        which is all that is left in the plan."""
        while True:
            try:
                return self._runner.execute(batch)
            except torch.OutOfMemoryError as error:
                log.warning("a step of %d rows and %d tokens: %s", len(plan.rows), plan.tokens, error)
            # Only here, where the exception no longer holds the tensors of the step, can their memory be had.
            self._out_of_memory += 1
            torch.cuda.empty_cache()
            if not self._scheduler.shrink(plan):
                return None
            batch = self._builder.build(plan.rows)

    def _select(self, logits: torch.Tensor, ready: Many[tuple[int, Sequence]]) -> Selection:
        """Tokens for those that get one, in halves while the device has too little memory."""
        if not ready:
            began = time.perf_counter()
            self._runner.wait()
            return Selection([], [], {}, time.perf_counter() - began)
        try:
            rows, sequences = [row for row, _ in ready], [sequence for _, sequence in ready]
            return self._selector.select(logits, rows, sequences, self._prepare)
        except torch.OutOfMemoryError as error:
            if len(ready) == 1:
                raise
            log.warning("choosing %d tokens: %s", len(ready), error)
        self._out_of_memory += 1
        torch.cuda.empty_cache()
        half = len(ready) // 2
        return self._select(logits, ready[:half]).joined(self._select(logits, ready[half:]))

    def _commit_pages(self, rows: dict[Sequence, int]) -> list[tuple[int, Sequence]]:
        """Book what was computed; the sequences that get a token now, each with its row of the logits."""
        ready = []
        row = 0
        for sequence, count in rows.items():
            if sequence.status is not Status.RUNNING:  # aborted since the step was launched, in which it decodes
                row += 1
                continue
            self._prompt_tokens += max(0, min(count, len(sequence.request.prompt) - sequence.computed))
            forks = self._scheduler.commit(sequence, count)
            if sequence.remaining == 0:
                ready.append((row, sequence))
                ready += [(row, fork) for fork in forks if fork.remaining == 0]
                row += 1
        return ready

    def _advance(self, sequence: Sequence, token_id: int, told: PositionLogprobs | None) -> SequenceOutput:
        self._generation_tokens += 1
        text, finish = sequence.advance(token_id)
        return self._output(sequence, (token_id,), text, finish, () if told is None else (told,))

    def _output(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        text: str,
        finish: FinishReason | None,
        told: tuple[PositionLogprobs, ...] = (),
    ) -> SequenceOutput:
        if sequence.resumed_text:
            text = sequence.resumed_text + text
            sequence.resumed_text = ""
        request = sequence.request
        done = False
        if finish is not None:
            done = self._end(sequence)
        return SequenceOutput(
            request_id=request.id,
            index=sequence.index,
            token_ids=token_ids,
            text=text,
            logprobs=told,
            finish_reason=finish,
            request_done=done,
            usage=self._usage(request) if done else None,
        )

    def _fail(self, sequence: Sequence, fault: KtqueueError) -> SequenceOutput:
        request = sequence.request
        done = self._end(sequence)
        return SequenceOutput(
            request_id=request.id,
            index=sequence.index,
            error=fault.info(),
            request_done=done,
            usage=self._usage(request) if done else None,
        )

    def _end(self, sequence: Sequence) -> bool:
        """The choice has ended. Whether its request is done by that."""
        request = sequence.request
        self._scheduler.remove(sequence)
        request.open -= 1
        if request.open:
            return False
        del self._requests[request.id]
        return True

    def _usage(self, request: Request) -> Usage:
        return Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=request.completion_tokens,
            cached_tokens=request.cached_tokens or 0,
        )

    def _too_long(self, sequence: Sequence) -> EngineFailure:
        capacity = self._scheduler.pages.total * self._page_size
        return EngineFailure(
            f"this sequence has {sequence.length} tokens, the whole cache of this worker holds {capacity}",
            limit=capacity,
            value=sequence.length,
        )
