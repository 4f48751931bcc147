"""`ktqueue gateway` and `ktqueue worker`, started separately with an existing Redis."""

import json
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
from command_line import Process, Run, Start
from processes import free_ports


def _wait_for(url: str, process: Process) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} did not answer")


@pytest.mark.long
def test_a_gateway_and_a_worker_find_each_other(start: Start, ktqueue: Run, redis_url: str, tmp_path: Path) -> None:
    [port] = free_ports(1)
    base = f"http://127.0.0.1:{port}"
    made = json.loads(ktqueue("keys", "new", "--json").stdout)
    words = ("gateway", "--redis-url", redis_url, "--port", port, "--api-key-hash", made["sha256"])
    gateway = start(*words, cwd=tmp_path)
    worker = start("worker", "--redis-url", redis_url, "--served-model-name", "tales,stories", cwd=tmp_path)
    try:
        _wait_for(f"{base}/readyz", gateway)
        chat = ("chat", "--base-url", base, "--max-tokens", 4, "--api-key")
        refused = ktqueue(*chat, "wrong", stdin="hello\n")
        assert refused.returncode == 1
        answered = ktqueue(*chat, made["key"], stdin="hello\n")
        assert (answered.returncode, answered.stderr) == (0, "")
        (tmp_path / "in.jsonl").write_text('{"model": "stories", "prompt": "In a castle", "max_tokens": 4}')
        batch = ktqueue("batch", "run", "in.jsonl", "-o", "out.jsonl", "--redis-url", redis_url)
        assert batch.returncode == 0, batch.stderr
        taken = ktqueue("gateway", "--redis-url", redis_url, "--port", port)
        assert taken.returncode == 2
        reason = f"cannot listen on gateway.host 127.0.0.1, gateway.port {port}: Address already in use"
        assert taken.stderr == f"ktqueue: the gateway {reason}\n"
    finally:
        worker.send_signal(signal.SIGINT)
        gateway.send_signal(signal.SIGINT)
        _, worker_log = worker.communicate(timeout=30)
        gateway_out, gateway_log = gateway.communicate(timeout=30)
    assert (worker.returncode, gateway.returncode) == (0, 0)
    assert "drained" in worker_log
    assert made["key"] not in gateway_out + gateway_log + worker_log
    assert "loading: 18" in worker_log


def test_a_port_for_probes_that_is_taken_is_an_error_in_one_line(ktqueue: Run, redis_url: str) -> None:
    port, taken = free_ports(2)
    with socket.create_server(("127.0.0.1", taken)):
        env = {"KTQUEUE_GATEWAY_PROBE_PORT": str(taken)}
        done = ktqueue("gateway", "--redis-url", redis_url, "--port", port, env=env)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"gateway.probe_port {taken}: Address already in use")


def test_without_redis_both_fail_at_once(ktqueue: Run) -> None:
    for verb in ("gateway", "worker"):
        done = ktqueue(verb, "--redis-url", "redis://127.0.0.1:1")
        assert done.returncode == 3
        assert done.stderr.splitlines()[-1].startswith("ktqueue: Redis is away")
        assert "Traceback" not in done.stderr
