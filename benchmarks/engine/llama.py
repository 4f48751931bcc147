"""llama.cpp on the same file, as a process that answers questions (see `json_lines`).

It runs under any Python that has llama-cpp-python (its C API through ctypes) and numpy, so it imports nothing of
ktqueue. Only the calls that decode are timed: sampling, text and scheduling are not, which favours llama.cpp.
"""

import argparse
import ctypes
import time

import llama_cpp as api
import numpy as np

from benchmarks.json_lines import answer_questions, say

CONTEXT = 16_384
BATCH = 2_048


class Llama:
    """One context over one model, for up to `rows` sequences that share a cache."""

    def __init__(self, path: str, *, threads: int, rows: int, repack: bool, exact: bool) -> None:
        model_settings = api.llama_model_default_params()
        model_settings.n_gpu_layers = 0
        model_settings.use_extra_bufts = repack
        self._model = api.llama_model_load_from_file(path.encode(), model_settings)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        settings = api.llama_context_default_params()
        settings.n_ctx = CONTEXT
        settings.n_batch = BATCH
        settings.n_ubatch = 512
        settings.n_seq_max = rows
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = 0 if exact else 1
        if exact:
            settings.type_k = settings.type_v = api.GGML_TYPE_F32
        settings.kv_unified = True
        settings.no_perf = True
        self._context = api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SystemExit("llama.cpp cannot make a context")
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(BATCH, 0, 1)

    def decode(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """Greedy decode of all rows at once: tokens a second and milliseconds a step over `tokens` - 1 steps."""
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        row_tokens = [self._prefill(row, prompt) for row, prompt in enumerate(prompts)]
        seconds = []
        for step in range(tokens - 1):
            self._fill([(token, len(prompts[row]) + step, row, True) for row, token in enumerate(row_tokens)])
            began = time.perf_counter()
            self._run()
            seconds.append(time.perf_counter() - began)
            row_tokens = [self._likeliest(row) for row in range(len(prompts))]
        return {
            "tokens_per_second": len(prompts) * len(seconds) / sum(seconds),
            "step_ms": 1e3 * sum(seconds) / len(seconds),
            "fastest_step_ms": 1e3 * min(seconds),
        }

    def prefill(self, prompt: list[int]) -> dict[str, float]:
        """One prompt alone, its last position scored."""
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        last = len(prompt) - 1
        self._fill([(token, place, 0, place == last) for place, token in enumerate(prompt)])
        began = time.perf_counter()
        self._run()
        seconds = time.perf_counter() - began
        return {"tokens_per_second": len(prompt) / seconds, "step_ms": 1e3 * seconds, "fastest_step_ms": 1e3 * seconds}

    def score(self, ids: list[int], path: str) -> int:
        """Write the logits of all positions of one prompt to `path`: float32 [tokens, vocab], numpy's format."""
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        self._fill([(token, place, 0, True) for place, token in enumerate(ids)])
        self._run()
        np.save(path, np.stack([self._logits(place) for place in range(len(ids))]))
        return len(ids)

    def _prefill(self, row: int, prompt: list[int]) -> int:
        last = len(prompt) - 1
        self._fill([(token, place, row, place == last) for place, token in enumerate(prompt)])
        self._run()
        return self._likeliest(last)

    def _fill(self, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, scored) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, scored
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row

    def _run(self) -> None:
        if api.llama_decode(self._context, self._batch):
            raise SystemExit("llama_decode failed")
        api.llama_synchronize(self._context)

    def _logits(self, place: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
        return np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, place), (self._vocabulary,))

    def _likeliest(self, place: int) -> int:
        return int(self._logits(place).argmax())


def main() -> None:
    """Answer until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--no-repack", action="store_true")
    parser.add_argument("--exact", action="store_true", help="a cache in float32, no flash attention")
    arguments = parser.parse_args()
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    llama = Llama(
        arguments.model,
        threads=arguments.threads,
        rows=arguments.rows,
        repack=not arguments.no_repack,
        exact=arguments.exact,
    )
    say({"llama_cpp_python": api.__version__})
    answer_questions(llama)


if __name__ == "__main__":
    main()
