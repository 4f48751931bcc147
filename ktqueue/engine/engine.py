"""The engine: add requests, abort them, step. A step schedules, runs the model once, samples and postprocesses.

It is synchronous, used by one thread at a time, and knows neither asyncio nor Redis. An error of the model is passed
to the caller and leaves the engine unusable: the worker then exits. An error of one sequence ends only that sequence.
"""

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many

import torch

from ktqueue.answers.grammar import Matcher
from ktqueue.answers.grammar_errors import GrammarFailed
from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import EngineFailure
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.core.tenants import NOBODY, Owner
from ktqueue.core.vocabulary import Vocabulary
from ktqueue.engine.admission import Admission
from ktqueue.engine.batch import Batch, BatchBuilder
from ktqueue.engine.batch_loss import BatchLoss
from ktqueue.engine.draft_model import DraftSource
from ktqueue.engine.drafts import Drafts
from ktqueue.engine.engine_parts import EngineParts, make_parts
from ktqueue.engine.gpu.device_model import device_model
from ktqueue.engine.gpu.graph_runner import Progress
from ktqueue.engine.logits import Logits
from ktqueue.engine.outputs import EmittedChoice, EngineStats, SequenceOutput
from ktqueue.engine.overlap import Overlap
from ktqueue.engine.pages import Pages
from ktqueue.engine.prepared_step import MayLaunch, NextStep, never
from ktqueue.engine.request_table import RequestTable, usage_of
from ktqueue.engine.routing_recorder import RoutingRecorder
from ktqueue.engine.rows import Rows
from ktqueue.engine.runner import Model
from ktqueue.engine.scheduler import MAX_PROMPT_ROWS, Scheduler
from ktqueue.engine.shared_steps import SharedSteps
from ktqueue.engine.states import States
from ktqueue.engine.step_costs import StepCosts
from ktqueue.engine.step_plan import StepPlan
from ktqueue.engine.step_recorder import StepRecorder, StepTimes, name_parts
from ktqueue.engine.step_results import StepResults
from ktqueue.engine.step_sampler import Ready, StepSampler
from ktqueue.engine.token_masks import TokenMasks
from ktqueue.engine.token_selector import Meanwhile, TokenSelection, do_nothing
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.operators.named_ranges import NamedRange
from ktqueue.profiling.records import StepMoments
from ktqueue.profiling.writer import RecordWriter

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching of requests through one model.

    `model` is called as described in `runner.Model`. `num_pages` pages of `layout` are allocated at once. A prompt and
    its completion have at most `max_model_len` tokens. `planner` plans attention on a device; without it everything
    runs on the CPU. `progress` is called while steps are captured, which then take `graph_bytes` of device
    memory. Instead of these two, the result of `make_parts` can be given as `parts`. `clock` gives the default
    `arrival` in seconds. `max_prompt_rows`: see `Scheduler`. `auto_rows`: see `Rows`. `draft`: see `make_parts`.
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
        parts: EngineParts | None = None,
        planner: AttentionPlanner | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.time,
        max_prompt_rows: int = MAX_PROMPT_ROWS,
        auto_rows: bool = False,
        draft: DraftSource | None = None,
    ) -> None:
        sizes = num_pages, max_model_len
        parts = parts or make_parts(model, vocabulary, layout, config, *sizes, planner, progress, draft)
        self._times = StepTimes()
        self.recorder: StepRecorder | None = None  # of a profile: see `start_profile`
        self.routing: RoutingRecorder | None = None
        self._clock = clock
        self.costs = StepCosts(config.step_tokens)
        """What a step costs: the scheduler learns it from each step, and from probes before the first."""
        self._rows = Rows(
            Pages(num_pages, parts.copy_page),
            page_size=layout.page_size,
            max_num_seqs=min(config.rows, config.step_tokens),  # every decode row must fit into a step
            prefix_caching=config.enable_prefix_caching,
            batch_floor=config.batch_floor(config.rows),
            costs=self.costs,
            auto_rows=auto_rows,
            states=States(parts.kv.slots) if layout.linear else None,
        )
        self.drafts = Drafts(self._rows, self.costs, config.max_draft_tokens, parts.draft_model)
        """Adds drafts to steps, if the parts and the settings allow it."""
        drafts = self.drafts if parts.may_draft else None
        self._scheduler = Scheduler(
            self._rows,
            SharedSteps(self.costs, config.interactive_step_seconds, config.interactive_share),
            self.costs,
            max_num_batched_tokens=config.step_tokens,
            max_prompt_rows=max_prompt_rows,
            original_length=layout.original_length,
            drafts=drafts,
        )
        self._admission = Admission(
            vocabulary,
            max_model_len=max_model_len,
            max_num_seqs=self._rows.max_num_seqs,
            page_size=layout.page_size,
            original_length=layout.original_length,
        )
        self._builder = BatchBuilder(parts.kv, drafts_apart=parts.drafts_apart)
        self._model = device_model(model)
        self._runner = parts.runner
        self._masks = TokenMasks(vocabulary.size, vocabulary.eos_token_ids, check_greedy=parts.check_greedy)
        self.graph_bytes = parts.graph_bytes
        self._requests = RequestTable(self._rows.remove, vocabulary.token_bytes, parts.least_jump)
        self._next = NextStep(self._rows, self._scheduler, self._builder, self._runner, self._masks, drafts)
        self._sampler = StepSampler(parts.selector, self._masks, self._next)
        self._early_outputs: list[SequenceOutput] = []  # of resumed choices that have nothing left to compute
        self._results = StepResults(self._rows, self._requests, self.drafts, vocabulary.special_token_bytes)
        loss = BatchLoss(config.interactive_share)
        self._overlap = Overlap(self._rows, self._scheduler, self._builder, self._runner, loss)
        self._out_of_memory = 0
        self._before_reset: EngineStats | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests or self._early_outputs)

    def stats(self) -> EngineStats:
        """A snapshot of gauges, and of counters since the last reset."""
        return self._stats() if self._before_reset is None else self._stats().since(self._before_reset)

    def reset_statistics(self) -> None:
        """Let all counters begin again at 0. For probes before the first request."""
        self._before_reset = self._stats()

    def _stats(self) -> EngineStats:
        rows, times = self._rows, self._times
        return EngineStats(
            running=rows.rows_taken,
            waiting=rows.num_waiting,
            over_share=rows.num_over_share,
            rows_limit=rows.max_num_seqs,
            rows_wanted=rows.rows_wanted,
            rows_left_out=self._scheduler.rows_left_out,
            rows_held_by=self._scheduler.rows_held_by,
            free_pages=rows.pages.available,
            total_pages=rows.pages.total,
            prompt_tokens=self._results.prompt_tokens,
            generation_tokens=self._results.generation_tokens,
            batch_tokens=self._results.batch_tokens,
            preemptions=rows.preemptions,
            prefix_queries=rows.prefixes.queries,
            prefix_hits=rows.prefixes.hits,
            out_of_memory=self._out_of_memory + self._sampler.out_of_memory + self._overlap.out_of_memory,
            replayed_steps=self._runner.replayed,
            prepared_steps=self._next.taken,
            steps_ahead=self._next.ahead,
            overlapped_steps=self._overlap.steps,
            drafted_tokens=self.drafts.drafted,
            accepted_tokens=self.drafts.accepted,
            steps=times.steps,
            schedule_seconds=times.schedule,
            forward_seconds=times.forward,
            sample_seconds=times.sample,
            commit_seconds=times.commit,
        )

    def model_stats(self) -> Mapping[str, float]:
        """The model's own counters by name."""
        return self._model.statistics()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent. For tests: slow."""
        self._rows.check()

    def add(
        self,
        request_id: str,
        prompt_token_ids: Many[int],
        sampling: SamplingParams,
        *,
        job_class: JobClass = JobClass.INTERACTIVE,
        arrival: float | None = None,
        emitted: Many[EmittedChoice] = (),
        prompt_entries: int = 0,
        bad_words: Many[Many[int]] = (),
        matcher: Matcher | None = None,
        owner: Owner = NOBODY,
    ) -> None:
        """Add a request. `emitted[index]` is what an earlier worker wrote to the journal for that choice.

        `prompt_entries`: number of prompt tokens whose log probabilities are in the journal. `bad_words`: token ids of
        each spelling of the words that must not appear. `matcher`: at the beginning of the grammar of each choice.

        A resumed choice continues at the next position. Its emitted tokens count for limits, penalties, noise and stop
        strings, and are not generated again, for which `sampling.seed` must be set. Raises InvalidRequest,
        ContextLengthExceeded or GrammarFailed, and then nothing has changed.
        """
        self._requests.check_is_new(request_id)
        request = self._admission.admit(
            request_id,
            prompt_token_ids,
            sampling,
            job_class=job_class,
            arrival=self._clock() if arrival is None else arrival,
            emitted=emitted,
            prompt_entries=prompt_entries,
            bad_words=bad_words,
            matcher=matcher,
            owner=owner,
        )
        if request.sequences:
            self._requests.add(request)
        if sampling.prompt_logprobs is not None and request.sequences and not request.prompt_entries:
            request.prompt_entries = 1
            self._early_outputs.append(SequenceOutput(request_id=request_id, index=0, prompt_logprobs=(None,)))
        for sequence in request.sequences:
            choice = emitted[sequence.index] if sequence.index < len(emitted) else EmittedChoice()
            try:
                finish = sequence.resume(choice.token_ids, choice.text_length)
            except GrammarFailed:
                self.abort(request_id)
                raise
            if finish is not None:
                self._early_outputs.append(self._requests.output(sequence, (), "", finish))
        if unfinished := [choice for choice in request.sequences if choice.is_unfinished]:
            leader, *leader.forks = unfinished
            self._rows.add(leader)
        elif not request.sequences:
            usage = usage_of(request)
            self._early_outputs.append(
                SequenceOutput(request_id=request_id, index=sampling.n - 1, request_done=True, usage=usage)
            )

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages at once. An unknown id is ignored."""
        if self._overlap.computes(request_id):
            self._early_outputs += self._finish_overlapped()
        self._early_outputs = [output for output in self._early_outputs if output.request_id != request_id]
        self._requests.abort(request_id)

    def step(self, launch_next: MayLaunch = never) -> list[SequenceOutput]:
        """Run the model once on the rows that the scheduler picks. Returns what each sequence gained.

        `launch_next` says whether to launch the next step now, so that the device need not wait for the caller. It is
        called once that step is prepared, and again when this step is done. Requests added after it agreed join one
        step later.
        """
        outputs, self._early_outputs = self._early_outputs, []
        if self._overlap.is_wanted(self._next):
            return outputs + self._overlapping_step()
        started = time.monotonic()
        prepared = self._next.take()
        plan = prepared.plan if prepared else self._scheduler.schedule()
        outputs += [self._requests.fail(sequence, self._rows.too_long(sequence)) for sequence in plan.can_never_run]
        if not plan.rows:
            return outputs
        self._scheduler.begin(plan)
        planned = time.monotonic()
        batch = prepared.batch if prepared else self._builder.build(plan.rows, plan.drafts)
        built = time.monotonic()
        is_launched = prepared is not None and prepared.logits is not None
        began, logits = (prepared.launched, prepared.logits) if prepared and is_launched else (built, None)
        if logits is None:
            batch, logits = self._run_model(batch, plan)
        if logits is None:
            fault = EngineFailure("not enough GPU memory to run this sequence, even alone")
            return [*outputs, *(self._requests.fail(sequence, fault) for sequence in plan.rows)]
        launched = time.monotonic()
        # The device computes until `_sample` waits for it. Meanwhile the host does what needs no new token.
        ready, complete = self._results.commit(plan, batch)
        committed = time.monotonic()
        ahead = None if plan.drafts else never if batch.prompts or self.routing else launch_next  # read below
        selection = self._sample(logits, ready, ahead)
        self._model.after_step()
        if self.routing is not None:
            self.routing.add(batch, ready)
        sampled = time.monotonic()
        self.costs.observe(plan.tokens, sampled - began)
        self._runner.learn(sampled - began)
        outputs += self._results.outputs(plan, batch, logits, ready, complete, selection)
        self.drafts.learn(plan, began, sampled, has_more=bool(self._requests))
        written = time.monotonic()
        self._next.launch(launch_next, redrawn=selection.redrawn)
        times = started, planned, built, launched, committed, sampled, written, time.monotonic(), selection.waited
        self._record(times, plan, ready)
        return outputs

    def _overlapping_step(self) -> list[SequenceOutput]:
        """Run a step of the interactive class while one of the batch class runs, which begins here if none does.

        Returns what the sequences gained, those of the batch class once their step is done.
        """
        overlap, ran = self._overlap, None
        plan, impossible = overlap.plan()
        outputs = [self._requests.fail(sequence, self._rows.too_long(sequence)) for sequence in impossible]
        try:
            overlap.begin()
            with overlap.beside():
                if plan.rows:
                    ran = overlap.run(plan)
                elif not overlap.is_done:
                    overlap.wait_a_moment()
        except torch.OutOfMemoryError:
            overlap.is_out_of_memory = True
        if ran is not None:
            with overlap.beside():
                outputs += self._complete(plan, *ran)
        if overlap.is_out_of_memory:
            overlap.give_up()
        return outputs + (self._finish_overlapped() if overlap.is_done else [])

    def _finish_overlapped(self) -> list[SequenceOutput]:
        """Wait for the step of the batch class, if one runs. Returns what its sequences gained."""
        overlapped = self._overlap.finish()
        return [] if overlapped is None else self._complete(*overlapped)

    def _complete(self, plan: StepPlan, batch: Batch, logits: Logits, began: float) -> list[SequenceOutput]:
        """Choose the tokens of a step that overlaps another or is overlapped. Returns what its sequences gained."""
        launched = time.monotonic()
        self._masks.begin(plan.rows)
        ready, complete = self._results.commit(plan, batch)
        committed = time.monotonic()
        selection = self._sample(logits, ready, None, self._overlap.launch_more)
        self._model.after_step()
        sampled = time.monotonic()
        outputs = self._results.outputs(plan, batch, logits, ready, complete, selection)
        times = began, began, began, launched, committed, sampled, *2 * (time.monotonic(),), selection.waited
        self._record(times, plan, ready)
        return outputs

    def _record(self, times: tuple[float, ...], plan: StepPlan, ready: Ready) -> None:
        """Count the time of a step's parts, and write them to the profile."""
        self._times.add(moments := StepMoments(*times))
        if self.recorder is not None:
            sampled, prompt_tokens = sum(not ahead for _, _, ahead in ready), self._results.prompt_tokens
            self.recorder.record(moments, plan, sampled=sampled, prompt_tokens=prompt_tokens)

    def forget_grammars(self) -> None:
        """Release the memory of grammars whose answers have ended, which the next step would release."""
        self._masks.forget()

    def close(self) -> None:
        """Release what the model has on a device. No step follows."""
        self._next.close()
        self._overlap.close()
        self._masks.close()
        self.drafts.close()
        self._model.close()

    def start_profile(self, writer: RecordWriter, routing_seconds: float, named: NamedRange | None = None) -> None:
        """Record every step from now on, and run its parts inside `named` ranges. The caller closes the writer."""
        parts = self._model, self._rows.pages, self._runner, self._next, self._results.prompt_tokens
        self.recorder = StepRecorder(writer, routing_seconds, *parts)
        if named is not None:
            name_parts(named, self._scheduler, self._builder, self._runner, self._sampler)

    def _run_model(self, batch: Batch, plan: StepPlan) -> tuple[Batch, Logits | None]:
        """Run the model, and halve the rows while the device is out of memory.

        Returns the batch that ran and its logits, or None if one row is still too much. That row is then the only one
        in `plan`. Without rows, all wait for a later step.
        """
        self._masks.begin(plan.rows, plan.drafts)
        while True:
            try:
                return batch, self._runner.execute(batch)
            except torch.OutOfMemoryError as error:
                log.warning("out of memory in a step of %d rows and %d tokens: %s", len(plan.rows), plan.tokens, error)
            # Outside the handler: the exception kept the tensors of the step alive.
            self._out_of_memory += 1
            torch.cuda.empty_cache()
            if not self._scheduler.shrink(plan) or not plan.rows:
                return batch, None
            batch = self._builder.build(plan.rows, plan.drafts)

    def _sample(
        self, logits: Logits, ready: Ready, launch_next: MayLaunch | None, meanwhile: Meanwhile = do_nothing
    ) -> TokenSelection:
        """Choose a token for each ready sequence. Without any, wait for the device. See StepSampler.sample."""
        if ready:
            return self._sampler.sample(logits, ready, launch_next, meanwhile)
        started = time.perf_counter()
        self._runner.wait()
        return TokenSelection([], [], {}, waited=time.perf_counter() - started)
