"""Mutations of promises about prompts: their log probabilities, their parts in the journal, and words to avoid."""

from mutation import Mutation

ENGINE, WORKER = "tests/engine/test_prompt_logprobs.py", "tests/workers/generation/test_prompts.py"
SCHEDULER = "tests/engine/test_scheduler.py"
COMPLETIONS = "tests/e2e/test_completions.py"
GAPS = "tests/loading/tokenizer/test_fill_in_middle.py"

PROMPTS: dict[str, Mutation] = {
    "logits of cached tokens are missed": Mutation(
        "ktqueue/engine/prefix_cache.py",
        "            full = min(full, max(0, sequence.request.prompt_entries - 1) // self._page_size)\n",
        "            pass\n",
        (f"{ENGINE}::test_each_token_of_the_prompt_has_its_log_probability",),
    ),
    "a tenant finds the prompts of others in the cache": Mutation(
        "ktqueue/engine/sequence.py",
        'if tenant in ("", DEFAULT_TENANT):',
        "if tenant is not None:",
        ("tests/engine/test_engine.py::test_pages_of_a_tenant_are_found_by_nobody_else",),
    ),
    "a retry reads states of the failed step": Mutation(
        "ktqueue/engine/scheduler.py",
        "ranked[0 if self._rows.states and len(ranked) > 1 else half :]",
        "ranked[half:]",
        ("tests/engine/test_states.py::test_no_state_of_a_failed_step_is_used",),
    ),
    "a prefix that arrives several times is computed as often": Mutation(
        "ktqueue/engine/scheduler.py",
        "plan.add(sequence, count, self._rows.prefixes.completed(sequence, count))",
        "plan.add(sequence, count)",
        (f"{SCHEDULER}::test_a_prefix_of_requests_that_arrive_together_is_computed_once[batch-4-True]",),
    ),
    "a request that sits out loses its row": Mutation(
        "ktqueue/engine/rows.py",
        "            self._reserved_rows += _rows(sequence)\n",
        "",
        (f"{SCHEDULER}::test_a_request_that_sits_out_keeps_its_place",),
    ),
    "a long prompt gets in between": Mutation(
        "ktqueue/engine/rows.py",
        "        if self._sitting_out and sequence.length",
        "        if False and sequence.length",
        (f"{SCHEDULER}::test_a_request_that_sits_out_keeps_its_place",),
    ),
    "a snapshot of a state is overwritten": Mutation(
        "ktqueue/engine/states.py",
        "keeps = may_repeat or sequence.state == NO_SLOT or self._slots.is_kept(sequence.state)",
        "keeps = may_repeat or sequence.state == NO_SLOT",
        ("tests/engine/test_states.py::test_choices_share_the_state_of_their_prompt",),
    ),
    "a preempted prompt is scored again": Mutation(
        "ktqueue/engine/sequence.py",
        "        start = max(first, request.prompt_entries - 1)\n",
        "        start = first\n",
        (f"{ENGINE}::test_a_preempted_prompt_gives_each_entry_once",),
    ),
    "the logits of a whole prompt are in memory": Mutation(
        "ktqueue/engine/scheduler.py",
        "    return count if len(wanted) <= room else wanted.start + room - sequence.num_computed_tokens\n",
        "    return count\n",
        (f"{ENGINE}::test_logits_of_a_step_are_limited",),
    ),
    "a prompt is written again after a death": Mutation(
        "workers/generation/running_job.py",
        "        self._written_ids = sum(len(part.token_ids) for part in written)\n",
        "        self._written_ids = 0\n",
        (f"{WORKER}::test_a_prompt_is_told_once_however_often_its_worker_dies",),
    ),
    "log probabilities begin again after a death": Mutation(
        "workers/generation/engine_thread.py",
        "                prompt_entries=job.prompt_entries,\n",
        "",
        (f"{WORKER}::test_a_prompt_is_told_once_however_often_its_worker_dies",),
    ),
    "a request for its prompt alone is generated": Mutation(
        "workers/generation/incarnation.py",
        "        if job.request.prompt_only:\n",
        "        if False:\n",
        (f"{WORKER}::test_a_prompt_without_an_answer",),
    ),
    "bad words are avoided only at the beginning of a text": Mutation(
        "ktqueue/loading/tokenizer/tokenizer.py",
        'for word in words for prefix in ("", " ")]',
        'for word in words for prefix in ("",)]',
        (f"{WORKER}::test_bad_words_do_not_appear", f"{GAPS}::test_spellings_of_bad_words"),
    ),
    "a prompt waits for a row": Mutation(
        "ktqueue/broker/lua/claim_jobs.lua",
        "while rows <= most and",
        "while rows < most and",
        (f"{WORKER}::test_a_prompt_without_an_answer_takes_no_row",),
    ),
    "the last choice is the best": Mutation(
        "ktqueue/openai/completions.py",
        "key=_mean_logprob, reverse=True)",
        "key=_mean_logprob)",
        (f"{COMPLETIONS}::test_the_best_choices_are_returned",),
    ),
    "offsets begin at the answer": Mutation(
        "ktqueue/openai/completions.py",
        "        begin = self.echoed.get(delta.index, 0)\n",
        "        begin = 0\n",
        (f"{COMPLETIONS}::test_an_echoed_prompt_comes_before_the_answer_also_in_logprobs",),
    ),
}
