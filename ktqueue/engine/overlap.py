"""Steps of the interactive class run while a long step of the batch class is computed. See docs/adr/0072.

A step that copies all experts to the device needs the bus, and leaves the CPU idle. Interactive sequences need few
experts, which the CPU computes. So neither waits for the other. The device computes both at the same time; what the
interactive steps launch goes first.

Both read host memory, so the overlapped step takes longer than alone. Where that costs the batch class too much, tokens
of interactive sequences *ride* for a while: they are computed in the overlapped step. Prompts ride only if that is not
enough, since one read of an expert serves many of their tokens.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from math import inf
from statistics import median

import torch

from ktqueue.core.request import JobClass
from ktqueue.engine.batch import Batch, BatchBuilder
from ktqueue.engine.logits import Logits
from ktqueue.engine.prepared_step import NextStep
from ktqueue.engine.rows import Rows
from ktqueue.engine.runner import LaunchedStep, OverlappingRunner, Runner
from ktqueue.engine.scheduler import Scheduler
from ktqueue.engine.sequence import Sequence
from ktqueue.engine.step_costs import StepCosts
from ktqueue.engine.step_plan import StepPlan

log = logging.getLogger(__name__)

PROMPT_WAITS_SECONDS = 0.45  # a prompt waits for an overlapped step that will be done within this time
MOST_LOSS = 0.3  # of its time that the batch class may lose, if `interactive_share` is not more
RIDE_SECONDS, LONGEST_RIDE_SECONDS = 120.0, 600.0  # before more is computed beside the batch class again
KEPT = 9  # last overlapped steps whose time is known
WAIT_SECONDS, POLL_SECONDS = 0.005, 0.0005  # without an interactive step: so long until requests can arrive

Overlapped = tuple[StepPlan, Batch, Logits, float]
"""Plan, batch, logits [scored, vocab] and beginning, in seconds, of a step of the batch class."""


class Beside(IntEnum):
    """What interactive sequences compute beside an overlapped step. The rest *rides*: it is computed in that step."""

    NOTHING = 0
    PROMPTS = 1
    ALL = 2


MOST_LOST_SECONDS = {Beside.ALL: 1.5, Beside.PROMPTS: 6.0}
"""Seconds that the batch class loses beyond its part before less is computed beside it. Prompts come in bursts."""


class BatchLoss:
    """How much time the batch class loses to steps beside its own, and what it can bear.

    `most`: part of the time that it may lose, from 0 to 1. If it loses more, less is computed beside its steps for
    RIDE_SECONDS, and for twice as long each time that the loss comes sooner again. `clock` gives seconds.
    """

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._borne = Beside.ALL
        self._lost = 0.0  # seconds, less what may be lost
        self._noted = clock()
        self._more_at = self._noted - LONGEST_RIDE_SECONDS  # when more is borne again
        self._ride = RIDE_SECONDS

    def note(self, seconds: float, alone: float) -> None:
        """Note that an overlapped step took `seconds`, and would have taken `alone`; 0: nobody knows."""
        now, borne = self._clock(), self.borne
        self._lost = max(0.0, self._lost - self._most * (now - self._noted))
        self._noted = now
        if alone > 0 and borne > Beside.NOTHING:
            self._lost += max(0.0, seconds - alone)
        if self._lost > MOST_LOST_SECONDS.get(borne, inf):
            is_soon = now - self._more_at < self._ride
            self._ride = min(LONGEST_RIDE_SECONDS, 2 * self._ride) if is_soon else RIDE_SECONDS
            self._borne, self._more_at, self._lost = Beside(borne - 1), now + self._ride, 0.0
            words = "batch jobs lose too much time to interactive ones: %s beside their steps for %.0f s"
            log.info(words, self._borne.name.lower(), self._ride)

    @property
    def borne(self) -> Beside:
        """What may be computed beside the next overlapped step."""
        now = self._clock()
        while self._borne < Beside.ALL and now >= self._more_at:
            self._borne = Beside(self._borne + 1)
            if self._borne < Beside.ALL:
                self._more_at += RIDE_SECONDS
        return self._borne


class Overlap:
    """The step of the batch class that runs, if one does. None begins if `runner` is not an OverlappingRunner.

    most_tokens: of a step. steps: number of overlapped steps that have begun. out_of_memory: how often memory ran out,
    after which none begins.
    """

    def __init__(
        self,
        rows: Rows,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: Runner,
        *,
        most_tokens: int,
        loss: BatchLoss,
    ) -> None:
        self.steps = self.out_of_memory = 0
        self._rows = rows
        self._scheduler = scheduler
        self._builder = builder
        self._runner = runner if isinstance(runner, OverlappingRunner) else None
        self._loss = loss
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._alone = StepCosts(most_tokens)  # of overlapped steps beside which nothing ran
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
            self._beside = self._loss.borne if self._alone.points else Beside.NOTHING  # the first one is measured
            plan = self._scheduler.plan_beside(tokens=self._beside >= Beside.ALL, prompts=False)  # these ride
            self._rows.in_flight = plan.rows  # which the other step must not preempt
            planned = self._planned = self._scheduler.plan_overlapped()
            self._rows.in_flight = ()
            impossible = [*plan.can_never_run, *planned.can_never_run]
            if not plan.rows and all(one.request.job_class is JobClass.INTERACTIVE for one in planned.rows):
                plan, self._planned = planned, None  # the batch class has no pages: nothing is worth overlapping
            return plan, impossible
        with self.beside():  # a shared page may be copied
            prompts = self._beside >= Beside.PROMPTS and not self._next_is_soon(self._running[3])
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
        if self._is_alone:
            self._alone.observe(plan.tokens, seconds)
        self._loss.note(seconds, self._alone.seconds(plan.tokens))
        return plan, batch, logits, began

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

    def _next_is_soon(self, began: float) -> bool:
        """Whether a prompt should wait for the next overlapped step, which computes it with the same experts."""
        usual = median(self._seconds) if self._seconds else 0.0
        return began + 2 * usual - time.monotonic() < PROMPT_WAITS_SECONDS
