"""Types of the fixtures of kernel tests: tests/kernels/conftest.py and random_weights of tests/conftest.py."""

from collections.abc import Callable

import torch

from ktqueue.operators.packed import Bytes, ExpertWeights

RandomWeights = Callable[..., Bytes]
"""random_weights(quant, count, seed=0) -> [bytes]."""
MakeWeights = Callable[..., ExpertWeights]
"""make_weights(quant, experts, hidden, intermediate, seed=0, biased=False)."""
Exact = Callable[[str, Bytes, int], torch.Tensor]
"""exact(quant, data, count) -> [count] float64."""
RunLayer = Callable[..., torch.Tensor]
"""run_layer(layer, x, ids, weights) -> [tokens, hidden]."""
SetPool = Callable[[int, int], None]
"""set_pool(threads, nodes)."""
