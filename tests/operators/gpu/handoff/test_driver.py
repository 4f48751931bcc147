"""The driver, with made-up libraries in place of CUDA's."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktqueue.operators.gpu.handoff.driver import Driver, MemoryOperation, _mapped_runtime


class Cuda:
    """The functions of libcuda that are called. It records the calls and returns `code`."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[Any] = []

    def cuStreamBatchMemOp_v2(self, stream: Any, count: Any, parameters: Any, flags: Any) -> Any:  # noqa: N802
        fields = [bytes(parameter) for parameter in parameters]
        self.calls.append((stream.value, count.value, fields, flags.value))
        return self.code

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> Any:  # noqa: N802
        value._obj.value = int(attribute.value == 122 and device.value == 1)
        return self.code

    def cuPointerGetAttribute(self, value: Any, attribute: Any, address: Any) -> Any:  # noqa: N802
        value._obj.value = address.value + 0x1000 * (attribute.value == 3)
        return self.code

    def cuGetErrorString(self, code: Any, text: Any) -> Any:  # noqa: N802
        text._obj.value = b"the stream is gone" if code.value == 400 else None
        return 0


class Runtime:
    """The functions of libcudart that are called. It records the calls too."""

    class Text:
        restype = None

        def __call__(self, code: Any) -> Any:
            return b"no memory"

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[Any] = []
        self.cudaGetErrorString = self.Text()

    def __getattr__(self, name: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *(argument.value for argument in arguments)))
            return self.code

        return call


def test_memory_operations_have_cuda_s_layout() -> None:
    """48 bytes each: operation, address at 8, value at 16, flags at 24."""
    cuda = Cuda()
    driver = Driver(cuda, Runtime())
    driver.memory_operations(0x77, [MemoryOperation("write", 0x1122334455667788, 9), MemoryOperation("wait", 64, 5)])
    write = bytes.fromhex("0200000000000000 8877665544332211 0900000000000000 0000000000000000") + bytes(16)
    wait = bytes.fromhex("0100000000000000 4000000000000000 0500000000000000 0100000000000000") + bytes(16)
    assert cuda.calls == [(0x77, 2, [write, wait], 0)]


def test_the_driver_says_whether_streams_can_wait_for_memory() -> None:
    driver = Driver(Cuda(), Runtime())
    assert driver.has_memory_operations(1)
    assert not driver.has_memory_operations(0)
    assert not Driver(object(), Runtime()).has_memory_operations(1)


def test_pointers_are_passed_with_64_bits() -> None:
    runtime = Runtime()
    driver = Driver(Cuda(), runtime)
    far = 0x7F00_1234_5678_9AB0
    assert driver.device_address(far) == far + 0x1000
    driver.launch_host_function(far, far + 1, far + 2)
    driver.host_register(far, 1 << 40)
    driver.host_unregister(far)
    assert runtime.calls == [
        ("cudaLaunchHostFunc", far, far + 1, far + 2),
        ("cudaHostRegister", far, 1 << 40, 1),
        ("cudaHostUnregister", far),
    ]


def test_errors_name_the_function() -> None:
    with pytest.raises(RuntimeError, match=r"^cuStreamBatchMemOp_v2: the stream is gone \(error 400\)$"):
        Driver(Cuda(400), Runtime()).memory_operations(1, [MemoryOperation("wait", 64, 1)])
    with pytest.raises(RuntimeError, match=r"^cuDeviceGetAttribute: unknown error \(error 1\)$"):
        Driver(Cuda(1), Runtime()).has_memory_operations(0)
    with pytest.raises(RuntimeError, match=r"^cuPointerGetAttribute: the stream is gone"):
        Driver(Cuda(400), Runtime()).device_address(64)
    runtime = Runtime(2)
    driver = Driver(Cuda(), runtime)
    calls: list[tuple[str, Callable[[], None]]] = [
        ("cudaLaunchHostFunc", lambda: driver.launch_host_function(1, 2, 3)),
        ("cudaHostRegister", lambda: driver.host_register(64, 64)),
        ("cudaHostUnregister", lambda: driver.host_unregister(64)),
    ]
    for name, call in calls:
        with pytest.raises(RuntimeError, match=rf"^{name}: no memory \(error 2\)$"):
            call()
        assert runtime.calls[-1] == ("cudaGetLastError",), "the error must not stay for torch to find"
    assert runtime.cudaGetErrorString.restype is ctypes.c_char_p


def test_the_driver_finds_the_runtime_that_torch_has_loaded() -> None:
    maps = (
        "7f0-7f1 r-xp 00000000 08:01 1 /usr/lib/libc.so.6\n"
        "7f2-7f3 rw-p 00000000 00:00 0 \n"
        "7f4-7f5 r--p 00000000 08:01 2 /opt/a folder/nvidia/lib/libcudart.so.13\n"
    )
    assert _mapped_runtime(maps) == "/opt/a folder/nvidia/lib/libcudart.so.13"
    assert _mapped_runtime(maps.replace("cudart", "cufft")) is None


def test_missing_libraries_are_an_error(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f0000000000-7f0000001000 r-xp 00000000 08:01 42 /usr/lib/libc.so.6\n")
    with pytest.raises(RuntimeError, match="libcudart is not loaded"):
        Driver.load(maps)
    maps.write_text("7f0000000000-7f0000001000 r-xp 00000000 08:01 42 /nowhere/libcudart.so.13\n")
    with pytest.raises(RuntimeError, match="CUDA's libraries do not load"):
        Driver.load(maps)
