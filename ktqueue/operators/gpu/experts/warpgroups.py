"""Which layers multiply many pairs of tokens and experts by warpgroups, and the compilation of all that they need.

Such a layer has packed products for fewer pairs, and needs no memory for decoded experts. Knows no placement: streamed
experts are multiplied like all others.
"""

import logging
import time
from collections.abc import Sequence

import torch

from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.experts.decoding import random_step
from ktqueue.operators.gpu.experts.step import RoutedLayer
from ktqueue.operators.gpu.kernels import expert_products, expert_warpgroups
from ktqueue.operators.gpu.kernels.expert_pairs import MOST_READ_BY_EACH
from ktqueue.operators.gpu.kernels.expert_warpgroups import NARROW, WarpgroupKernel, kernel_for
from ktqueue.operators.gpu.kernels.norm import add_rms_norm
from ktqueue.operators.gpu.settings import Trials

logger = logging.getLogger(__name__)


def prepare_warpgroups(
    layers: Sequence[RoutedLayer], pool: torch.Tensor, dtype: torch.dtype, max_tokens: int, trials: Trials
) -> frozenset[int]:
    """The layers of `layers` that never decode experts, since warpgroups multiply them. Compiles their kernels for
    steps of up to `max_tokens` tokens.

    pool: [bytes] uint8, in which experts are; if it is empty, no layer has experts on the GPU.
    """
    if not trials.warpgroups or not len(pool):
        return frozenset()
    chosen = [
        index for index, layer in enumerate(layers) if expert_warpgroups.can_multiply(layer.record, dtype, pool.device)
    ]
    kinds = {_kind(layers[index]): layers[index] for index in chosen}
    long = [
        kind for kind in kinds.values() if expert_warpgroups.pays(max_tokens * kind.experts_per_token, kind.experts)
    ]
    if long and is_gpu(pool.device):
        began = time.monotonic()
        expert_warpgroups.compile_products(
            (kernel, facts)
            for layer in long
            for kernel in (NARROW, kernel_for(max_tokens * layer.experts_per_token, layer.experts))
            for facts in expert_warpgroups.product_facts(
                layer.record, layer.experts, layer.gate, biased=layer.biases is not None
            )
        )
        logger.info("experts of long steps are compiled in %.1f s", time.monotonic() - began)
    for layer in kinds.values():
        _run_once(layer, pool, dtype, max_tokens)
    return frozenset(chosen)


def _kind(layer: RoutedLayer) -> tuple[object, ...]:
    """What the kernels of a layer depend on."""
    return layer.record, layer.experts, layer.experts_per_token, layer.gate, layer.biases is None, layer.exact


@torch.inference_mode()
def _run_once(layer: RoutedLayer, pool: torch.Tensor, dtype: torch.dtype, max_tokens: int) -> None:
    """Multiply random tokens, as many as steps may have, so that no prompt waits for the compiler: packed experts in
    powers of two, and warpgroups with both ways to sort pairs and by each kernel. And one token more, since Triton
    compiles a kernel again for sizes that are no multiple of 16. And the norm before them, with a copy for the CPU or
    without."""
    done: set[tuple[bool, bool, WarpgroupKernel]] = set()
    powers = [2**power + more for power in range(max_tokens.bit_length()) for more in (0, 1)]
    for tokens in (*powers, max_tokens):
        step = random_step(layer, pool, tokens, dtype) if tokens <= max_tokens else None
        if step is None:
            continue
        pairs = tokens * layer.experts_per_token
        kind = pairs > MOST_READ_BY_EACH, tokens % 2 == 0, kernel_for(pairs, layer.experts)
        if not expert_warpgroups.pays(pairs, layer.experts):
            expert_products.experts(*step, layer.gate, exact=layer.exact)
        elif kind not in done:
            done.add(kind)
            expert_warpgroups.experts(*step, layer.gate)
            x = step[2]
            for copy in (None, x.float()):
                add_rms_norm(x, x[0], 1e-6, added=x, copy=copy, ordered=torch.empty_like(x))
