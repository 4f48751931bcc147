"""What all operations have in common: no tokens, shapes that do not fit, the compiler, machines without Triton."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ktqueue.operators.gpu.kernels.activation import gated
from ktqueue.operators.gpu.kernels.norm import add_rms_norm
from ktqueue.operators.gpu.kernels.operation import dependent_launches, launch_after_all, launch_options
from ktqueue.operators.gpu.kernels.rope import qk_norm_rope_append
from ktqueue.operators.gpu.kernels.router import route

from ..interpreted import compiled_for_h200


def test_operations_accept_no_tokens(qkv: Callable[..., dict[str, Any]]) -> None:
    assert qk_norm_rope_append(**qkv(tokens=0)).shape == (0, 4, 16)
    assert route(torch.zeros(0, 4), 2, renormalise=True).ids.shape == (0, 2)
    assert add_rms_norm(torch.zeros(0, 8), torch.zeros(8), 1e-6).shape == (0, 8)


def test_shapes_that_do_not_fit_are_refused(qkv: Callable[..., dict[str, Any]]) -> None:
    rows = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"add_rms_norm does not take residual \[2, 8\] torch.float32"):
        add_rms_norm(rows, torch.zeros(4), 1e-6)
    with pytest.raises(ValueError, match="add_rms_norm"):
        add_rms_norm(rows, torch.zeros(8), 1e-6, shared_gate=rows[:, :1])
    with pytest.raises(ValueError, match="route to 9"):
        route(rows, 9, renormalise=True)
    with pytest.raises(ValueError, match="counts"):
        route(rows, 2, renormalise=True, counts=torch.zeros(8))
    with pytest.raises(ValueError, match="gated by relu"):
        gated("relu", rows)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="qk_norm_rope_append"):
        qk_norm_rope_append(**qkv() | {"sine": torch.zeros(64, 4)})


@pytest.mark.compiled
def test_the_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    """What the CPU has just written is read past the caches. (Triton drops a cache_modifier of ".cv" silently.)"""
    names = {
        "_add_rms_norm",
        "_few_rows_linear",
        "_few_rows_route",
        "_few_rows_gate_up",
        "_gated",
        "_qk_norm_rope_append",
        "_route",
        "_route_and_quantise",
        "_send_rows_kernel",
    }
    linear = {"_prepare", "_delta_rule", "_gated_norm"}
    assert set(compiled_for_h200("between matrices", tmp_path)) == names | linear | {"_add_rms_norm+volatile"}


@pytest.mark.compiled
def test_kernels_of_short_steps_can_wait_for_the_one_before(tmp_path: Path) -> None:
    """Others are launched as usual, after the end of the one before."""
    found = set(compiled_for_h200("dependent launches", tmp_path))
    waiting = {name.split("+")[0] for name in found if name.endswith("+waits")}
    matrices = {
        "_few_rows_linear",
        "_few_rows_route",
        "_few_rows_gate_up",
        "_few_rows_kernel",
        "_prepare_kernel",
        "_experts_kernel",
    }
    latents = {"_latent_inputs", "_latent_split", "_latent_join", "_decode_split", "_decode_join"}
    between = {"_add_rms_norm", "_qk_norm_rope_append", "_route", "_route_and_quantise", "_send_rows_kernel"}
    assert waiting == between | {"_divide_kernel", "_fetch_kernel"} | matrices | latents
    usual = {"_gated", "_prepare", "_delta_rule", "_gated_norm", "_decode_kernel"}
    usual |= {"_prefill_tile", "_expanded_tile", "_expand_keys", "_index_scores"}
    assert {name for name in found if not name.endswith("+waits")} == usual


def test_only_kernels_that_wait_are_launched_early() -> None:
    """The constant and the option of the launch go together, and end with the block."""
    assert launch_options() == {"WAITS": False}
    with dependent_launches(True):
        assert launch_options() == {"WAITS": True, "launch_pdl": True}
        with dependent_launches(False):
            assert launch_options() == {"WAITS": False}
        launch_after_all()  # for one kernel
        assert launch_options() == {"WAITS": False}
        assert launch_options() == {"WAITS": True, "launch_pdl": True}
    assert launch_options() == {"WAITS": False}


@pytest.mark.compiled
def test_kernels_are_compiled_side_by_side_and_not_run(tmp_path: Path) -> None:
    """Whoever launches one again has it, and another process finds it on the disk."""
    code = """
import sys
import torch
from triton.runtime import driver
from tests.operators.gpu.sm_90 import _Driver
from ktqueue.operators.gpu.kernels import norm
from ktqueue.operators.gpu.kernels.activation import gated
from ktqueue.operators.gpu.kernels.operation import compiled_side_by_side, kernels_on_any_device
driver.set_active(_Driver())
rows = torch.ones(2, 256)
with kernels_on_any_device(), compiled_side_by_side() as missing:
    for _ in range(2):
        for activation in ("silu", "gelu"):
            gated(activation, rows)
        norm.add_rms_norm(rows, rows[0], 1e-6, added=rows)
assert (rows == 1).all()
[compiled] = (kernel for kernels, *_ in norm._add_rms_norm.device_caches.values() for kernel in kernels.values())
assert compiled.asm["cubin"]
sys.stdout.write(" ".join(sorted(missing)))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    for expected in ("_add_rms_norm _gated _gated", ""):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_operations_import_without_triton() -> None:
    """Their twins work, and launching a kernel says what is missing."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from ktqueue.operators.gpu.attention import backends
from ktqueue.operators.gpu.kernels import dots, expert_products, fetch, operation, panel_matrix, rope, router
from ktqueue.operators.gpu.kernels.norm import add_rms_norm
residual = torch.ones(2, 8)
add_rms_norm(residual, torch.ones(8), 1e-6)
with operation.kernels_on_any_device():
    try:
        add_rms_norm(residual, torch.ones(8), 1e-6)
    except RuntimeError as error:
        sys.stdout.write(str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "GPU kernels need the package triton, which is not installed", done.stderr
