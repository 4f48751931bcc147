"""GpuSettings: what a model must know before it runs on a GPU. Knows no device."""

from dataclasses import dataclass

from ktqueue.core.settings.engine import AutoOnOff, HandoffMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Ways to compute a step. No user sees them; benchmarks and tests change them.

    shared_beside_experts: in decode steps a second stream computes shared experts (side_stream.py). warpgroups: on
    Hopper, long steps decode experts on the way to the tensor cores (experts/warpgroups.py), not before.
    """

    shared_beside_experts: bool = True
    warpgroups: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """The argument of a model's `prepare_device`, which is called before the first step.

    max_tokens: of a step. positions: tokens of the longest sequence; 0: as many as the model allows.
    expert_memory_bytes: GPU memory for experts; larger values than all experts need are allowed.
    expert_streaming: whether long steps copy absent experts to the GPU; "auto": if that is faster. streaming_tokens:
    the smallest long step. streamed_share: the share of the absent experts that a long step copies; None: learned.
    fetched_shares: the share of its missing experts, from 0 to 1, that a short step copies to
    the GPU: for steps of one token, and for others. None: measured on this machine. decode_experts_from: the tokens of
    the shortest step that decodes a layer's experts once (experts/decoding.py); None: measured on this machine, and no
    step on CPU tensors. expert_prefetch: while the GPU works on a decode step, the CPU loads the experts that the next
    layer will probably use into its caches.
    """

    max_tokens: int
    positions: int = 0
    expert_memory_bytes: int = 0
    handoff: HandoffMethod = "auto"
    expert_streaming: AutoOnOff = "auto"
    streaming_tokens: int = 64
    streamed_share: float | None = None
    fetched_shares: tuple[float, float] | None = None
    decode_experts_from: int | None = None
    expert_prefetch: bool = True
