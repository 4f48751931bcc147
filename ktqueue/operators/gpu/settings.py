"""GpuSettings: what a model must know before it runs on a GPU. Knows no device."""

from dataclasses import dataclass
from typing import Literal

HandoffMethod = Literal["auto", "flags", "host_functions", "direct"]
"""How routed tokens get to the CPU's experts and back; "direct" is for tensors that live on the CPU."""
Streaming = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """Given to `prepare_device` of a model before its first step.

    max_tokens: of a step. expert_memory_bytes: GPU memory for experts; what all of them need, or more: all go there.
    expert_streaming: whether steps copy experts to the GPU that do not live there; "auto": where it is faster.
    streaming_tokens: a long step has at least so many. fetched_share: of the experts that a short step uses and the GPU
    has not, the part that comes to it, from 0 to 1; None: what is fastest here, by a measurement. expert_prefetch:
    while the GPU works on a step that only decodes, the CPU brings into its caches what the next layer will probably
    use of its experts. deferred_experts: of each token in such a step, those of least weight, whose result a layer does
    not wait for if the CPU computes it: the next layer with routed experts adds it.
    """

    max_tokens: int
    expert_memory_bytes: int = 0
    handoff: HandoffMethod = "auto"
    expert_streaming: Streaming = "auto"
    streaming_tokens: int = 64
    fetched_share: float | None = None
    expert_prefetch: bool = True
    deferred_experts: int = 0
