"""lm-evaluation-harness computes log likelihoods with us, unchanged, and they are those of transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktqueue.loading.load import open_checkpoint
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

QUESTIONS: list[dict[str, Any]] = [
    {"question": "Once upon a time there was a king who had", "choices": [" three daughters", " xylophone", " a son"]},
    {"question": "The wolf went into the", "choices": [" forest", " computer", " deep wood and"]},
    {"question": "And they lived happily ever", "choices": [" after.", " n\u00e4ive", " before."]},
]
TASK = """
task: tale_choices
dataset_path: json
dataset_kwargs: {data_files: {test: "{data}"}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]


def write_task(folder: Path) -> None:
    """A task and its data."""
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps({**question, "answer": 0}) + "\n" for question in QUESTIONS))
    (folder / "tale.yaml").write_text(TASK.replace("{data}", str(data)))


def likelihoods_of_transformers() -> list[list[tuple[float, bool]]]:
    """Log likelihood of each choice after its question, and whether its tokens are the likeliest."""
    checkpoint = open_checkpoint("demo")
    kind: Any = Qwen3MoeForCausalLM  # it has no annotations
    model = kind(Qwen3MoeConfig(**checkpoint.config())).eval().float()
    model.load_state_dict({name: checkpoint.decode(name, torch.float32) for name in checkpoint.names()}, strict=False)
    model.tie_weights()
    checkpoint.close()
    tokenizer = load_tokenizer("demo")

    def likelihood(question: str, choice: str) -> tuple[float, bool]:
        begin, ids = len(tokenizer.encode(question)), tokenizer.encode(question + choice)
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
        chosen = [float(logprobs[place - 1, ids[place]]) for place in range(begin, len(ids))]
        best = logprobs.argmax(dim=-1)
        return sum(chosen), all(int(best[place - 1]) == ids[place] for place in range(begin, len(ids)))

    return [[likelihood(entry["question"], choice) for choice in entry["choices"]] for entry in QUESTIONS]


@pytest.mark.parametrize("as_token_ids", [True, False])
def test_log_likelihoods(exact_server: Any, tokenizer_folder: Path, tmp_path: Path, as_token_ids: bool) -> None:
    write_task(tmp_path)
    options = {
        "model": "demo", "base_url": f"{exact_server.base_url}/completions", "max_length": 512, "num_concurrent": 2,
        "tokenizer_backend": "huggingface", "tokenizer": tokenizer_folder, "tokenized_requests": as_token_ids,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions",
         "--model_args", ",".join(f"{name}={value}" for name, value in options.items()),
         "--tasks", "tale_choices", "--include_path", str(tmp_path), "--batch_size", "3",
         "--output_path", str(tmp_path / "results"), "--log_samples"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"),
             "OPENAI_API_KEY": exact_server.api_key},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (samples,) = (tmp_path / "results").rglob("samples_tale_choices*.jsonl")
    found = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    for sample, expected in zip(found, likelihoods_of_transformers(), strict=True):
        for (value, is_greedy), (likelihood, is_likeliest) in zip(sample["filtered_resps"], expected, strict=True):
            assert float(value) == pytest.approx(likelihood, abs=0.02)
            assert str(is_greedy) == str(is_likeliest)
