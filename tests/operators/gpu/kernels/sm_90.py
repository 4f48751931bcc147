"""Compiles what the launchers launch for an H200 (sm_90, down to machine code), on a machine without a GPU.

Run as a script it does so for every kernel of fused.py: what the interpreter accepts and the compiler refuses is found
here. A process that compiles cannot interpret, so tests start it as another.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class _Driver:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling() -> Iterator[list[str]]:
    """Launches compile only, whatever device their tensors are on. Gives the names of the kernels, as they come, with
    "+volatile" behind those that have such loads."""
    names: list[str] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"]
        names.append(self.fn.__name__ + "+volatile" * ("ld.volatile" in kernel.asm["ptx"]))
        return kernel

    driver.set_active(_Driver())
    JITFunction.run = compile_only
    yield names
    JITFunction.run = run


def fused() -> None:
    """Every kernel of fused.py, for shapes and types that models have."""
    from ktqueue.operators.gpu.kernels import linear as triton_linear
    from ktqueue.operators.gpu.kernels import norm as triton_norm
    from ktqueue.operators.gpu.kernels import rope as triton_rope
    from ktqueue.operators.gpu.kernels import router as triton_router

    for dtype, hidden, slots in ((torch.bfloat16, 2048, 8), (torch.float32, 2880, 4)):
        rows = torch.zeros(2, hidden, dtype=dtype)
        nothing = dict.fromkeys(("added", "partials", "shared", "shared_gate", "copy"))
        everything = {
            "added": rows.float(),
            "partials": torch.zeros(2, slots, hidden),
            "shared": rows,
            "shared_gate": rows[:, :1].contiguous(),
            "copy": rows.float(),
        }
        for options in (nothing, everything, {**everything, "shared_gate": None}):
            triton_norm.add_rms_norm(rows, rows[0], 1e-6, **options)
    for activation in ("silu", "gelu", "gelu_tanh", "swiglu_clamped"):
        triton_norm.gated(activation, torch.zeros(2, 6144, dtype=torch.bfloat16), 1.702, 7.0)

    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    for heads, kv_heads, head_dim, norm, clip, tokens, dtype, cache in (
        (32, 4, 128, "head", 0.0, 2, bf16, bf16),
        (32, 4, 128, "head", 0.0, 200, bf16, fp8),
        (16, 16, 80, "whole", 8.0, 2, torch.float32, torch.float32),
        (16, 16, 128, "whole", 8.0, 200, bf16, fp8),
        (8, 8, 96, "", 0.0, 2, torch.float16, torch.float16),
    ):
        sizes = {"head": (head_dim, head_dim), "whole": (heads * head_dim, kv_heads * head_dim)}.get(norm)
        triton_rope.qk_norm_rope_append(
            torch.zeros(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            q_norm=torch.zeros(sizes[0], dtype=dtype) if sizes else None,
            k_norm=torch.zeros(sizes[1], dtype=dtype) if sizes else None,
            epsilon=1e-6,
            cosine=torch.zeros(4, head_dim // 2),
            sine=torch.zeros(4, head_dim // 2),
            positions=torch.zeros(tokens, dtype=torch.int64),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            keys=torch.zeros(1, 1, kv_heads, head_dim).to(cache),
            values=torch.zeros(1, 1, kv_heads, head_dim).to(cache),
            clip=clip,
        )

    for tokens, outputs, columns in ((1, 5120, 2048), (4, 2880, 2880)):
        weight = torch.zeros(outputs, columns, dtype=bf16)
        triton_linear.few_rows_linear(weight[:tokens], weight, weight[:, 0].contiguous())

    for experts, chosen, dtype in ((128, 8, bf16), (60, 4, torch.float32)):
        options = {
            "on_gpu": torch.zeros(experts, dtype=torch.int64),
            "live_tokens": torch.zeros(1, dtype=torch.int32),
            "counts": torch.zeros(experts, dtype=torch.int32),
            "copies": (torch.zeros(2, chosen, dtype=torch.int64), torch.zeros(2, chosen)),
        }
        for extras in (options, dict.fromkeys(options)):
            logits = torch.zeros(2, experts, dtype=dtype)
            triton_router.route(logits, chosen, renormalise=experts == 128, **extras)
            by = {"choice": logits.float(), "sigmoid": True, "scale": 2.5}
            triton_router.route(logits, chosen, renormalise=experts == 128, **extras, **by)


if __name__ == "__main__":
    with compiling() as names:
        fused()
    sys.stdout.write(" ".join(sorted(set(names))))
