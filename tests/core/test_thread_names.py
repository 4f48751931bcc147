"""Names of threads, as `top -H` shows them."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ktqueue.core.thread_names import name_thread

KERNEL_THREADS = """
from pathlib import Path
from ktqueue.operators import native
native.set_threads(3)
print(*(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")))
"""


def test_a_pool_names_its_threads() -> None:
    before = Path("/proc/thread-self/comm").read_text()
    with ThreadPoolExecutor(1, "x", name_thread, ("ktq-a-long-name-indeed",)) as pool:
        name = pool.submit(lambda: Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text()).result()
    assert name == "ktq-a-long-name\n"
    assert Path("/proc/thread-self/comm").read_text() == before


def test_threads_of_the_kernels_have_names() -> None:
    pytest.importorskip("ktqueue_kernels")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_THREADS], capture_output=True, text=True, check=True, env=os.environ
    )
    names = done.stdout.split()
    assert {"ktq-kernel-1", "ktq-kernel-2"} <= set(names)
    assert "ktq-kernel-3" not in names
