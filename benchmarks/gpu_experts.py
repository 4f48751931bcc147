"""Packed experts on a GPU, timed: `python -m benchmarks.gpu_experts`, for the shape of Qwen3-30B-A3B.

Each function is replayed in a CUDA graph over enough layers that no weights stay in the cache. GB/s are the bytes of
the experts that the tokens use (each once); TFLOP/s those of their products.
"""

import argparse
import sys
from collections.abc import Callable

import torch

from ktqueue.operators.gpu.kernels import expert_products as products
from ktqueue.operators.gpu.kernels.expert_products import ExpertRecord
from ktqueue.operators.gpu.kernels.int8_rows import Int8Rows

HIDDEN, INTERMEDIATE, EXPERTS, SLOTS = 2048, 768, 128, 8
FORMATS = (("Q4_K", "Q6_K"), ("Q4_K", "Q4_K"), ("Q8_0", "Q8_0"))
"""Of gate and up, and of down."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)
VARIANTS: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]] | None] = {
    "tensor cores": None,
    "direct": ((32, 32, 0), (8, 64, 0)),
    "of many": ((8, 32, 3), (8, 32, 0)),
}
"""Tiles of gate_up and down of the integer kernel (triton_few.Tile), or the kernel for many tokens."""
LARGEST_BYTE = 59
"""Of random packed weights, so that every scale is a finite half."""


def seconds(layers: list[Callable[[], object]], repeats: int) -> float:
    """Of one of the layers, in a graph that runs all of them."""
    for layer in layers:
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats / len(layers)


def measure(formats: tuple[str, str], tokens: int, layers: int, dtype: torch.dtype, variant: str) -> str:
    """One line: both functions at so many tokens with uniform routing."""
    from ktqueue.operators.gpu.kernels import few_rows as triton_few

    record = ExpertRecord(formats[0], formats[0], formats[1], HIDDEN, INTERMEDIATE)
    pools = [
        torch.randint(0, LARGEST_BYTE, (EXPERTS * record.bytes,), dtype=torch.uint8, device="cuda")
        for _ in range(layers)
    ]
    offsets = torch.arange(EXPERTS, device="cuda") * record.bytes
    ids = [torch.rand(tokens, EXPERTS, device="cuda").topk(SLOTS).indices for _ in range(layers)]
    x = torch.randn(tokens, HIDDEN, device="cuda").to(dtype)
    mid = torch.randn(tokens, SLOTS, INTERMEDIATE, device="cuda").to(dtype)
    weights = torch.rand(tokens, SLOTS, device="cuda")
    used = sum(len(set(one.flatten().tolist())) for one in ids) / layers
    repeats = 20 if tokens <= 128 else 3
    tiles = VARIANTS[variant]

    if tiles is None:

        def one_gate_up(i: int) -> Callable[[], object]:
            return lambda: products.gate_up(pools[i], offsets, ids[i], x, record, "silu")

        def one_down(i: int) -> Callable[[], object]:
            return lambda: products.down(pools[i], offsets, ids[i], mid, weights, record)

    else:
        gate_up_tile, down_tile = (triton_few.Tile(*tile) for tile in tiles)
        quants = (record.gate, record.up)

        def one_gate_up(i: int) -> Callable[[], object]:
            rows, pairs = triton_few.prepare(x, ids[i], offsets)
            return lambda: triton_few.gate_up(
                pools[i], offsets, ids[i], rows, pairs, quants, INTERMEDIATE, "silu", gate_up_tile
            )

        def one_down(i: int) -> Callable[[], object]:
            _, pairs = triton_few.prepare(x, ids[i], offsets)
            rows = Int8Rows.quantise(mid.view(-1, INTERMEDIATE))
            return lambda: triton_few.down(
                pools[i], offsets, ids[i], rows, pairs, weights, record.down, HIDDEN, record.down_start, down_tile
            )

    def one_prepare(i: int) -> Callable[[], object]:
        return lambda: triton_few.prepare(x, ids[i], offsets)

    parts = [f"{formats[0]:>5} {formats[1]:>5} {tokens:6}"]
    sizes = ((one_gate_up, record.gate_up_bytes, 2), (one_down, record.bytes - record.gate_up_bytes, 1))
    for function, size, matrices in sizes:
        took = seconds([function(i) for i in range(layers)], repeats)
        operations = 2 * tokens * SLOTS * HIDDEN * INTERMEDIATE * matrices
        parts.append(f"{took * 1e6:9.1f} {used * size / took / 1e9:7.0f} {operations / took / 1e12:7.1f}")
    if tiles is not None:
        took = seconds([one_prepare(i) for i in range(layers)], repeats)
        parts.append(f"{took * 1e6:9.1f}")
    return " ".join((*parts, " ", variant))


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--formats", nargs="*", default=[f"{first},{second}" for first, second in FORMATS])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--variants", nargs="*", default=["tensor cores", "direct"], choices=list(VARIANTS))
    parser.add_argument("--few", type=int, default=256, help="largest number of tokens for the integer kernel")
    arguments = parser.parse_args()
    write = sys.stdout.write
    write(
        f"{torch.cuda.get_device_name()}, {arguments.dtype}: us, GB/s, TFLOP/s of gate_up and of down, us to prepare\n"
    )
    for pair in arguments.formats:
        first, second = pair.split(",")
        for tokens in arguments.tokens:
            for variant in arguments.variants:
                if VARIANTS[variant] is None or tokens <= arguments.few:
                    layers = 12 if tokens <= 512 else 4
                    line = measure((first, second), tokens, layers, getattr(torch, arguments.dtype), variant)
                    write(f"{line}\n")
                    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
