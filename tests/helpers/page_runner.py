"""Runs a page as its reader does: block after block in one folder, with a second terminal for what keeps running."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from pages import PYTHON, SHELL, Block

BLOCK_SECONDS = 120
STOP_SECONDS = 30.0

# `ktqueue` as the page calls it. What serves until it is stopped gets a terminal of its own, and the page goes on when
# it is ready. The gateway's port is one, so that another `up`, or a gateway, takes the place of the `up` before it.
TERMINAL = r"""#!/bin/bash
real={ktqueue} folder={terminals}
case "$1" in
  up | gateway | worker | bridge | control) ;;
  top) [[ " $* " == *" --once "* ]] || exec timeout --foreground --preserve-status --signal INT 2 "$real" "$@" ;&
  *) exec "$real" "$@" ;;
esac
if [[ "$1" =~ ^(up|gateway)$ ]] && [ -e "$folder/up" ]; then
  kill -INT "$(cat "$folder/up")"
  while [ -e "/proc/$(cat "$folder/up")/exe" ]; do sleep 0.1; done
fi
log=$folder/$1-$$.log
[[ " $* " == *" -d "* ]] && touch "$folder/detached"
setsid "$real" "$@" > "$log" 2>&1 < /dev/null &
echo $! | tee -a "$folder/all" > "$folder/$1"
serves() {{ grep -qiwE 'ready|serving|running|listening' "$log"; }}
until serves; do
  [ -e "/proc/$!/exe" ] || serves || {{ cat "$log" >&2; exit 1; }}
  sleep 0.1
done
"""


class PageRunner:
    """`with PageRunner(...) as runner: runner.run(block)`. Processes that still run are stopped at the end.

    `bin_folder` holds `python` and `ktqueue`; `port` is the gateway's; `values` are texts of the page and what stands
    for them here. The page finds itself in the empty folder `here`.
    """

    def __init__(self, folder: Path, bin_folder: Path, port: int, values: Mapping[str, str]) -> None:
        self.here = folder / "here"
        self._terminals = folder / "terminals"
        self._state = folder / "shell-state"
        self._python = bin_folder / "python"
        self._values = values
        bin_here = folder / "bin"
        for one in (self.here, self._terminals, bin_here):
            one.mkdir(parents=True)
        terminal = bin_here / "ktqueue"
        terminal.write_text(TERMINAL.format(ktqueue=bin_folder / "ktqueue", terminals=self._terminals))
        terminal.chmod(0o755)
        self._environment = {
            "PATH": os.pathsep.join([str(bin_here), str(bin_folder), os.environ["PATH"]]),
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "KTQUEUE_GATEWAY_PORT": str(port),
        }
        (folder / ".curlrc").write_text(
            "fail-with-body\nsilent\nshow-error\n"
        )  # curl fails on a status of 400 or above
        self._state.write_text(f"cd {self.here}\n")

    def run(self, block: Block) -> None:
        """Run a block, or write the file that it shows. Raises AssertionError with what the reader would see."""
        text = block.runnable
        for old, new in self._values.items():
            text = text.replace(old, new)
        if block.file_name and text:
            (self.here / block.file_name).write_text(text)
        elif block.language == SHELL and text:
            self.shell(text, block.place)
        elif block.language == PYTHON and text:
            self._execute(f". {self._state}; exec {self._python} -", text, block.place)

    def shell(self, text: str, place: str = "") -> None:
        """Run commands. Variables and the folder are kept for the next block."""
        state = f"{{ export -p; printf 'cd %q\\n' \"$PWD\"; }} > {self._state}"
        self._execute(f"set -euo pipefail -a\n. {self._state}\n{text}\n{state}\n", "", place, text)

    def _execute(self, script: str, stdin: str, place: str, shown: str = "") -> None:
        done = subprocess.run(
            ["bash", "-c", script],
            input=stdin,
            capture_output=True,
            text=True,
            env=self._environment,
            cwd=self.here,
            timeout=BLOCK_SECONDS,
            check=False,
        )
        seen = f"{place} ended with {done.returncode}:\n{shown or stdin}\n{done.stdout}\n{done.stderr}\n{self._logs()}"
        assert done.returncode == 0 and "Traceback" not in done.stderr, seen

    def _logs(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in self._terminals.glob("*.log"))

    def __enter__(self) -> "PageRunner":
        return self

    def __exit__(self, *_: object) -> None:
        if (self._terminals / "detached").exists():
            self.shell("ktqueue down || true")
        everything = _listed(self._terminals / "all")
        upper = _listed(self._terminals / "up")  # it stops its Redis too, so it is stopped last
        _stop([pid for pid in everything if pid not in upper])
        _stop(upper)


def _listed(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def _stop(pids: list[int]) -> None:
    """Ask processes to stop, and kill those that do not."""
    for pid in pids:
        _signal(pid, signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in pids:
        _signal(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()  # a zombie has no such link


def _signal(pid: int, number: signal.Signals) -> None:
    if _runs(pid):
        os.kill(pid, number)
