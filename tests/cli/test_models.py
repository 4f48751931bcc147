"""`inspect`, `fit`, `convert` and `doctor`. Most tests run them in this process, which imports torch only once."""

import json
import re
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from command_line import OpenTerminal, Run, Stack

from ktqueue.cli.doctor import examine
from ktqueue.cli.main import run
from ktqueue.cli.model import with_model
from ktqueue.core.config import BrokerConfig, Config, EngineConfig
from ktqueue.loading import model_path
from ktqueue.loading.tokenizer.library import train_byte_level
from ktqueue.workers.startup import device as device_module

Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verb:
    """Run a command line in this process, in an empty folder. Returns exit code, output and error output."""
    monkeypatch.chdir(tmp_path)

    def runner(*words: object) -> tuple[int, str, str]:
        code = run([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return runner


def test_inspect_shows_the_plan(here: Verb) -> None:
    code, out, err = here("inspect", "demo")
    assert code == 0, err
    for word in ("model.layers.*.mlp.experts", "CpuDecoder", "total", "Qwen3Moe"):
        assert word in out
    assert "\033" not in out
    _, out, _ = here("inspect", "--json")
    report = json.loads(out)
    assert report["device_bytes"]["cpu"] == sum(row["device_bytes"] for row in report["rows"])


def test_inspect_plans_the_memory_of_a_gpu(here: Verb) -> None:
    flags = ("inspect", "demo", "--device", "cuda", "--gpu-memory", "80GiB", "--gpu-memory-utilization", "0.5")
    code, out, err = here(*flags)
    assert code == 0, err
    assert re.search(r"cache +3[6-9]\.\d GiB", out) and re.search(r"free +4\d\.\d GiB", out)
    memory = json.loads(here(*flags, "--json")[1])["memory"]
    assert sum(memory[part] for part in memory if part != "pages") == 80 << 30
    assert re.search(r"memory of the host.*\n.*\n+weights +13\.5 MiB\nhand-off +\d+\.\d MiB", out)
    assert json.loads(here(*flags, "--json")[1])["host_memory"]["hand-off"] > 1 << 20
    assert json.loads(here(*flags, "--gpu-expert-memory", "1GiB", "--json")[1])["host_memory"]["hand-off"] == 0
    half = json.loads(here(*flags, "--kv-cache-dtype", "fp8", "--json")[1])["memory"]
    assert half["pages"] == pytest.approx(2 * memory["pages"], abs=2)


def test_the_page_shows_what_inspect_prints_of_a_gpu(here: Verb) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "gpu.md").read_text()
    command, shown = re.findall(
        r"```sh\nktqueue (inspect synthetic.*)\n```\n\nends with\n\n```text\n(.*?)```", page, re.DOTALL
    )[0]
    code, out, _ = here(*shlex.split(command))
    assert code == 0
    assert re.sub(r" +$", "", out, flags=re.MULTILINE).endswith(shown)


@pytest.mark.parametrize(
    ("model", "device", "is_said"), [("a.gguf", "cpu", True), ("a.gguf", "cuda", False), ("demo", "cpu", False)]
)
def test_a_gpu_that_a_model_will_not_use_is_named(
    model: str,
    device: str,
    is_said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the command that writes the flags for it. `fit` itself does not say so."""
    monkeypatch.setattr(device_module, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(model_path, "resolve_model", lambda _: None)
    config = Config(engine=EngineConfig(model=model, device=device))
    for runs in (True, False):
        with_model(config, runs=runs)
        line = "the GPU is not used: `ktqueue fit a.gguf` writes the flags that use it"
        assert (line in capsys.readouterr().err) == (is_said and runs)


def test_inspect_says_that_loading_will_refuse_the_plan(here: Verb, tmp_path: Path) -> None:
    """The error comes after the table, because the table has the names that rules need."""
    (tmp_path / "odd.yaml").write_text("- match: {class: 'RMSNorm'}\n  replace: {op: CpuLinear}\n")
    words = "odd.yaml:1: model.layers.0.self_attn.q_norm: Qwen3MoeRMSNorm cannot be replaced by CpuLinear"
    code, out, err = here("inspect", "demo", "--rules", "odd.yaml")
    assert (code, err.count("\n")) == (2, 1) and words in err
    assert "model.layers.*.mlp.experts" in out and "total" in out
    code, out, err = here("inspect", "demo", "--rules", "odd.yaml", "--json")
    assert code == 2 and words in err and words in json.loads(out)["refusal"]
    assert json.loads(here("inspect", "demo", "--json")[1])["refusal"] is None


def test_inspect_fits_a_terminal_of_80_columns(terminal: OpenTerminal) -> None:
    process = terminal("inspect", "demo")
    assert process.end() == 0
    lines = process.screen.splitlines()
    assert "operator CpuDecoder, device cpu" in [line.strip() for line in lines]
    rows = {words[0]: words for line in lines if (words := line.split())}
    assert rows["model.layers.*.post_attention_layernorm"][1] == "F32"
    assert rows["lm_head"][2] == "tied"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspect", "nowhere.gguf"], "nowhere.gguf"),
        (["inspect", "--dtype", "int3"], "engine.dtype"),
        (
            ["inspect", "--device", "cuda", "--gpu-memory", "much"],
            "--gpu-memory must be a size such as 80GiB, got 'much'",
        ),
        (["inspect", "--gpu-memory", "80GiB"], "--gpu-memory 80GiB needs --device cuda"),
        (["inspect", "--device", "cuda", "--gpu-memory", "1GiB"], "engine.gpu_memory_utilization"),
        (["inspect", "--kv-cache-dtype", "int3"], "engine.kv_cache_dtype"),
        (["inspect", "--rules", "nowhere.yaml"], "nowhere.yaml"),
        (["inspect", "--device", "xpu"], "engine.device"),
        (["inspect", "--max-model-len", "99999"], "engine.max_model_len must be at most 4096"),
        (["fit", "--host-memory", "much"], "--host-memory"),
        (["convert", "nowhere", "out.gguf"], "nowhere"),
    ],
)
def test_an_error_names_what_cannot_be_read(here: Verb, words: list[str], says: str) -> None:
    code, out, err = here(*words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert says in err


def test_fit_says_yes_with_the_sum_and_the_command(here: Verb) -> None:
    code, out, err = here("fit", "demo", "--host-memory", "8GiB", "--gpu-memory", "0B")
    assert code == 0, err
    assert re.search(r"experts +13\.5 MiB", out) and re.search(r"free now +8\.0 GiB", out)
    assert "8.0 KiB a token" in out and "yes, demo runs here" in out
    (command,) = (line for line in out.splitlines() if line.startswith("  ktqueue up"))
    asked = shlex.split(command)[2:]
    assert asked == ["--model", "demo", "--max-model-len", "4096", "--kv-cache-bytes", "1024MiB"]
    assert here("inspect", *asked)[0] == 0
    flags = ("--host-memory", "8GiB", "--gpu-memory", "8GiB", "--max-num-seqs", "5", "--no-cuda-graphs", "--json")
    answer = json.loads(here("fit", "demo", *flags)[1])
    assert answer["fits"] and answer["gpu"]["cache"] > 1 << 30
    asked = shlex.split(answer["command"])[2:]
    assert "--device cuda" in answer["command"] and "--max-num-seqs 5" in answer["command"]
    assert "--no-cuda-graphs" in asked
    assert here("inspect", *asked, "--gpu-memory", "8GiB")[0] == 0


def test_fit_says_no_and_why(here: Verb, tmp_path: Path) -> None:
    code, out, err = here("fit", "demo", "--host-memory", "1GiB", "--gpu-memory", "0B")
    assert (code, err) == (1, "")
    assert "no, demo does not run here: it needs 1.6 GiB of the host's memory, and 1.0 GiB are free" in out
    (tmp_path / "odd.gguf").write_bytes(b"GGUF")
    code, out, _ = here("fit", "odd.gguf", "--json")
    assert code == 1 and json.loads(out)["command"] is None and "truncated" in json.loads(out)["why_not"]
    code, _, err = here("fit", "nowhere.gguf")
    assert code == 2 and "nowhere.gguf: no such file" in err
    assert "Intel GPUs" in here("fit", "demo", "--device", "xpu")[2]


def test_doctor_finds_nothing_wrong_here_and_writes_json(here: Verb) -> None:
    code, out, _ = here("doctor", "--json", "--port", 0)
    report = json.loads(out)
    levels = {finding["name"]: finding["level"] for finding in report["findings"]}
    assert (code, report["ok"]) == (0, True)
    assert levels["kernels"] == levels["model"] == levels["redis program"] == "ok"


def test_doctor_names_what_is_wrong(here: Verb) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, _ = here(
            "doctor", "--model", "nowhere.gguf", "--redis-url", "redis://127.0.0.1:1", "--port", port,
            "--kv-cache-bytes", "900000GB",
        )  # fmt: skip
    assert code == 1
    lines = {line.split()[1]: line for line in out.splitlines() if line[:4].strip() in ("ok", "warn", "fail")}
    assert lines["model"].startswith("fail")
    assert "nowhere.gguf" in lines["model"]
    assert lines["memory"].startswith("fail")
    assert lines["port"].startswith("warn")
    assert any(line.startswith("fail") and "127.0.0.1:1" in line for line in out.splitlines())


def finding(out: str, name: str) -> dict[str, str]:
    """The finding of `doctor --json` with this name."""
    return next(found for found in json.loads(out)["findings"] if found["name"] == name)


def test_doctor_names_a_missing_gpu(here: Verb) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    for device, wanted in (("cuda", "cpu on this machine: "), ("cuda:x", "cpu, cuda or cuda:N, got 'cuda:x'")):
        code, out, _ = here("doctor", "--json", "--device", device, "--port", 0)
        gpu = finding(out, "gpu")
        assert (code, gpu["level"]) == (1, "fail")
        assert f"engine.device must be {wanted}" in gpu["fact"]


def test_doctor_counts_the_weights_as_memory(tmp_path: Path) -> None:
    config = Config(broker=BrokerConfig(state_dir=str(tmp_path)), engine=EngineConfig(kv_cache_bytes=16 << 20))
    levels = {}
    for available in (30 << 20, 40 << 20):
        (memory,) = (found for found in examine(config, available) if found.name == "memory")
        assert "20.6 MiB needed for weights" in memory.fact
        levels[available >> 20] = memory.level
    assert levels == {30: "fail", 40: "ok"}


@pytest.mark.long
def test_doctor_refuses_an_unknown_instruction_set(ktqueue: Run) -> None:
    done = ktqueue("doctor", "--json", "--port", 0, env={"KTQUEUE_ISA": "neon"})
    kernels = finding(done.stdout, "kernels")
    assert (done.returncode, kernels["level"]) == (1, "fail")
    assert "KTQUEUE_ISA must be one of" in kernels["fact"]


def test_doctor_sees_the_running_stack(ktqueue: Run, stack: Stack) -> None:
    done = ktqueue("doctor", *stack.flags, "--port", 0)
    assert "reachable, 1 worker(s) serve demo" in done.stdout


def test_convert_makes_a_file_that_inspect_reads(here: Verb, tmp_path: Path) -> None:
    folder = tmp_path / "tale-teller"
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "head_dim": 16,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    config = transformers.Qwen3MoeConfig(**sizes, **heads, vocab_size=300, eos_token_id=299)
    model: Any = transformers.Qwen3MoeForCausalLM
    model(config).save_pretrained(folder)
    train_byte_level(["There was a fox."] * 9, 300, "qwen2", ["<|im_end|>"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["mtp.fc.weight"] = torch.ones(256, 512)
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    code, _, err = here("convert", folder, "out.gguf", "--experts", "q8_0", "--dense", "f16")
    assert code == 0, err
    assert "MiB" in err and "1 layer that predicts further tokens is left out: GGUF's qwen3moe" in err
    (tmp_path / "tale.txt").write_text("There was a fox. " * 20)
    code, _, err = here("imatrix", "-m", folder, "-f", tmp_path / "tale.txt", "-o", "tale.gguf", "--ctx-size", "8")
    assert code == 0 and "chunks of 8 tokens, 16 matrices" in err, err
    assert here("convert", folder, "new.gguf", "--imatrix", "tale.gguf")[0] == 0
    _, out, _ = here("inspect", "out.gguf", "--json")
    assert ["Q8_0"] in [row["quants"] for row in json.loads(out)["rows"] if row["name"].endswith("experts")]
    assert here("convert", folder, "out.gguf")[0] == 2  # out.gguf already exists


def test_convert_writes_synthetic_models(here: Verb) -> None:
    code, _, err = here("convert", "synthetic:tiny:q4_k_m", "out.gguf", "--layers", "3")
    assert code == 0, err
    assert "model.layers.*.mlp.experts" in here("inspect", "out.gguf")[1]
    for words, says in (
        (["synthetic:tiny:q4_0", "--experts", "q8_0"], "--imatrix cannot be used with a synthetic model"),
        ([".", "--layers", "2"], "--layers can be used only with a synthetic model"),
        (["synthetic:tiny:q9_9"], "unknown quantisation 'q9_9'"),
    ):
        code, _, err = here("convert", words[0], "new.gguf", *words[1:])
        assert code == 2 and says in err, err
