"""What a model counts of its routed experts, for profiles."""

from collections.abc import Sequence
from operator import sub
from typing import NamedTuple, Protocol, runtime_checkable

ExpertUses = Sequence[Sequence[int]]
"""How often each routed expert of each layer was chosen since the start, modulo 2^32: [layers, experts]. Only layers
that have some."""


class ExpertWork(NamedTuple):
    """Work of the routed experts since the start, or in one step.

    cpu_runs: layers that the CPU computed; cpu_experts: different experts of each run, summed; cpu_bytes: of their
    packed weights; cpu_seconds: of wall time. bus_bytes: weights that were streamed to the GPU. uses: choices of
    experts by tokens; gpu_uses: of experts in GPU memory. gpu_experts: different ones of these of each layer and step,
    summed; fetched_bytes: weights that kernels fetched in short steps. These two need `count_each_step`, and all four a
    model that depends on uses (see PlacesExperts).
    """

    cpu_runs: int = 0
    cpu_experts: int = 0
    cpu_bytes: int = 0
    cpu_seconds: float = 0.0
    bus_bytes: int = 0
    uses: int = 0
    gpu_uses: int = 0
    gpu_experts: int = 0
    fetched_bytes: int = 0

    def since(self, earlier: "ExpertWork") -> "ExpertWork":
        """The work after `earlier`."""
        return ExpertWork(*map(sub, self, earlier))


@runtime_checkable
class CountsExperts(Protocol):
    """A model that counts the work of its experts. Call its methods between two steps."""

    def expert_work(self) -> ExpertWork:
        """The work since the start."""

    def expert_uses(self) -> ExpertUses | None:
        """The uses since the start, or None if they are not counted. On a GPU they may be some steps old."""


@runtime_checkable
class PlacesExperts(CountsExperts, Protocol):
    """A model that may keep some of its experts in GPU memory."""

    @property
    def depends_on_uses(self) -> bool:
        """Whether experts move to GPU memory, or long steps copy them there: those that are used most."""

    def count_each_step(self) -> None:
        """Count each step from now on, which costs a copy. Counts are those of the step, or of the one before."""

    def place_experts(self, uses: ExpertUses) -> None:
        """Let the experts with most `uses` be in GPU memory, or copied first, and count uses from now on. Call it
        between two steps.

        Raises ValueError if the model has other layers or experts.
        """
