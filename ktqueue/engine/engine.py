"""The engine: add requests, abort them, step. A step schedules, runs the model once, samples and postprocesses.

It is synchronous, used by one thread at a time, and knows neither asyncio nor Redis. An error of the model is passed
to the caller and leaves the engine unusable: the worker then exits. An error of one sequence ends only that sequence.
"""

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from pathlib import Path

import torch

from ktqueue.answers.grammar import GrammarFailed, Matcher
from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import EngineFailure
from ktqueue.core.events import FinishReason
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.core.vocabulary import Vocabulary
from ktqueue.engine.admission import Admission
from ktqueue.engine.batch import Batch, BatchBuilder
from ktqueue.engine.engine_parts import EngineParts, make_parts
from ktqueue.engine.gpu.device_model import device_model
from ktqueue.engine.gpu.graph_runner import Progress
from ktqueue.engine.outputs import EmittedChoice, EngineStats, SequenceOutput
from ktqueue.engine.pages import Pages
from ktqueue.engine.prepared_step import PreparedStep
from ktqueue.engine.prompt_logprobs import prompt_logprobs
from ktqueue.engine.request_table import RequestTable, no_token, usage_of
from ktqueue.engine.runner import Model
from ktqueue.engine.scheduler import MAX_PROMPT_ROWS, Scheduler, StepPlan
from ktqueue.engine.sequence import Sequence, SequenceStatus
from ktqueue.engine.states import States
from ktqueue.engine.step_profile import Profile, StepRecord
from ktqueue.engine.token_masks import TokenMasks
from ktqueue.engine.token_selector import TokenSelection
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.kv_cache import KVLayout

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching of requests through one model.

    `model` is called as described in `runner.Model`. `num_pages` pages of `layout` are allocated at once. A prompt and
    its completion have at most `max_model_len` tokens. `planner` plans attention on a device; without it everything
    runs on the CPU. `progress` is called while decode steps are captured, which then take `graph_bytes` of device
    memory. Instead of these two, the result of `make_parts` can be given as `parts`. `clock` gives the default
    `arrival` in seconds. `profile_path` is a file that gets one JSON line per step. `max_prompt_rows`: see
    `Scheduler`.
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
        profile_path: Path | None = None,
        max_prompt_rows: int = MAX_PROMPT_ROWS,
    ) -> None:
        parts = parts or make_parts(model, vocabulary, layout, config, num_pages, max_model_len, planner, progress)
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
            max_prompt_rows=max_prompt_rows,
            states=States(parts.kv.slots) if layout.linear else None,
        )
        self._admission = Admission(
            vocabulary,
            max_model_len=max_model_len,
            max_num_seqs=self._scheduler.max_num_seqs,
            page_size=layout.page_size,
            original_length=layout.original_length,
        )
        self._builder = BatchBuilder(parts.kv)
        self._special_token_bytes = vocabulary.special_token_bytes
        self._model = device_model(model)
        self._runner = parts.runner
        self._selector = parts.selector
        self._masks = TokenMasks(vocabulary.size, vocabulary.eos_token_ids, check_greedy=parts.check_greedy)
        self.graph_bytes = parts.graph_bytes
        self._requests = RequestTable(self._scheduler.remove, vocabulary.token_bytes, parts.least_jump)
        self._prepared: PreparedStep | None = None
        self._early_outputs: list[SequenceOutput] = []  # of resumed choices that have nothing left to compute
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._out_of_memory = 0
        self._prepared_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests or self._early_outputs)

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        scheduler, profile = self._scheduler, self.profile
        return EngineStats(
            running=scheduler.rows_taken,
            waiting=scheduler.num_waiting,
            free_pages=scheduler.pages.available,
            total_pages=scheduler.pages.total,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefixes.queries,
            prefix_hits=scheduler.prefixes.hits,
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
        """The model's own counters by name."""
        return self._model.statistics()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent. For tests: slow."""
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
        prompt_entries: int = 0,
        bad_words: Many[Many[int]] = (),
        matcher: Matcher | None = None,
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
        unfinished = [choice for choice in request.sequences if choice.status is not SequenceStatus.FINISHED]
        if unfinished:
            leader, *leader.forks = unfinished
            self._scheduler.add(leader)
        elif not request.sequences:
            usage = usage_of(request)
            self._early_outputs.append(
                SequenceOutput(request_id=request_id, index=sampling.n - 1, request_done=True, usage=usage)
            )

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages at once. An unknown id is ignored."""
        self._early_outputs = [output for output in self._early_outputs if output.request_id != request_id]
        self._requests.abort(request_id)

    def step(self, launch_next: Callable[[], bool] = lambda: False) -> list[SequenceOutput]:
        """Run the model once on the rows that the scheduler picks. Returns what each sequence gained.

        `launch_next` is called once the next step is ready and says whether to launch it now, so that the device need
        not wait for the caller. Requests added after that join one step later.
        """
        outputs, self._early_outputs = self._early_outputs, []
        started = time.perf_counter()
        plan, batch, logits = self._schedule()
        outputs += [self._requests.fail(sequence, self._too_long(sequence)) for sequence in plan.can_never_run]
        if batch is None:
            return outputs
        scheduled = time.perf_counter()
        if logits is None:
            batch, logits = self._run_model(batch, plan)
        if logits is None:
            fault = EngineFailure("not enough GPU memory to run this sequence, even alone")
            return [*outputs, *(self._requests.fail(sequence, fault) for sequence in plan.rows)]
        launched = time.perf_counter()
        # The device computes until `_sample` waits for it. Meanwhile the host does what needs no new token: it commits
        # pages, collects the sampler's numbers and prepares the next step.
        ready, complete = self._commit_computed_tokens(plan)
        selection = self._sample(logits if batch.next_rows is None else logits[batch.next_rows], ready)
        self._model.after_step()
        sampled = time.perf_counter()
        outputs += self._score_prompts(batch, logits) if batch.prompts else []
        outputs += self._postprocess(ready, selection)
        outputs += [
            self._requests.output(sequence, (), "", FinishReason.LENGTH) for sequence in complete if _runs(sequence)
        ]
        self._launch_prepared_step(launch_next)
        self.profile.record(
            StepRecord(
                schedule=scheduled - started,
                forward=launched - scheduled + selection.waited,
                sample=sampled - launched - selection.waited,
                commit=time.perf_counter() - sampled,
                rows=len(plan.rows),
                sampled=len(ready),
                tokens=plan.tokens,
            )
        )
        return outputs

    def close(self) -> None:
        """Close the profile and release what the model has on a device. No step follows."""
        if self._prepared is not None and self._prepared.logits is not None:
            self._runner.wait()
        self._masks.close()
        self._model.close()
        self.profile.close()

    def _schedule(self) -> tuple[StepPlan, Batch | None, torch.Tensor | None]:
        """The prepared step if it is still valid, else a new plan.

        The batch is None if no sequence runs. The logits are given if the step is launched already.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.is_next(self._scheduler.schedule_version):
            self._prepared_steps += 1
            if prepared.logits is None:
                self._builder.write_token_ids(prepared.batch, prepared.plan.rows)
            return prepared.plan, prepared.batch, prepared.logits
        plan = self._scheduler.schedule()
        return plan, self._builder.build(plan.rows) if plan.rows else None, None

    def _run_model(self, batch: Batch, plan: StepPlan) -> tuple[Batch, torch.Tensor | None]:
        """Run the model, and halve the rows while the device is out of memory.

        Returns the batch that ran and its logits, or None if one row is still too much. That row is then the only one
        in `plan`. Without rows, all wait for a later step.
        """
        self._masks.begin(plan.rows)
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
            batch = self._builder.build(plan.rows)

    def _commit_computed_tokens(self, plan: StepPlan) -> tuple[list[tuple[int, Sequence]], list[Sequence]]:
        """Record which tokens the step computes.

        Returns the sequences that get a token, with their rows of logits, and those that end with their prompt.
        """
        ready, complete = [], []
        row = 0
        for sequence, count in plan.rows.items():
            if sequence.status is not SequenceStatus.RUNNING:  # aborted after the launch of a decode step
                row += 1
                continue
            uncomputed_prompt = len(sequence.request.prompt) - sequence.num_computed_tokens
            self._prompt_tokens += max(0, min(count, uncomputed_prompt))
            forks = self._scheduler.commit(sequence, count)
            if sequence.remaining:
                continue
            finished = [sequence, *(fork for fork in forks if fork.remaining == 0)]
            if sequence.samples:
                ready += [(row, sibling) for sibling in finished]
                row += 1
            else:
                complete += finished
        return ready, complete

    def _sample(self, logits: torch.Tensor, ready: Many[tuple[int, Sequence]]) -> TokenSelection:
        """Choose a token for each ready sequence, in halves while the device is out of memory."""
        if not ready:
            started = time.perf_counter()
            self._runner.wait()
            return TokenSelection([], [], {}, time.perf_counter() - started)
        try:
            rows, sequences = [row for row, _ in ready], [sequence for _, sequence in ready]
            masked = self._masks.take(sequences)
            return self._selector.select(logits, rows, sequences, self._prepare_next_step, masked)
        except torch.OutOfMemoryError as error:
            if len(ready) == 1:
                raise
            log.warning("out of memory while sampling %d tokens: %s", len(ready), error)
        self._out_of_memory += 1
        torch.cuda.empty_cache()
        half = len(ready) // 2
        return self._sample(logits, ready[:half]).joined(self._sample(logits, ready[half:]))

    def _score_prompts(self, batch: Batch, logits: torch.Tensor) -> list[SequenceOutput]:
        """Compute the log probabilities of prompt tokens that this step gives. Call it once the device has finished."""
        outputs = []
        for scored in batch.prompts:
            request = scored.sequence.request
            found = prompt_logprobs(logits, scored, self._special_token_bytes)
            if found is None:
                fault = EngineFailure("the model computed logits that are not finite numbers for the prompt")
                outputs += self._requests.fail_all(request, fault)
            else:
                request.prompt_entries = scored.positions.stop + 1
                outputs.append(
                    SequenceOutput(request_id=request.id, index=scored.sequence.index, prompt_logprobs=found)
                )
        return outputs

    def _prepare_next_step(self) -> None:
        """Build the next step without its token ids, while the device computes this one."""
        plan = self._scheduler.plan_next_step()
        if plan is not None:
            batch = self._builder.build(plan.rows)
            launches_at_once = self._runner.prepare(batch)
            self._prepared = PreparedStep(plan, batch, self._scheduler.schedule_version, launches_at_once)

    def _postprocess(self, ready: Many[tuple[int, Sequence]], selection: TokenSelection) -> list[SequenceOutput]:
        """Add the new tokens to their sequences, finish those that end, and make the outputs."""
        outputs = []
        for row, (_, sequence) in enumerate(ready):
            if not _runs(sequence):
                continue
            if selection.finite[row]:
                output = self._requests.advance(sequence, selection.token_ids[row], selection.logprobs.get(row))
                self._generation_tokens += len(output.token_ids)
                if len(output.token_ids) > 1:
                    self._scheduler.jumped()
            else:
                output = self._requests.fail(sequence, no_token(sequence))
            outputs.append(output)
        return outputs

    def _launch_prepared_step(self, launch_next: Callable[[], bool]) -> None:
        """Launch the prepared step if it is valid, costs no time, and the caller agrees."""
        prepared = self._prepared
        if prepared is None or not prepared.launches_at_once:
            return
        if prepared.is_next(self._scheduler.schedule_version) and launch_next():
            self._builder.write_token_ids(prepared.batch, prepared.plan.rows)
            self._masks.begin(prepared.plan.rows)
            prepared.logits = self._runner.execute(prepared.batch)

    def _too_long(self, sequence: Sequence) -> EngineFailure:
        capacity = self._scheduler.pages.total * self._page_size
        return EngineFailure(
            f"this sequence has {sequence.length} tokens, but the whole cache of this worker has room for {capacity}",
            limit=capacity,
            value=sequence.length,
        )


def _runs(sequence: Sequence) -> bool:
    """Whether the sequence has not ended, as by an error in this step."""
    return sequence.status is not SequenceStatus.FINISHED
