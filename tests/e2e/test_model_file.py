"""The model's file is truncated and overwritten while workers serve: no job fails or continues with other weights."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from ktqueue.loading.model_path import resolve

GREEDY = {"temperature": 0, "max_tokens": 120, "ignore_eos": True}


class ModelFile:
    """A copy of the built-in model that is changed in place."""

    def __init__(self, path: Path) -> None:
        self.path = Path(shutil.copy(resolve("demo"), path))
        self._original = self.path.read_bytes()

    def cut(self) -> None:
        os.truncate(self.path, 4096)

    def is_cut(self) -> bool:
        return self.path.stat().st_size == 4096

    def give_other_weights(self) -> None:
        middle = len(self._original) // 2
        changed = bytes(byte ^ 1 for byte in self._original[middle : middle + 4096])
        self.path.write_bytes(self._original[:middle] + changed + self._original[middle + 4096 :])


async def served(stack: Any) -> list[str]:
    (model,) = (await stack.http.get("/v1/models")).json()["data"]
    return list(model["digests"])


async def reload(stack: Any) -> list[str]:
    """Kill the fork server and its worker. Returns the digests of the model that is loaded afterwards."""
    former, worker = await served(stack), stack.up.workers[0].pid
    os.kill(stack.up.fork_server.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while stack.up.workers[0].pid in (worker, None) or (now := await served(stack)) == former:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return now


@pytest.mark.long
@pytest.mark.timeout(200)
async def test_a_model_file_may_change_under_its_workers(start_stack: Any, tmp_path: Path) -> None:
    file = ModelFile(tmp_path / "demo.gguf")
    body = {"prompt": "Once upon a time", "sampling": GREEDY}
    async with start_stack(engine={"model": str(file.path)}, broker={"max_attempts": 1}) as stack:
        calm = await stack.read(await stack.submit(**body))

        def cut(events: int) -> None:
            if events == 20:
                file.cut()

        job = await stack.submit(**body)
        stream = await stack.read(job, on_event=cut)
        assert stream.choices() == calm.choices()
        assert file.is_cut()
        record = await stack.job(job)
        assert (record["state"], record["attempts"]) == ("done", 1)
        assert stack.up.workers[0].deaths == 0
        assert [record["digest"]] == await served(stack)

        # Other weights under the same name: started jobs wait for their own weights, others are served.
        file.give_other_weights()
        begun = await stack.submit(prompt="Once upon a time", sampling={**GREEDY, "max_tokens": 2_000})
        await stack.read(begun, leave_after=20)
        assert await reload(stack) != [record["digest"]]
        fresh = await stack.submit(prompt="Once", sampling={**GREEDY, "max_tokens": 4})
        assert (await stack.read(fresh)).state == "done"
        waiting = await stack.job(begun)
        assert (waiting["state"], waiting["position"], waiting["digest"]) == ("queued", 1, record["digest"])
