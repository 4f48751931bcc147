"""Compiles a kernel in CUDA C++ for the CPU, with gpu.h in place of a GPU.

PTX in the source becomes calls: `asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(a) : "r"(b), ...)` becomes
`lop3_b32(a, b, ..., 0xEA)`. So an instruction that gpu.h lacks does not compile.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import pytest
import torch

_STRINGS = r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)'
_OPERAND = re.compile(r'"[^"]*"\s*\(')


def _with_headers(source: Path, seen: set[Path]) -> Iterator[str]:
    """Lines of the source, with those of its headers where they are included."""
    text = source.read_text()
    if "#pragma once" in text and source in seen:
        return
    seen.add(source)
    for line in text.splitlines():
        if included := re.match(r'#include "(.+)"', line):
            yield from _with_headers(source.parent / included[1], seen)
        elif not line.startswith("#pragma"):
            yield line


def _end(text: str, start: int) -> int:
    """Behind the parenthesis that closes the one at `start`."""
    depth = 0
    for part in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if depth == 0:
            return part.end()
    raise ValueError(f"a parenthesis stays open: {text[start : start + 80]}")


def _calls(asm: str) -> str:
    """What stands between the parentheses of `asm`, as calls."""
    strings = re.match(_STRINGS, asm)
    assert strings
    operands, place = [], strings.end()
    while operand := _OPERAND.search(asm, place):
        place = _end(asm, operand.end() - 1)
        operands.append(asm[operand.end() : place - 1])
    calls = []
    for instruction in "".join(re.findall(r'"(.*?)"', strings[1])).replace("\\n", "").split(";"):
        name, _, values = instruction.strip().partition(" ")
        given = [operands[int(word[1:])] if word[0] == "%" else word for word in re.findall(r"%\d+|[\w.]+", values)]
        calls += [f"{re.sub('[.:]', '_', name)}({', '.join(given)});"] if name else []
    return "{ " + " ".join(calls) + " }"


def _without_asm(text: str) -> str:
    while asm := re.search(r"\basm(?: volatile)?\s*\(", text):
        end = _end(text, asm.end() - 1)
        text = text[: asm.start()] + _calls(text[asm.end() : end - 1]) + text[text.index(";", end) + 1 :]
    return text


class _Launch(ctypes.Structure):
    """As in gpu.h."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("columns", "rows", "together", "threads"))


def _declared(text: str) -> str:
    """Let variables in shared memory lie where other programs of the cluster can reach them."""
    numbers = count()

    def places(declaration: re.Match[str]) -> str:
        found = re.findall(r"(\w+)((?:\[[^\]]*\])*)(?:, |$)", declaration[2])
        return " ".join(
            f"using of_{name} = {declaration[1]}{size}; "
            f"auto& {name} = *reinterpret_cast<of_{name}*>(emulated::declared({next(numbers)}, sizeof(of_{name})));"
            for name, size in found
        )

    return re.sub(r"__shared__ (\w+) ([^;]*);", places, text)


class EmulatedKernel:
    """The function `name` of `source` for the CPU. constants: its macros. What is compiled is left in `folder`."""

    def __init__(self, source: Path, constants: Mapping[str, str | int], name: str, folder: Path) -> None:
        compiler = shutil.which("c++")
        if compiler is None:
            pytest.skip("no C++ compiler")
        text = re.sub(r"//.*", "", "\n".join(_with_headers(source, set())))
        text = re.sub(r"extern __shared__[^;]* (\w+)\[\];", r"uint8_t* \1 = emulated::memory_of_program();", text)
        text = _without_asm(_declared(text))
        parameters = re.search(rf"\b{name}\((.*?)\)\s*\{{", text, re.DOTALL)
        assert parameters
        names = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters[1]))
        program, library = folder / f"{name}.cpp", folder / f"{name}.so"
        program.write_text(
            f'#include "{Path(__file__).with_name("gpu.h")}"\n#define __CUDA_ARCH__ 900\n{text}\n'
            f'extern "C" void launch(emulated::Launch how, {parameters[1]}) {{\n'
            f"  emulated::launch(how, [=] {{ {name}({names}); }});\n}}\n"
        )
        macros = [f"-D{key}={value}" for key, value in constants.items()]
        command = [compiler, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", *macros]
        done = subprocess.run([*command, "-o", library, program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        self._launch = ctypes.CDLL(str(library)).launch

    def launch(
        self, grid: tuple[int, int], arguments: Sequence[torch.Tensor | int], *, threads: int, together: int = 1
    ) -> None:
        """Run `grid` programs of so many threads, of which `together` are a cluster, until all have ended."""
        given = [
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else ctypes.c_int(value)
            for value in arguments
        ]
        self._launch(_Launch(*grid, together, threads), *given)
