"""Steps of the interactive class run while a long step of the batch class is computed. See docs/adr/0072.

A step that copies all experts to the device needs the bus, and leaves the CPU idle. Interactive sequences need few
experts, which the CPU computes. So neither waits for the other. The device computes both at the same time; what the
interactive steps launch goes first.

Both read host memory, so the overlapped step takes longer than alone. What that costs the batch class is bounded by
batch_loss.py.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext

import torch

from ktqueue.core.request import JobClass
from ktqueue.engine.batch import Batch, BatchBuilder
from ktqueue.engine.batch_loss import BatchLoss, Beside
from ktqueue.engine.logits import Logits
from ktqueue.engine.prepared_step import NextStep
from ktqueue.engine.rows import Rows
from ktqueue.engine.runner import LaunchedStep, OverlappingRunner, Runner
from ktqueue.engine.scheduler import Scheduler
from ktqueue.engine.sequence import Sequence
from ktqueue.engine.step_plan import StepPlan

log = logging.getLogger(__name__)

PROMPT_WAITS_SECONDS = 0.45  # a prompt waits for an overlapped step that will be done within this time
WAIT_SECONDS, POLL_SECONDS = 0.005, 0.0005  # without an interactive step: so long until requests can arrive

Overlapped = tuple[StepPlan, Batch, Logits, float]
"""Plan, batch, logits [scored, vocab] and beginning, in seconds, of a step of the batch class."""


class Overlap:
    """The step of the batch class that runs, if one does. None begins if `runner` is not an OverlappingRunner.

    steps: number of overlapped steps that have begun. out_of_memory: how often memory ran out, after which none begins.
    """

    def __init__(
        self, rows: Rows, scheduler: Scheduler, builder: BatchBuilder, runner: Runner, loss: BatchLoss
    ) -> None:
        self.steps = self.out_of_memory = 0
        self._rows = rows
        self._scheduler = scheduler
        self._builder = builder
        self._runner = runner if isinstance(runner, OverlappingRunner) else None
        self._loss = loss
        self._usual = 0.0  # seconds of an overlapped step
        self._seconds: deque[float] = deque(maxlen=3)
        self._is_alone = True  # nothing has run beside the running step
        self._beside = Beside.ALL  # of the running step
        self._planned: StepPlan | None = None
        self._running: tuple[StepPlan, Batch, LaunchedStep, float] | None = None
        self.is_out_of_memory = False
        """Whether the overlapped step cannot go on: call `give_up`."""

    def is_wanted(self, next_step: NextStep) -> bool:
        """Whether the next step overlaps one of the batch class, which runs or should begin. A prepared step is dropped
        then, unless it is launched already."""
        if self._running is not None:
            return True
        if self._runner is None or next_step.is_launched or not self._runner.may_overlap:
            return False
        if not self._scheduler.may_overlap:
            return False
        next_step.drop()
        return True

    def computes(self, request_id: str) -> bool:
        """Whether the running step computes tokens of this request."""
        return self._running is not None and any(one.request.id == request_id for one in self._running[0].rows)

    def beside(self) -> AbstractContextManager[object]:
        """Inside of it, work overtakes the overlapped step. If none runs, nothing differs."""
        return nullcontext() if self._running is None or self._runner is None else self._runner.beside()

    def plan(self) -> tuple[StepPlan, Many[Sequence]]:
        """Plan a step of the interactive class, perhaps of no rows, and the one that it overlaps, if none runs.

        Returns also the sequences that need more pages than the cache has.
        """
        if self._running is None:
            self._beside = self._loss.borne
            prompts = self._beside >= Beside.PROMPTS and not self._is_soon(time.monotonic())  # otherwise they ride
            plan = self._scheduler.plan_beside(tokens=self._beside >= Beside.ALL, prompts=prompts)
            self._rows.in_flight = plan.rows  # which the other step must not preempt
            planned = self._planned = self._scheduler.plan_overlapped()
            self._rows.in_flight = ()
            impossible = [*plan.can_never_run, *planned.can_never_run]
            if not plan.rows and all(one.request.job_class is JobClass.INTERACTIVE for one in planned.rows):
                plan, self._planned = planned, None  # the batch class has no pages: nothing is worth overlapping
            return plan, impossible
        with self.beside():  # a shared page may be copied
            prompts = self._beside >= Beside.PROMPTS and not self._is_soon(self._running[3] + self._usual)
            plan = self._scheduler.plan_beside(tokens=self._beside >= Beside.ALL, prompts=prompts)
        return plan, plan.can_never_run

    def begin(self) -> None:
        """Begin the overlapped step that `plan` planned, if it did. Raises torch.OutOfMemoryError."""
        plan, self._planned = self._planned, None
        if plan is not None and plan.rows and self._runner is not None:
            began, batch = time.monotonic(), self._builder.build(plan.rows)
            self._running = plan, batch, self._runner.begin(batch), began
            self._is_alone = True
            self._rows.in_flight = plan.rows
            self.steps += 1

    def run(self, plan: StepPlan) -> tuple[Batch, Logits, float]:
        """Run a step that `plan` gave. Returns its batch, its logits and when it began.

        Raises torch.OutOfMemoryError, of either step."""
        began = time.monotonic()
        self._scheduler.begin(plan)
        batch = self._builder.build(plan.rows)
        assert self._runner is not None
        if self._running is None:
            return batch, self._runner.execute(batch), began
        self._is_alone = False
        return batch, self._runner.execute_beside(batch, self._running[2]), began

    def launch_more(self, *_: object) -> None:
        """Launch more of the overlapped step, while the host would wait for what is queued on the current stream."""
        if self._running is not None and not self.is_out_of_memory:
            try:
                self._running[2].keep_ahead(until_idle=True)
            except torch.OutOfMemoryError:  # the caller's own step is complete
                self.is_out_of_memory = True

    def wait_a_moment(self) -> None:
        """Wait until the overlapped step is done, but not so long that a request which arrives waits. Raises
        torch.OutOfMemoryError."""
        end = time.monotonic() + WAIT_SECONDS
        if self._running is not None:
            self._running[2].keep_ahead()
        while not self.is_done and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    @property
    def is_done(self) -> bool:
        """Whether the overlapped step has been computed."""
        return self._running is not None and self._running[2].is_done

    def finish(self) -> Overlapped | None:
        """Wait for the overlapped step, if one runs. Its tokens are to be chosen next. None also if memory runs out."""
        if self._running is None or self._runner is None:
            return None
        plan, batch, step, began = self._running
        try:
            logits = step.finish()
        except torch.OutOfMemoryError:
            self.give_up()
            return None
        self._runner.end_overlap()
        self._running = None
        self._rows.in_flight = ()
        self._seconds.append(seconds := time.monotonic() - began)
        self._usual = max(self._seconds)
        self._loss.note(plan.tokens, seconds, is_alone=self._is_alone)
        return plan, batch, logits, began

    def close(self) -> None:
        """Wait for the overlapped step, if one runs. An error of it has reached the caller of `Engine.step` before."""
        with contextlib.suppress(Exception):
            self.finish()

    def give_up(self) -> None:
        """Never overlap steps again, since memory ran out. What they compute is not recorded, so others compute it."""
        log.warning("out of memory while steps overlap, which they will not any more")
        self.out_of_memory += 1
        if self._runner is not None:
            with self._runner.beside():
                self._runner.wait()
            self._runner.wait()
            self._runner.end_overlap()
        self._running = self._planned = self._runner = None
        self.is_out_of_memory = False
        torch.cuda.empty_cache()
        self._rows.in_flight = ()

    def _is_soon(self, begins: float) -> bool:
        """Whether an overlapped step that begins then, in seconds, is done soon, so that a prompt should ride in it."""
        return begins + self._usual - time.monotonic() < PROMPT_WAITS_SECONDS
