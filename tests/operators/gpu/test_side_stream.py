"""A second stream: its work is done beside the current stream's, and is finished when it is taken."""

import pytest
import torch

from ktqueue.operators.gpu.kernels.operation import dependent_launches, launch_options
from ktqueue.operators.gpu.side_stream import SideStream


def test_on_cpu_tensors_the_work_is_done_at_once() -> None:
    done: list[float] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        done.append(float(x.sum()))
        return x + 1

    x = torch.ones(3)
    taken = SideStream("cpu").start(work, x)
    assert done == [3.0]
    x += 1
    assert taken(x).tolist() == [2.0] * 3 and done == [3.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
class TestGpu:
    def test_a_graph_has_both_branches(self) -> None:
        """Each replay computes with what the stream wrote before, and what follows sees the result."""
        beside, x = SideStream("cuda"), torch.zeros(1 << 20, device="cuda")
        weight = torch.ones(2048, 2048, device="cuda")

        def work(x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):  # long enough that whoever did not wait would be seen
                weight.clone() @ weight
            return x * 2

        def step() -> torch.Tensor:
            seen = x + 1
            taken = beside.start(work, seen)
            other = seen * 3
            return taken(seen) + other

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
        for value in (1.0, 5.0):
            x.fill_(value)
            graph.replay()
            assert (result == 5 * (value + 1)).all()

    def test_kernels_where_streams_meet_are_not_launched_early(self) -> None:
        beside, x = SideStream("cuda"), torch.zeros(8, device="cuda")
        with dependent_launches(True):
            taken = beside.start(lambda _: [launch_options(), launch_options()], x)
            assert [options["WAITS"] for options in taken(x)] == [False, True]
            assert [launch_options()["WAITS"] for _ in range(2)] == [False, True]
