"""Mutations of what jobs leave in Redis: memory, times, lists that were deleted, failed jobs."""

from mutation import SCRIPTS, Mutation

STORED, CLOCK = "tests/broker/test_stored.py", "tests/broker/test_clock.py"
RESPONSES = "tests/broker/test_responses.py"
GATHERED = "tests/workers/generation/test_gathered_events.py"
SCRUB, RETRY = "tests/broker/test_scrub.py", "tests/broker/test_retry.py"

STORED_JOBS: dict[str, Mutation] = {
    "ends of jobs are not announced": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "  redis.call('PUBLISH', TAG .. 'ends', id)\n",
        "",
        ("tests/broker/test_journal.py::test_the_whole_journal_is_read_once_its_job_has_ended",),
    ),
    "gathered tokens of a cancelled job are lost": Mutation(
        "ktqueue/workers/generation/incarnation.py",
        "        self._write_gathered(job)\n        self._outbox.put(job.id, job.end(state, error))",
        "        self._outbox.put(job.id, job.end(state, error))",
        (f"{GATHERED}::test_tokens_of_a_batch_job_are_gathered_while_nobody_reads_them",),
    ),
    "prompts of ended jobs stay": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "if keeps then keep_failed(id, now, usual_ttl, ttl, most_failed) else drop_request(job) end",
        "if keeps then keep_failed(id, now, usual_ttl, ttl, most_failed) end",
        (f"{STORED}::test_an_ended_job_keeps_nothing_of_its_prompt",),
    ),
    "requests of failed jobs have no limit": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "while total > tonumber(most_bytes) or",
        "while",
        (f"{STORED}::test_a_failed_job_keeps_its_request_while_there_is_room",),
    ),
    "a tenant's ended jobs are not counted": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "size_of(TAG .. 'journal:' .. id, 4096 + 100 * seq) + INDEXED",
        "0",
        (f"{STORED}::test_stored_bytes_of_a_tenant_count_until_they_expire",),
    ),
    "a tenant may fill the whole memory": Mutation(
        f"{SCRIPTS}/submit_job.lua",
        "if most_stored == 0 then most_stored = free_for_clients * tenant_share / 1000 end",
        "",
        (f"{STORED}::test_a_tenant_that_submits_and_cancels_fills_only_its_own_share",),
    ),
    "clients may use the memory that workers need": Mutation(
        f"{SCRIPTS}/submit_job.lua",
        "if free_for_clients > 0 and used_memory + size > free_for_clients then",
        "if false then",
        (f"{STORED}::test_clients_leave_a_share_of_the_memory_to_workers",),
    ),
    "a full server refuses workers": Mutation(
        "ktqueue/broker/scripts.py",
        "FIRST_WRITE = \"redis.call('DEL', TAG .. 'nothing')\\n\"",
        'FIRST_WRITE = ""',
        (f"{STORED}::test_workers_can_write_to_a_full_server",),
    ),
    "leases of a clock that was ahead stay": Mutation(
        f"{SCRIPTS}/reap.lua",
        "  redis.call('ZADD', TAG .. 'leases', now + lease, worker)\n",
        "",
        (f"{CLOCK}::test_a_clock_that_goes_back_delays_no_jobs_of_dead_workers",),
    ),
    "rates of a clock that was ahead stay": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "local back = math.max(0, (tonumber(updated) or 0) - now)",
        "local back = 0",
        (f"{CLOCK}::test_a_clock_that_was_ahead_leaves_no_rate_limit",),
    ),
    "a step of the clock forgets models": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "for i = 1, #models, 2 do",
        "for i = 1, 0, 2 do",
        (f"{CLOCK}::test_a_step_of_an_hour_forgets_no_model_and_takes_no_live_workers_jobs",),
    ),
    "a running job without a worker is left alone": Mutation(
        f"{SCRIPTS}/scrub.lua",
        "      give_back(id, tail_of(id), now, 'blameless', max_attempts, events, job_ttl, journal_ttl)\n",
        "",
        (f"{SCRUB}::test_running_jobs_without_a_worker_are_queued_again[running:{{}}]",),
    ),
    "a waiting job in no queue is left alone": Mutation(
        f"{SCRIPTS}/scrub.lua",
        "if restore(queue, order + (priority_offset or 0), id) then",
        "if false then",
        (f"{SCRUB}::test_a_deleted_list_is_restored[queue:interactive:tale]",),
    ),
    "a failed job is retried twice": Mutation(
        "ktqueue/broker/jobs.py",
        "job_id=_next_id(job_id), tenant",
        "tenant",
        (f"{RETRY}::test_a_failed_job_is_retried_once",),
    ),
    "answers in the background expire early": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "    ttl, journal_ttl = math.max(ttl, kept), math.max(journal_ttl, kept)\n",
        "",
        (f"{RESPONSES}::test_a_job_can_be_read_for_as_long_as_its_submitter_wants[done]",),
    ),
    "stored responses have no limit": Mutation(
        f"{SCRIPTS}/stored_response.lua",
        "if is_counted and bytes <= most and",
        "if is_counted and",
        (f"{RESPONSES}::test_the_oldest_responses_of_a_tenant_make_room",),
    ),
    "a model is looked up for each request": Mutation(
        "ktqueue/broker/models.py",
        "is_fresh = time.monotonic() < self._known_at + FRESH_CARDS",
        "is_fresh = False",
        (f"{RESPONSES}::test_a_model_is_looked_up_once_for_many_requests",),
    ),
}
