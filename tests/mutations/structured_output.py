"""Mutations of promises about answers that must match a grammar."""

from mutation import Mutation

ENGINE, WORKERS = "tests/engine/test_grammar.py", "tests/workers/generation/test_grammars.py"
LIBRARY, SCHEMAS, FIELDS = (
    "tests/answers/test_grammar.py", "tests/openai/test_json_schema.py", "tests/openai/test_constraints.py",
)  # fmt: skip

STRUCTURED_OUTPUT: dict[str, Mutation] = {
    "every token matches a grammar": Mutation(
        "ktqueue/engine/token_selector.py",
        "            mask_logits(array, masked.masks, masked.rows)\n",
        "",
        (f"{ENGINE}::test_answers_match_the_schema[host]",),
    ),
    "ends are removed from every mask": Mutation(
        "ktqueue/engine/token_masks.py",
        "    kept = others.any(axis=1)\n",
        "    kept = np.ones(len(others), dtype=bool)\n",
        (f"{ENGINE}::test_an_answer_ends_if_the_vocabulary_has_no_other_token[host]",),
    ),
    "a prepared step is used after a jump": Mutation(
        "ktqueue/engine/rows.py",
        'for which a prepared step has no place."""\n        self.version += 1\n',
        'for which a prepared step has no place."""\n',
        ("tests/engine/test_prepared_step.py::test_preparing_steps_changes_no_output[1-400]",),
    ),
    "a complete document continues": Mutation(
        "ktqueue/engine/sequence.py",
        "if self.matcher is not None and self.matcher.is_complete:",
        "if False:",
        (f"{ENGINE}::test_the_end_is_postponed_only_while_the_grammar_allows_more[host-start: /a{{2,7}}/-more1-7]",),
    ),
    "a failed grammar ends the worker": Mutation(
        "ktqueue/engine/request_table.py",
        "        except GrammarFailed as fault:\n            return self.fail(sequence, fault)\n",
        "        except GrammarFailed:\n            raise\n",
        (f"{ENGINE}::test_a_limit_in_the_middle_of_an_answer_ends_that_sequence",),
    ),
    "a resumed answer has no grammar": Mutation(
        "workers/generation/engine_thread.py",
        "matcher=job.prompt.matcher,",
        "matcher=None if job.resumed else job.prompt.matcher,",
        (f"{WORKERS}::test_a_half_written_document_goes_on_at_the_next_token",),
    ),
    "grammars have no limit of memory": Mutation(
        "ktqueue/answers/grammar_memory.py",
        "        return not (compiling or self.lexers()) or",
        "        return True or",
        (f"{LIBRARY}::test_only_so_many_grammars_run_as_memory_has_room_for",),
    ),
    "the wait for a grammar's memory has no end": Mutation(
        "ktqueue/workers/generation/admission.py",
        "            if time.monotonic() > until:",
        "            if False:",
        (f"{WORKERS}::test_the_wait_for_memory_of_a_grammar_ends",),
    ),
    "a batch job without memory for its grammar fails": Mutation(
        "ktqueue/workers/generation/incarnation.py",
        "isinstance(refused, NoGrammarMemory) and",
        "False and",
        (f"{WORKERS}::test_the_wait_for_memory_of_a_grammar_ends",),
    ),
    "ended answers keep their grammars": Mutation(
        "ktqueue/engine/request_table.py",
        "        sequence.matcher = None",
        "        pass",
        (f"{WORKERS}::test_grammars_wait_for_memory",),
    ),
    "compiling a grammar has no time limit": Mutation(
        "ktqueue/answers/grammar_process.py",
        "        _allow_cpu_seconds(CPU_SECONDS)\n",
        "",
        (f"{LIBRARY}::test_a_grammar_that_takes_too_long_is_refused_once",),
    ),
    "forced text becomes a special token": Mutation(
        "ktqueue/answers/grammar.py",
        "return ids if spells or self.greedy is None else self.greedy(text)",
        "return ids",
        (f"{LIBRARY}::test_forced_text_never_becomes_a_special_token",),
    ),
    "unknown keywords are ignored": Mutation(
        "ktqueue/openai/json_schema.py",
        '            raise _wrong(param, place, f"is not supported{_hint(key)}")\n',
        "            continue\n",
        (f"{SCHEMAS}::test_a_keyword_is_refused_with_its_place",),
    ),
    "a date is checked only as the library does": Mutation(
        "ktqueue/openai/json_schema.py",
        "    if name in _PATTERNS:\n",
        "    if False:\n",
        (f"{SCHEMAS}::test_a_keyword_is_honoured[format]",),
    ),
    "the first of two constraints counts": Mutation(
        "ktqueue/openai/constraints.py",
        "        if len(given) > 1:\n",
        "        if False:\n",
        (f"{FIELDS}::test_two_constraints_are_refused",),
    ),
}  # fmt: skip
