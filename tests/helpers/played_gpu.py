"""Python plays the part of the GPU: it writes request words and reads done words in the memory of a HandoffService."""

import time
from typing import Any

import numpy as np
import torch

from ktqueue.operators.native_handoff import LINE, HandoffMemory, HandoffService, request_word

HIDDEN, EXPERTS, K, MOST = 64, 6, 3, 12


class Gpu:
    """A service, its memory, and the operations that a stream would do."""

    def __init__(self, **options: Any) -> None:
        words = torch.zeros(3 * LINE // 4, dtype=torch.int32)
        skip = -words.data_ptr() % LINE // 4
        self.memory = HandoffMemory(
            torch.zeros(16384, dtype=torch.uint8),
            torch.zeros(MOST, HIDDEN),
            words[skip:][:1],
            words[skip + LINE // 4 :][:1],
        )
        self.service = HandoffService(HIDDEN, K, MOST, self.memory, **{"serve": True, **options})

    def write(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Write the input of a task."""
        tokens = len(x)
        place = self.service.x_offset(tokens)
        memory = self.memory.input.numpy()
        memory[: 8 * tokens * K] = np.frombuffer(ids.numpy().tobytes(), np.uint8)
        memory[8 * tokens * K : 12 * tokens * K] = np.frombuffer(weights.numpy().tobytes(), np.uint8)
        memory[place : place + 4 * tokens * HIDDEN] = np.frombuffer(x.numpy().tobytes(), np.uint8)

    def predict(self, ids: torch.Tensor) -> None:
        """Write the predicted ids of the next layer. Call it before `request`, so that the service finds them."""
        place = self.service.predicted_offset(len(ids))
        self.memory.input.numpy()[place : place + 8 * ids.numel()] = np.frombuffer(ids.numpy().tobytes(), np.uint8)

    def request(self, word: int) -> None:
        """Clear the done word and write the request."""
        self.memory.done[0] = 0
        self.memory.request[0] = word

    def wait(self, word: int, seconds: float = 20) -> None:
        """Wait until the task is done."""
        end = time.monotonic() + seconds
        while int(self.memory.done[0]) != word:
            assert time.monotonic() < end, "nobody answered"
            time.sleep(0)

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **bits: bool) -> torch.Tensor:
        """Run a task and return a copy of its output."""
        word = request_word(layer, len(x), **bits)
        self.write(x, ids, weights)
        self.request(word)
        self.wait(word)
        return self.memory.out[: len(x)].clone()


def inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random x [tokens, HIDDEN], ids and weights [tokens, K]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(K).indices
    return torch.randn(tokens, HIDDEN, generator=generator), ids, torch.rand(tokens, K, generator=generator)
