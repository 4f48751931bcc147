"""Whether a step decodes its experts once and multiplies whole matrices: memory, and the number of tokens.

Decoding costs a layer the same for any number of tokens, so it pays in long steps (kernels/decoded_experts.py). From
how many tokens on is measured at start. Knows no placement: streamed experts are decoded like all others.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from ktqueue.core.units import format_bytes
from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.experts.step import RoutedLayer
from ktqueue.operators.gpu.kernels import decoded_experts, expert_products
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertPairs

logger = logging.getLogger(__name__)

MEMORY_SHARE = 1 / 16
"""Of a GPU's memory: the most that decoded experts may take."""
PROBED_TOKENS = (128, 256, 512, 1024, 2048, 4096)
ROUNDS = 3  # of each probe, after a first one that compiles


@dataclass(frozen=True, slots=True)
class DecodedExperts:
    """The experts of a layer, decoded, in steps of `least_tokens` tokens or more. memory: [weights], shared by all
    layers."""

    memory: torch.Tensor
    least_tokens: int

    @classmethod
    def prepare(
        cls,
        layers: Sequence[RoutedLayer],
        pool: torch.Tensor,
        dtype: torch.dtype,
        max_tokens: int,
        *,
        least_tokens: int | None = None,
    ) -> "DecodedExperts | None":
        """Allocate the memory, and measure from how many tokens on decoding is faster, unless that is given.

        pool: [bytes] uint8, in which probes read experts. None if it is empty, if the device has no grouped product for
        the experts of all `layers`, if their weights take too much memory, or if no step is long enough. On CPU
        tensors nothing is measured.
        """
        device = pool.device
        if (least_tokens is None and not is_gpu(device)) or (least_tokens or 0) > max_tokens:
            return None
        if not len(pool) or not all(decoded_experts.can_be_grouped(layer.record, dtype, device) for layer in layers):
            return None
        weights = max((decoded_experts.decoded_weights(layer.record, layer.experts) for layer in layers), default=0)
        if is_gpu(device) and weights * dtype.itemsize > MEMORY_SHARE * torch.cuda.mem_get_info(device)[1]:
            logger.info("experts are not decoded: they would take %s", format_bytes(weights * dtype.itemsize))
            return None
        memory = torch.empty(weights, dtype=dtype, device=device)
        if least_tokens is None:
            kinds = {layer.record: layer for layer in layers}  # whose kernels are compiled here, too
            measured = [_measure(layer, pool, memory, max_tokens) for layer in kinds.values()]
            pays = [tokens for tokens in measured if tokens is not None]
            least_tokens = max(pays) if pays and len(pays) == len(measured) else None
        return None if least_tokens is None else cls(memory, least_tokens)

    def memory_for(self, tokens: int) -> torch.Tensor | None:
        """The memory if `tokens` tokens of a layer are multiplied by decoded experts."""
        return self.memory if tokens >= self.least_tokens else None


def fewest_tokens(seconds: Mapping[int, tuple[float, float]]) -> int | None:
    """The number of tokens from which on decoding is always faster; None: it never is.

    seconds: by tokens, those of products with packed experts and those with decoded ones.
    """
    fewest = None
    for tokens, (packed, decoded) in sorted(seconds.items(), reverse=True):
        if decoded >= packed:
            break
        fewest = tokens
    return fewest


@torch.inference_mode()
def _measure(layer: RoutedLayer, pool: torch.Tensor, memory: torch.Tensor, max_tokens: int) -> int | None:
    """Time both ways on random tokens and experts. None, too, if `pool` has no room for an expert."""
    seconds: dict[int, tuple[float, float]] = {}
    for tokens in PROBED_TOKENS:
        if tokens > max_tokens:
            break
        step = random_step(layer, pool, tokens, memory.dtype)
        if step is None:
            return None
        packed = partial(expert_products.experts, *step, layer.gate, exact=layer.exact)
        decoded = partial(decoded_experts.experts, *step, layer.gate, memory)
        seconds[tokens] = _seconds(packed), _seconds(decoded)
    fewest = fewest_tokens(seconds)
    ratios = ", ".join(f"{tokens}: {after / before:.2f}" for tokens, (before, after) in seconds.items())
    logger.info("experts are decoded in steps from %s tokens on; relative time by tokens: %s", fewest, ratios)
    return fewest


def random_step(
    layer: RoutedLayer, pool: torch.Tensor, tokens: int, dtype: torch.dtype
) -> tuple[ExpertPairs, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Pairs, offsets, x and weights of random tokens of type `dtype`, as all products of experts take them. The bytes
    in `pool` need not be experts. None: it has no room for one."""
    device, record = pool.device, layer.record
    room = len(pool) // record.bytes
    if room == 0:
        return None
    offsets = torch.arange(layer.experts, device=device) % room * record.bytes
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, record.hidden, generator=random, device=device).to(dtype)
    logits = torch.rand(tokens, layer.experts, generator=random, device=device)
    ids = logits.topk(layer.experts_per_token).indices
    weights = torch.full(ids.shape, 1 / layer.experts_per_token, device=device)
    return ExpertPairs(pool, offsets, ids, record, layer.biases), offsets, x, weights


def _seconds(call: Callable[[], object]) -> float:
    """The device's time for a call: the median of ROUNDS."""
    call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return median(times)
