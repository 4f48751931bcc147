"""Driver: the calls of CUDA's driver and runtime (libcuda, libcudart) that torch does not offer. Knows no tensor.

Every call is checked: a failure raises RuntimeError with the function's name and CUDA's message.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2  # CUstreamBatchMemOpType
_WAIT_EQUAL = 1  # CUstreamWaitValue_flags
_DEVICE_POINTER = 3  # CUpointer_attribute
_CAN_USE_64_BIT_STREAM_MEM_OPS = 122  # the second version of the operations; attribute 92 is about the first


@dataclass(frozen=True, slots=True)
class MemoryOperation:
    """`write` a 32-bit word in stream order, after all earlier writes of the stream are visible to the whole system; or
    `wait` until the word equals `value`."""

    kind: Literal["write", "wait"]
    address: int
    value: int


class _Parameters(ctypes.Structure):
    """CUstreamBatchMemOpParams, 48 bytes. Write and wait have the same fields."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class Driver:
    """Both libraries. `cuda` and `runtime` are ctypes libraries, or objects of a test that behave like them."""

    def __init__(self, cuda: Any, runtime: Any) -> None:
        self._cuda = cuda
        self._runtime = runtime

    @classmethod
    def load(cls, maps: Path = Path("/proc/self/maps")) -> "Driver":
        """Use the libraries that torch has loaded, found in `maps`.

        Raises RuntimeError if there are none: torch is a CPU build, or CUDA is not initialised yet.
        """
        path = _mapped_runtime(maps.read_text())
        if path is None:
            raise RuntimeError("libcudart is not loaded: torch has no CUDA, or has not used it yet")
        try:
            return cls(ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(path))
        except OSError as error:
            raise RuntimeError(f"CUDA's libraries do not load: {error}") from error

    def has_memory_operations(self, device: int) -> bool:
        """Whether streams of this device can write words and wait for them."""
        if not hasattr(self._cuda, "cuStreamBatchMemOp_v2"):
            return False
        value = ctypes.c_int()
        code = self._cuda.cuDeviceGetAttribute(
            ctypes.byref(value), ctypes.c_int(_CAN_USE_64_BIT_STREAM_MEM_OPS), ctypes.c_int(device)
        )
        self._check_driver("cuDeviceGetAttribute", code)
        return bool(value.value)

    def memory_operations(self, stream: int, operations: Sequence[MemoryOperation]) -> None:
        """Enqueue `operations`, in this order, as one node. Addresses are device addresses; see device_address."""
        array = (_Parameters * len(operations))()
        for operation, parameters in zip(operations, array, strict=True):
            waits = operation.kind == "wait"
            parameters.operation = _WAIT_VALUE_32 if waits else _WRITE_VALUE_32
            parameters.address = operation.address
            parameters.value = operation.value
            parameters.flags = _WAIT_EQUAL if waits else 0
        code = self._cuda.cuStreamBatchMemOp_v2(
            ctypes.c_void_p(stream), ctypes.c_uint(len(operations)), array, ctypes.c_uint(0)
        )
        self._check_driver("cuStreamBatchMemOp_v2", code)

    def launch_host_function(self, stream: int, function: int, argument: int) -> None:
        """Enqueue a call of the `void (*)(void *)` at address `function`."""
        code = self._runtime.cudaLaunchHostFunc(
            ctypes.c_void_p(stream), ctypes.c_void_p(function), ctypes.c_void_p(argument)
        )
        self._check_runtime("cudaLaunchHostFunc", code)

    def device_address(self, address: int) -> int:
        """The current device's address of the pinned memory at host address `address`."""
        found = ctypes.c_uint64()
        code = self._cuda.cuPointerGetAttribute(
            ctypes.byref(found), ctypes.c_int(_DEVICE_POINTER), ctypes.c_uint64(address)
        )
        self._check_driver("cuPointerGetAttribute", code)
        return found.value

    def host_register(self, address: int, size: int) -> None:
        """Pin `size` bytes of this process's memory, for all devices, until `host_unregister`."""
        portable = 1
        code = self._runtime.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(portable))
        self._check_runtime("cudaHostRegister", code)

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`."""
        self._check_runtime("cudaHostUnregister", self._runtime.cudaHostUnregister(ctypes.c_void_p(address)))

    def _check_driver(self, function: str, code: int) -> None:
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        raise RuntimeError(f"{function}: {_message(text.value)} (error {code})")

    def _check_runtime(self, function: str, code: int) -> None:
        if code == 0:
            return
        self._runtime.cudaGetLastError()  # otherwise torch's next call reports this error
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        message = _message(self._runtime.cudaGetErrorString(ctypes.c_int(code)))
        raise RuntimeError(f"{function}: {message} (error {code})")


def _message(text: bytes | None) -> str:
    return (text or b"unknown error").decode()


def _mapped_runtime(maps: str) -> str | None:
    """The path of libcudart in the text of /proc/self/maps."""
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libcudart" in path and ".so" in path:
            return path
    return None
