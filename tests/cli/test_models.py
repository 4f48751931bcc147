"""`inspect`, `convert` and `doctor`."""

import json
import socket

import pytest


def test_inspect_shows_the_plan(ktqueue):
    shown = ktqueue("inspect", "demo")
    assert shown.returncode == 0, shown.stderr
    assert "model.layers.*.mlp.experts" in shown.stdout
    assert "CpuExperts" in shown.stdout
    assert "total" in shown.stdout
    assert "\033" not in shown.stdout
    report = json.loads(ktqueue("inspect", "--json").stdout)
    assert report["device_bytes"]["cpu"] == sum(row["device_bytes"] for row in report["rows"])


def test_doctor_is_content_and_says_so_to_machines(ktqueue):
    report = json.loads(ktqueue("doctor", "--json", "--port", 0).stdout)
    levels = {finding["name"]: finding["level"] for finding in report["findings"]}
    assert report["ok"]
    assert levels["kernels"] == levels["model"] == levels["redis program"] == "ok"


def test_doctor_names_what_is_wrong(ktqueue):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = ktqueue(
            "doctor", "--model", "nowhere.gguf", "--redis-url", "redis://127.0.0.1:1", "--port", port,
            "--kv-cache-bytes", "900TB",
        )  # fmt: skip
    assert done.returncode == 1
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if line[:4].strip() in ("ok", "warn", "fail")}
    assert lines["model"].startswith("fail")
    assert "nowhere.gguf" in lines["model"]
    assert lines["memory"].startswith("fail")
    assert lines["port"].startswith("warn")
    assert any(line.startswith("fail") and "127.0.0.1:1" in line for line in done.stdout.splitlines())


def test_doctor_sees_the_running_stack(ktqueue, stack):
    done = ktqueue("doctor", *stack.flags, "--port", 0)
    assert "reachable, 1 worker(s) serve demo" in done.stdout


@pytest.mark.usefixtures("shared_data")
def test_convert_makes_a_file_that_inspect_reads(ktqueue, tmp_path, shared_data):
    import lzma
    import shutil

    folder = tmp_path / "tale-teller"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared_data / "demo-model" / name, folder)
    with lzma.open(shared_data / "demo-model" / "model.safetensors.xz") as packed:
        (folder / "model.safetensors").write_bytes(packed.read())
    done = ktqueue("convert", folder, "out.gguf", "--experts", "q8_0", "--dense", "f16")
    assert done.returncode == 0, done.stderr
    assert "MiB" in done.stderr
    report = json.loads(ktqueue("inspect", "out.gguf", "--json").stdout)
    assert ["Q8_0"] in [row["quants"] for row in report["rows"] if row["operator"] == "CpuExperts"]
    assert ktqueue("convert", folder, "out.gguf").returncode == 2
