"""The time of all steps so far, for the engine's statistics."""

from dataclasses import dataclass

from ktqueue.profiling.records import StepMoments


@dataclass(slots=True)
class StepTimes:
    """Number of steps, and seconds of wall time in their parts: see EngineStats."""

    steps: int = 0
    schedule: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    commit: float = 0.0

    def add(self, step: StepMoments) -> None:
        """Add one step."""
        self.steps += 1
        self.schedule += step.built - step.began
        self.forward += step.launched - step.built + step.waited
        self.sample += step.sampled - step.launched - step.waited
        self.commit += step.ended - step.sampled
