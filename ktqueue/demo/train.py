"""Trains a small Qwen3-MoE on any text: `python -m ktqueue.demo.train TEXT... --out FOLDER --steps N`.

The result is a Hugging Face folder (bf16 safetensors, tokenizer, chat template), which `ktqueue convert` turns into one
GGUF file. The defaults are the shape and schedule of the built-in model and need a GPU. With smaller --hidden, --layers
and --batch, training also works on a CPU.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from torch import nn

from ktqueue.demo import corpus
from ktqueue.loading.skeleton import build_random

CONTEXT = 4096  # tokens that the config allows; training sees windows of --window
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
BALANCE = 0.01  # weight of the loss that balances the use of experts
FINAL_RATE = 0.05  # of the peak learning rate, at the end of the cosine


@dataclass(frozen=True, slots=True)
class Schedule:
    """Each step trains `batch` windows of `window` tokens. The last `chat_share` of the steps is mostly chat."""

    steps: int
    batch: int
    window: int
    learning_rate: float
    chat_share: float

    @property
    def warmup(self) -> int:
        return max(1, self.steps // 50)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then a cosine."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done)))

    def chats(self, step: int) -> int:
        """Return the number of chat windows in the batch of a step."""
        return self.batch * 4 // 5 if step >= self.steps * (1 - self.chat_share) else 0


def build_model(
    vocab_size: int, token_id: Callable[[str], int | None], hidden: int, layers: int, experts: int, width: int
) -> nn.Module:
    """Build a new Qwen3-MoE: 4 experts per token, heads of 64, one key/value head per four query heads, tied
    embeddings."""
    heads = max(2, hidden // 32)
    return build_random(
        {
            "model_type": "qwen3_moe",
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 4),
            "head_dim": 64,
            "num_experts": experts,
            "num_experts_per_tok": min(4, experts),
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
            "max_position_embeddings": CONTEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "tie_word_embeddings": True,
            "router_aux_loss_coef": BALANCE,
            "bos_token_id": token_id(corpus.END_OF_TEXT),
            "eos_token_id": token_id(corpus.TURN_END),
            "pad_token_id": token_id(corpus.END_OF_TEXT),
        }
    )


def batches(text: corpus.Tokens, chat: corpus.Tokens, schedule: Schedule, seed: int) -> Iterator[corpus.Windows]:
    """Yield [batch, window] token ids for each step. Windows are drawn at random from both streams."""
    rng = np.random.default_rng(seed)
    for step in range(schedule.steps):
        chats = schedule.chats(step) if chat.size > schedule.window else 0
        rows = [_window(chat, schedule.window, rng) for _ in range(chats)]
        rows += [_window(text, schedule.window, rng) for _ in range(schedule.batch - chats)]
        yield np.stack(rows).astype(np.int64)


def train(model: nn.Module, data: Iterator[corpus.Windows], schedule: Schedule, device: str, console: Console) -> float:
    """Train the model in place. Returns the language-model loss of the last step, in nats per token."""
    model.to(device).train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=BETAS)
    began, loss = time.monotonic(), math.nan
    for step, rows in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        ids = torch.from_numpy(rows).to(device)
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device != "cpu"):
            output = model(input_ids=ids, labels=ids, use_cache=False)
        optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if step % 10 == 0 or step == schedule.steps - 1:
            loss = float(output.loss.detach()) - BALANCE * float(output.aux_loss.detach())
            speed = (step + 1) * rows.size / (time.monotonic() - began)
            console.print(f"step {step + 1}/{schedule.steps}  loss {loss:.3f}  {speed:,.0f} tokens/s", highlight=False)
    return loss


def main(
    texts: Annotated[list[Path], typer.Argument(help="Text files, plain or .xz, with empty lines between paragraphs.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    steps: Annotated[int, typer.Option(min=1)] = 4300,
    batch: Annotated[int, typer.Option(min=1, help="Windows per step.")] = 96,
    window: Annotated[int, typer.Option(min=8, help="Tokens per window.")] = 512,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 3e-3,
    chat_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Last part of the steps, which trains mostly on chat.")
    ] = 0.2,
    vocab_size: Annotated[int, typer.Option(min=300)] = 8192,
    hidden: Annotated[int, typer.Option(min=32)] = 256,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    experts: Annotated[int, typer.Option(min=1)] = 16,
    width: Annotated[int, typer.Option(min=32, help="Width of one expert.")] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto uses a GPU if there is one.")] = "auto",
    seed: int = 1,
) -> None:
    """Train a small Mixture-of-Experts model that writes like TEXTS."""
    console = Console()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    contents = [corpus.read_text(path) for path in texts]
    pieces = corpus.documents(contents)
    tokenizer = corpus.train_tokenizer(pieces, vocab_size)
    size = tokenizer.get_vocab_size()
    text, chat = corpus.text_stream(tokenizer, pieces), corpus.chat_stream(tokenizer, contents)
    if text.size <= window:
        raise typer.BadParameter(f"the texts have {text.size} tokens, but a window needs more than {window}")
    console.print(f"{text.size:,} tokens of text, {chat.size:,} of chat, a vocabulary of {size:,}", highlight=False)
    model = build_model(size, tokenizer.token_to_id, hidden, layers, experts, width)
    schedule = Schedule(steps, batch, window, learning_rate, chat_share)
    train(model, batches(text, chat, schedule, seed), schedule, device, console)
    out.mkdir(parents=True, exist_ok=True)
    model.to(device="cpu", dtype=torch.bfloat16)
    model.save_pretrained(out)  # type: ignore[operator]
    corpus.save_tokenizer(tokenizer, out, CONTEXT)
    console.print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters", highlight=False)
    console.print(f"next: ktqueue convert {out} {out}.gguf --experts q4_0 --dense q8_0", highlight=False)


def _window(stream: corpus.Tokens, window: int, rng: np.random.Generator) -> corpus.Tokens:
    start = int(rng.integers(0, stream.size - window))
    return stream[start : start + window]


if __name__ == "__main__":
    typer.run(main)
