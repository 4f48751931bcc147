"""The training script: a few steps on a small text lower the loss, and the result can be converted and loaded."""

import re
from pathlib import Path

import pytest

from ktqueue.core.request import GenerationRequest
from ktqueue.demo import corpus, train
from ktqueue.loading.convert import convert
from ktqueue.loading.load import load_model
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

TEXT = "\n\n".join(
    f"Once upon a time the {hero} met a {guest} by the old well. The {hero} was hungry, and the {guest} had bread. "
    f'"Give me some," said the {hero}, and the {guest} gave it all, for the {guest} was kind and the {hero} was poor.'
    for hero in ("fox", "crow", "wolf", "king", "owl")
    for guest in ("hare", "miller", "princess", "tailor", "elf")
    for _ in range(4)
)


def test_a_few_steps_give_a_model_that_converts_and_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "text.txt"
    source.write_text(TEXT)
    folder = tmp_path / "model"
    train.main(
        [source], out=folder, steps=30, batch=8, window=32, learning_rate=1e-2, vocab_size=400,
        hidden=64, layers=1, experts=4, width=32, device="cpu", seed=3, chat_share=0.2,
    )  # fmt: skip
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert losses[0] > 5.5 and losses[-1] < losses[0] - 1.5
    target = tmp_path / "model.gguf"
    convert(folder, target, experts="q4_0", dense="q8_0")
    assert load_model(str(target)).card_facts.quantization == "Q4_0"
    tokenizer = load_tokenizer(str(target))
    prompt = tokenizer.encode_request(GenerationRequest(model="m", messages=({"role": "user", "content": "Hi"},)))
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n") == prompt.token_ids
    assert [tokenizer.token_bytes(i) for i in tokenizer.eos_token_ids] == [b""]


def test_the_schedule_gives_rates_and_chats() -> None:
    schedule = train.Schedule(steps=1000, batch=10, window=8, learning_rate=1.0, chat_share=0.2)
    assert schedule.rate(0) == pytest.approx(0.05) and schedule.rate(20) == pytest.approx(1.0)
    assert schedule.rate(999) == pytest.approx(train.FINAL_RATE, abs=1e-4)
    assert [schedule.chats(step) for step in (0, 799, 800, 999)] == [0, 0, 8, 8]


def test_chat_prompts_name_what_the_passage_is_about() -> None:
    tokenizer = corpus.train_tokenizer([TEXT], 400)
    text = tokenizer.decode(corpus.chat_stream(tokenizer, [TEXT]).tolist(), skip_special_tokens=False)
    assert re.search(r"<\|im_start\|>user\nTell me a story about an? \w+ and an? \w+\.<\|im_end\|>", text)
    assert corpus.chat_stream(tokenizer, ["too short"]).size == 0


def test_windows_come_from_both_streams_and_repeat_with_the_seed() -> None:
    tokenizer = corpus.train_tokenizer([TEXT], 400)
    text, chat = corpus.text_stream(tokenizer, [TEXT]), corpus.chat_stream(tokenizer, [TEXT])
    schedule = train.Schedule(steps=3, batch=5, window=16, learning_rate=1e-3, chat_share=0.5)
    once, again = (list(train.batches(text, chat, schedule, 4)) for _ in range(2))
    assert [rows.shape for rows in once] == [(5, 16)] * 3
    assert all((first == second).all() for first, second in zip(once, again, strict=True))
