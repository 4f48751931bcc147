"""Typed wrapper of the compiled kernels (the door to `ktqueue_kernels`), and the division of threads.

Arrays are numpy. The kernels read and write them in place and release the interpreter lock. A wrong size, type or index
raises ValueError before anything is written. Knows no module and no model.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

import ktqueue_kernels
import numpy as np
import numpy.typing as npt
import torch
from ktqueue_kernels import _kernels

from ktqueue import __version__
from ktqueue.operators.packed import Bytes, ExpertWeights

if ktqueue_kernels.__version__ != __version__:  # two distributions: an upgrade of one may miss the other
    raise ImportError(
        f"ktqueue {__version__} needs ktqueue-kernels {__version__}, but {ktqueue_kernels.__version__} is installed: "
        f"pip install 'ktqueue[worker]=={__version__}'"
    )

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

QUANTS = (
    *("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "NVFP4"),
    *("Q4_1", "Q5_1", "UINT4", "FP8", "FP4"),
)
ISAS = ("scalar", "avx2", "avxvnni", "avx512", "amx")
"""Instruction sets that kernels are written for, slowest first. csrc/isa/ladder.cpp names the CPUs that have each."""
SPIN_MICROSECONDS = 50

ActivationName = Literal["silu", "gelu", "gelu_tanh", "swiglu_clamped", "silu_limited"]
"""The activation of the gate. swiglu_clamped is gpt-oss's: min(g, limit) * sigmoid(alpha * g) * (clip(u, -limit, limit)
+ 1). silu_limited is Step-3.5's: min(silu(g), limit) * clip(u, -limit, limit)."""
ActivationType = Literal["int8", "float32"]
"""The type in which activations are multiplied: int8 with a scale per 32 columns, or float32. With F32, F16, BF16
and FP8 weights int8 also means float32. On AMX it may mean bf16: see `tile_rows` and `set_batch_invariant`."""


@dataclass(frozen=True, slots=True)
class GateFacts:
    """How the gate and up of an MLP are joined.

    alpha, limit: of swiglu_clamped, which is gate * sigmoid(alpha * gate) * (up + 1) after gate is clamped to at most
    limit and up to -limit .. limit. Source: GptOssExperts of transformers. silu_limited has a limit too.
    weighted_input: the weight of a routed expert multiplies its input, not its output (Llama 4). The products with gate
    and up are linear, so these are multiplied instead, before their biases are added.
    """

    activation: ActivationName
    alpha: float = 0.0
    limit: float = 0.0
    weighted_input: bool = False


SILU = GateFacts("silu")


def isa() -> str:
    """Return the instruction set in use: one of ISAS, the best that the CPU has and `KTQUEUE_ISA` allows.

    Raises ValueError if that variable is not one of ISAS.
    """
    return str(_kernels.isa())


def isas() -> tuple[str, ...]:
    """Return those of ISAS that this CPU has, slowest first, regardless of `KTQUEUE_ISA`."""
    return tuple(_kernels.isas())


def tile_rows(quant: str, isa: str) -> int:
    """Return from how many rows that share weights of this format AMX tiles multiply them, in bf16; 0: never.

    Raises ValueError if the CPU lacks this instruction set or the format is not one of QUANTS.
    """
    return int(_kernels.tile_rows(quant, isa))


def set_batch_invariant(on: bool) -> None:
    """Choose whether a token's result has the same bits in every batch, for all kernels of this process.

    If off, AMX tiles multiply weights that enough rows share. This is faster, but rounds differently than for few rows.
    If on, quantised formats never use tiles, and BF16 and FP8 always do.
    """
    _kernels.set_batch_invariant(on)


def default_threads() -> int:
    """Return the number of physical cores that this process may use: those of its affinity mask, limited by the
    cgroup's quota (rounded up). The second thread of a core adds no memory bandwidth."""
    return int(_kernels.default_threads())


def threads() -> int:
    """Return the number of threads of the kernels' pool, including the caller."""
    return int(_kernels.threads())


def nodes() -> int:
    """Return the number of NUMA nodes that the threads of the kernels' pool are pinned to; 1 if they are not pinned."""
    return int(_kernels.nodes())


def set_threads(
    count: int | None = None,
    *,
    torch_threads: int = 1,
    pin: str = "auto",
    spin_microseconds: int = SPIN_MICROSECONDS,
    pretend_nodes: int = 0,
) -> int:
    """Divide `count` CPUs (None: `default_threads()`) between the kernels and torch. Returns `count`.

    Threads of both spin for a while after each call, and a call of one comes microseconds after a call of the other. If
    they shared CPUs, each would wait for the other's time slices. So they get disjoint CPUs, with the calling thread in
    both: torch gets `torch_threads`, the kernels `count - torch_threads + 1`. By default torch gets only the calling
    thread: with whole models, experts and dense matrices computed by the kernels, it has only small operations left.
    Give it more if rules keep matrices in transformers on the CPU. Measured with 2 CPUs and only the experts compiled,
    32 decode rows of the built-in model: torch 1 + kernels 2 took 17 ms per step, torch 2 + kernels 2 took 200 ms.

    pin: whether each of the kernels' threads, except the calling one, stays on its own core; with several NUMA nodes
    the threads are divided evenly among them. "auto" pins if there are at least 4 threads on more than half of the
    cores of the affinity mask, and no cgroup quota is below these cores; "on" always, "off" never.

    spin_microseconds: how long an idle kernel thread spins before it sleeps. If a GPU works between two layers of
    experts, set it to more than that takes, because waking a thread takes longer.

    pretend_nodes: divide the threads among this many nodes, whatever the machine has (for tests; 0: as it is).

    Call this once at start, after any fork and before the first forward. Call nothing else that sets torch's threads.
    Raises ValueError unless 1 <= torch_threads <= count <= 1024 and `pin` is one of the three.
    """
    count = default_threads() if count is None else count
    if not 1 <= torch_threads <= count <= 1024:
        raise ValueError(f"threads must be from 1 to 1024 and not below torch's, got {count} and {torch_threads}")
    torch.set_num_threads(torch_threads)
    _kernels.set_threads(count - torch_threads + 1, spin_microseconds, pin, pretend_nodes)
    return count


def row_bytes(quant: str, columns: int) -> int:
    """Return the bytes of a stored row. Raises ValueError unless `columns` is a positive multiple of the block."""
    return int(_kernels.row_bytes(quant, columns))


def packed_bytes(quant: str, rows: int, columns: int) -> int:
    """Return the bytes of a matrix packed for the kernels. Raises ValueError for an unknown quant."""
    return int(_kernels.packed_bytes(quant, rows, columns))


def dequantize(quant: str, data: Bytes, count: int) -> Floats:
    """Decode `count` packed weights to [count] float32, equal bit for bit to `gguf.dequantize`.

    `count` is a multiple of the quant's block, and `data` [bytes] uint8 holds exactly that many weights. Raises
    ValueError.
    """
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    out = np.empty(count, np.float32)
    _kernels.dequantize(quant, data, out)
    return out


def quantize(quant: str, values: Floats, row_size: int, importance: Floats | None = None) -> Bytes:
    """Quantise [rows, columns] float32 to [rows, row_size] bytes with the least weighted squared error.

    `importance` [columns] float32: how much the error of each column counts; None: alike. csrc/formats/quantize.h has
    the weights. All threads of the pool work, and the bytes do not depend on their number. Raises ValueError if rows
    are not whole blocks of `row_size` bytes, `quant` is unknown, or a value is not between -65504 and 65504.
    """
    out = np.empty((values.shape[0], row_size), np.uint8)
    _kernels.quantize(quant, np.ascontiguousarray(values, np.float32), importance, out)
    return out


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a CPU tensor's memory as numpy, without its gradient."""
    array: npt.NDArray[Any] = (tensor.detach() if tensor.requires_grad else tensor).numpy()
    return array


class ExpertLayer:
    """The routed experts of one layer on this machine's CPUs. Weights are packed; `weights` is not kept.

    A token's result does not depend on the thread count. It depends on other tokens only by whether an expert has at
    least `tile_rows` rows. A token with an infinity or a NaN gets NaN and affects no other. `joining`: of the gate and
    the up of each expert. Raises ValueError if shapes or sizes disagree, or with the row whose scale is not finite.
    """

    def __init__(
        self, weights: ExpertWeights, joining: GateFacts = SILU, *, activations: ActivationType = "int8", isa: str = ""
    ) -> None:
        gate, up, down = (
            (matrix.quant, matrix.rows, matrix.columns, [*matrix.data], matrix.bias)
            for matrix in (weights.gate, weights.up, weights.down)
        )
        self._layer = _kernels.ExpertLayer(
            gate, up, down, joining.activation, joining.alpha, joining.limit, joining.weighted_input, activations, isa
        )

    @property
    def bound(self) -> _kernels.ExpertLayer:
        """The extension's own object, for kernels that use this one."""
        return self._layer

    @property
    def bytes(self) -> int:
        """Bytes of packed weights."""
        return int(self._layer.bytes)

    @property
    def isa(self) -> str:
        """The instruction set of this layer."""
        return str(self._layer.isa)

    def forward(self, hidden_states: Floats, top_k_index: Integers, top_k_weights: Floats, out: Floats) -> None:
        """Compute out[t] = sum over slots of weight * expert(hidden_states[t]), adding slots in order; with
        `weighted_input` the sum of expert(weight * hidden_states[t]).

        hidden_states, out: [tokens, hidden] float32; top_k_index: [tokens, slots] int64, -1 if a slot has no expert;
        top_k_weights: [tokens, slots] float32. All contiguous. Raises ValueError.
        """
        self._layer.forward(hidden_states, top_k_index, top_k_weights, out)

    def ranges(self, expert: int) -> list[tuple[int, int]]:
        """Return (address, bytes) of each part of one expert's packed memory, in the order in which to copy them.

        Together they are (panel p of gate, panel p of up) for every p, then every panel of down, in the layout of
        csrc/formats/panel_layout.h. Two ranges, or more if panels are divided among NUMA nodes. Only read them, and
        only while this object lives. Raises ValueError if there is no such expert.
        """
        if expert < 0:
            raise ValueError(f"expert must not be negative, got {expert}")
        return list(self._layer.ranges(expert))


class Linear:
    """A packed matrix [rows, columns] that multiplies rows of activations on this machine's CPUs.

    data: [rows * row_bytes] uint8 in GGUF format `quant`, not kept; bias: [rows] float32. A row's result does not
    depend on the thread count. It depends on other rows only by whether there are at least `tile_rows`. Raises
    ValueError if sizes disagree, or with the row whose scale is not finite.
    """

    def __init__(
        self,
        quant: str,
        rows: int,
        columns: int,
        data: Bytes,
        *,
        bias: Floats | None = None,
        activations: ActivationType = "int8",
        isa: str = "",
    ) -> None:
        self.shape = (rows, columns)
        self._linear = _kernels.Linear(quant, rows, columns, data, bias, activations, isa)

    @property
    def bound(self) -> _kernels.Linear:
        """The extension's own object, for kernels that use this one."""
        return self._linear

    @property
    def bytes(self) -> int:
        """Bytes of packed weights."""
        return int(self._linear.bytes)

    @property
    def range(self) -> tuple[int, int]:
        """(address, bytes) of the packed memory: panel after panel, in the layout of csrc/formats/panel_layout.h. Only
        read it, and only while this object lives."""
        return int(self._linear.address), self.bytes

    def forward(self, x: Floats, out: Floats) -> None:
        """out = x W^T + bias. x: [tokens, columns], out: [tokens, rows], contiguous float32. Raises ValueError."""
        self._linear.forward(x, out)


def paged_attention(
    query: Floats,
    key: Floats,
    value: Floats,
    cache_keys: Floats,
    cache_values: Floats,
    query_starts: npt.NDArray[np.int32],
    context_lengths: npt.NDArray[np.int32],
    page_table: npt.NDArray[np.int32],
    slot_mapping: Integers,
    out: Floats,
    *,
    scaling: float,
    score_cap: float = 0.0,
    sliding_window: int = 0,
    chunk: int = 0,
    sinks: Floats | None = None,
    isa: str = "",
) -> None:
    """Write a step's keys and values into the cache, then attend causally for every token.

    query: [heads, tokens, head_dim]; key, value: [kv_heads, tokens, head_dim], any strides with a dense last dimension;
    caches: [pages, page_size, kv_heads, head_dim]; the four index arrays as in StepContext; out: [tokens, heads,
    head_dim]. score_cap, sliding_window, chunk, sinks: see ScoreOptions. A token's result does not depend on other
    rows, chunk borders or the thread count. Raises ValueError.
    """
    _kernels.paged_attention(
        query,
        key,
        value,
        cache_keys,
        cache_values,
        query_starts,
        context_lengths,
        page_table,
        slot_mapping,
        scaling,
        score_cap,
        sliding_window,
        chunk,
        sinks,
        out,
        isa,
    )


class ReadProbe:
    """A range of memory to measure how fast this machine reads: the limit of decoding.

    size: bytes, rounded up to 2 MiB per thread. In huge pages if the system provides them, first touched by the
    kernels' threads. Freed with the object. Raises ValueError, MemoryError.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1 byte, got {size}")
        self._probe = _kernels.ReadProbe(size)

    @property
    def bytes(self) -> int:
        """Size of the range."""
        return int(self._probe.bytes)

    def measure(
        self, *, size: int = 0, threads: int = 0, rounds: int = 1, repeats: int = 3, prefetch: int = 0
    ) -> float:
        """Return the bytes per second of the fastest of `repeats` measurements.

        In each, `threads` threads (0: all of the kernels') read an equal contiguous share of the first `size` bytes (0:
        all), `rounds` times, with the widest loads of this CPU. prefetch: how many bytes ahead software prefetches; 0
        leaves it to the hardware. Raises ValueError.
        """
        return float(self._probe.measure(size, threads, rounds, repeats, prefetch))


def peaks() -> list[tuple[str, str, str]]:
    """Return (isa, arithmetic, instruction) of each `peak` that can be measured on this CPU.

    isa: "scalar", "avx2", "avxvnni", "avx512", "amx"; arithmetic: "int8", "bf16", "fp32".
    """
    return [(str(isa), str(arithmetic), str(instruction)) for isa, arithmetic, instruction in _kernels.peaks()]


def peak(isa: str, arithmetic: str, *, threads: int = 0, seconds: float = 0.02, repeats: int = 3) -> float:
    """Return the operations per second (a multiply-add counts as two) in registers: the limit of long prompts.

    The fastest of `repeats` measurements of about `seconds` each on `threads` threads (0: all of the kernels'). Raises
    ValueError that names an instruction set that is unknown, that this CPU lacks, or that has no such arithmetic.
    """
    return float(_kernels.peak(isa, arithmetic, threads, seconds, repeats))


def host_bytes(address: int, size: int) -> torch.Tensor:
    """A view of host memory as [size] uint8. Only read it, and only while its owner lives."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))
