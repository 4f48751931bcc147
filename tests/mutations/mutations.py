"""All mutations: each breaks a promise, and tests must fail. So these tests are able to fail."""

from answers import ANSWERS
from batches import BATCHES
from drafts import DRAFTS
from hostile_clients import HOSTILE_CLIENTS
from http_requests import HTTP_REQUESTS
from installing import INSTALLING
from models import MODELS
from mutation import ROOT, SCRIPTS, Mutation
from operation import OPERATION
from other_apis import OTHER_APIS
from overlap import OVERLAP
from prompts import PROMPTS
from rotary import ROTARY
from steps_ahead import STEPS_AHEAD
from stored_files import STORED_FILES
from stored_jobs import STORED_JOBS
from structured_output import STRUCTURED_OUTPUT
from tools import TOOLS
from turns import TURNS_OF_TENANTS
from upgrades import UPGRADES

__all__ = ["MUTATIONS", "ROOT", "Mutation"]

LEASE, ENDS = "tests/broker/test_lease.py", "tests/broker/test_ends.py"
GENERATION = "tests/workers/generation/test_generation_worker.py"
JOURNAL, REAPER = "tests/broker/test_journal.py", "tests/broker/test_reaper.py"
HANDOVER, CLOSED = "tests/broker/test_handover.py", "tests/broker/test_closed_connection.py"
BURIAL = "tests/workers/supervision/test_lease_release.py"
LIMITS, POISON = "tests/broker/test_limits.py", "tests/broker/test_poison.py"


MUTATIONS: dict[str, Mutation] = {
    "an expired lease can write": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "return expiry and tonumber(expiry) > now",
        "return true",
        (
            f"{LEASE}::test_an_expired_lease_can_do_nothing_even_before_it_is_reaped",
            f"{LEASE}::test_the_former_worker_cannot_change_a_job_that_another_runs",
        ),
    ),
    "a valid lease can write to another worker's job": Mutation(
        f"{SCRIPTS}/commit_events.lua",
        "    else\n      stop[id] = true\n    end\n  end\n  local written",
        "    end\n  end\n  local written",
        (f"{LEASE}::test_a_valid_lease_cannot_change_another_workers_job",),
    ),
    "an event is published before the journal has it": Mutation(
        f"{SCRIPTS}/journals.lua",
        "  if not ignore_wrong_type(redis.pcall('XADD',",
        "  redis.call('PUBLISH', key, digits(seq) .. ':' .. event)\n  if not ignore_wrong_type(redis.pcall('XADD',",
        (f"{JOURNAL}::test_an_event_that_the_journal_refuses_is_not_published",),
    ),
    "events have ids without order": Mutation(
        f"{SCRIPTS}/journals.lua",
        "redis.pcall('XADD', key, digits(seq) .. '-0', 'e', event)",
        "redis.pcall('XADD', key, '*', 'e', event)",
        (f"{JOURNAL}::test_follow_replays_the_journal_and_then_yields_new_events",),
    ),
    "journals may have gaps": Mutation(
        f"{SCRIPTS}/commit_events.lua",
        "if tonumber(ARGV[i + 1]) ~= next_seq[id] then",
        "if tonumber(ARGV[i + 1]) < next_seq[id] then",
        (f"{LEASE}::test_a_gap_in_a_journal_loses_the_lease",),
    ),
    "a repeated commit is applied twice": Mutation(
        f"{SCRIPTS}/commit_events.lua",
        "if done ~= step then",
        "if true then",
        (f"{LEASE}::test_a_commit_whose_reply_was_lost_happens_once",),
    ),
    "a worker without jobs does not notice that its last step was lost": Mutation(
        f"{SCRIPTS}/renew_lease.lua",
        " or tonumber(step or -1) < tonumber(ARGV[5])",
        "",
        (f"{LEASE}::test_a_lost_step_loses_the_lease",),
    ),
    "a suspect waits for a commit that does not come": Mutation(
        "workers/generation/outbox.py",
        "self._commits_begun + bool(self._events)",
        "self._commits_begun + 1",
        ("tests/workers/generation/test_outbox.py",),
    ),
    "a repeated claim gets other jobs": Mutation(
        f"{SCRIPTS}/claim_jobs.lua",
        "if field[2] == number then",
        "if false then",
        (f"{LEASE}::test_a_claim_whose_reply_was_lost_gives_the_same_jobs",),
    ),
    "a resumed job starts again at seq 1": Mutation(
        "workers/generation/running_job.py",
        "self._seq = claim.events[-1].seq if claim.events else 0",
        "self._seq = 0",
        (f"{GENERATION}::test_a_resumed_job_gives_the_same_text[killed-sampling0]",),
    ),
    "a resumed job forgets its tokens": Mutation(
        "workers/generation/engine_thread.py",
        "emitted=job.emitted if job.resumed else ()",
        "emitted=()",
        (f"{GENERATION}::test_a_resumed_job_gives_the_same_text[killed-sampling0]",),
    ),
    "sampling noise depends on the clock": Mutation(
        "ktqueue/engine/sampler.py",
        "noise = self._uniform(rows.stream, rows.position)",
        "noise = self._uniform(rows.stream, rows.position + __import__('time').time_ns() % 1_000_003)",
        (
            f"{GENERATION}::test_a_resumed_job_gives_the_same_text[killed-sampling1]",
            "tests/cli/test_demo.py::test_the_story_survives_its_worker_and_nothing_is_left_behind",
        ),
    ),
    "a job can end twice": Mutation(
        f"{SCRIPTS}/commit_events.lua",
        "        redis.call('HDEL', running, id)\n        redis.call('HDEL', cancels, id)\n        ended[id],",
        "        redis.call('HDEL', cancels, id)\n        ended[id],",
        (f"{ENDS}::test_events_after_the_last_one_are_dropped",),
    ),
    "a job can end again after its deadline": Mutation(
        f"{SCRIPTS}/reap.lua",
        "    redis.call('HDEL', TAG .. 'running:' .. field[4], id)\n",
        "",
        (f"{ENDS}::test_a_running_job_expires_and_its_worker_must_stop_it",),
    ),
    "a cancel does not reach the worker": Mutation(
        f"{SCRIPTS}/cancel_job.lua",
        "  redis.call('HSETNX', TAG .. 'cancels:' .. field[4], id, 0)\n",
        "",
        (
            f"{ENDS}::test_a_running_job_is_cancelled_by_its_worker",
            f"{GENERATION}::test_a_running_job_can_be_cancelled",
        ),
    ),
    "a cancel is reported only once": Mutation(
        f"{SCRIPTS}/commit_events.lua",
        "if reported > 0 and reported < step and redis.call('HEXISTS', running, id) == 0 then",
        "if reported > 0 then",
        (f"{LEASE}::test_a_cancel_is_reported_again_if_the_reply_was_lost",),
    ),
    "a cancel is lost when its worker dies": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "  if field[6] then\n    return finish(",
        "  if false then\n    return finish(",
        (f"{ENDS}::test_a_cancelled_job_does_not_run_again_when_its_worker_dies",),
    ),
    "a job may kill any number of workers": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "redis.call('HINCRBY', job, 'futile', 1) >= max_attempts",
        "false",
        (f"{POISON}::test_a_job_that_kills_its_workers_fails_as_poison",),
    ),
    "all jobs of a dead worker are blamed": Mutation(
        f"{SCRIPTS}/reap.lua",
        "    if field[2] or on_trial and id ~= trial or has_grown(id, seq) then how = 'blameless' end\n",
        "",
        (
            f"{POISON}::test_only_the_job_on_trial_is_blamed_for_a_death",
            f"{POISON}::test_deaths_after_new_tokens_fail_a_job_only_if_they_are_many",
        ),
    ),
    "no suspect job runs alone": Mutation(
        "workers/generation/incarnation.py",
        "return job.deaths_without_progress >= max(1, self._config.broker.max_attempts - 1)",
        "return False",
        ("tests/workers/generation/test_trials.py::test_suspect_jobs_begin_one_after_the_other",),
    ),
    "a drain uses an attempt": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "    redis.call('HINCRBY', job, 'attempts', -1)\n",
        "",
        (
            f"{LEASE}::test_released_jobs_keep_their_places_and_attempts",
            f"{GENERATION}::test_jobs_that_a_drain_returns_do_not_lose_an_attempt",
        ),
    ),
    "a dead worker keeps its jobs": Mutation(
        f"{SCRIPTS}/reap.lua",
        "    give_back(id, seq, now, how, max_attempts, events, ARGV[6], ARGV[7])\n",
        "",
        (f"{REAPER}::test_a_dead_workers_jobs_run_again_within_the_lease_and_half_a_second",),
    ),
    "leases get no more time after an outage": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "  if not tonumber(tick or '') or now - tick <= lease / 2 then return end\n",
        "  if true then return end\n",
        (f"{REAPER}::test_after_an_outage_every_valid_lease_gets_one_more_lease_time",),
    ),
    "a worker with a hung engine keeps its lease": Mutation(
        "workers/generation/heartbeat.py",
        "if self._clock.running > self._stall_seconds:",
        "if False:",
        (f"{GENERATION}::test_a_hanging_engine_ends_the_worker",),
    ),
    "a draining worker claims jobs": Mutation(
        "workers/generation/incarnation.py",
        "        while not self._draining.is_set():\n",
        "        while not self._drain_time_is_over:\n",
        (f"{GENERATION}::test_a_draining_worker_finishes_its_running_jobs",),
    ),
    "some pages are never freed": Mutation(
        "ktqueue/engine/pages.py",
        "        if self._users[page] == 0:\n            if self._digest_of[page] is None:\n",
        "        if self._users[page] == 0 and page % 3:\n            if self._digest_of[page] is None:\n",
        (
            f"{GENERATION}::test_a_running_job_can_be_cancelled",
            "tests/engine/test_engine.py::test_an_abort_frees_all_pages_at_once",
        ),
    ),
    "a mailbox has no limit": Mutation(
        "ktqueue/broker/redis/hub.py",
        "if self.held_bytes + len(message) > self._max_bytes:",
        "if False:",
        (
            "tests/broker/redis/test_hub.py::test_an_overflow_drops_all_messages_and_is_reported_once",
            f"{JOURNAL}::test_a_slow_reader_costs_a_bounded_mailbox_and_misses_nothing",
        ),
    ),
    "a reader sees an event twice": Mutation(
        "ktqueue/broker/journal.py",
        "                    if seq <= last:\n                        continue\n",
        "",
        (f"{JOURNAL}::test_a_message_that_arrives_twice_is_yielded_once",),
    ),
    "a reader skips missing events": Mutation(
        "ktqueue/broker/journal.py",
        "if seq > last + 1:",
        "if False:",
        (f"{JOURNAL}::test_a_lost_message_is_repaired_from_the_journal",),
    ),
    "Last-Event-ID is ignored": Mutation(
        "ktqueue/gateway/jobs.py",
        "after = last_seq(request.headers, request.query_params)",
        "after = 0",
        ("tests/gateway/test_jobs.py::test_every_reader_sees_each_event_once_over_reconnects",),
    ),
    "an idempotency key makes two jobs": Mutation(
        f"{SCRIPTS}/submit_job.lua",
        "    known = held_id\n",
        "",
        ("tests/broker/test_jobs.py::test_an_idempotency_key_belongs_to_its_tenant_and_request",),
    ),
    "tenants see each other": Mutation(
        "ktqueue/gateway/http/auth.py",
        "if self.alone and record.tenant != self.name:",
        "if False:",
        ("tests/gateway/test_tenants.py::test_a_job_of_another_tenant_is_not_found",),
    ),
    "a reader does not notice that a journal lost events": Mutation(
        "ktqueue/broker/journal.py",
        "if page.events[:1] != [previous]:",
        "if False:",
        (f"{JOURNAL}::test_a_reader_sees_that_the_journal_has_other_events_now",),
    ),
    "priorities have no effect": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "field[3] + (field[7] or 0), seq, now)",
        "field[3], seq, now)",
        ("tests/broker/test_priority.py::test_a_job_that_returns_to_the_queue_keeps_its_place",),
    ),
    "batch jobs get no share of the rows": Mutation(
        f"{SCRIPTS}/claim_jobs.lua",
        "slots % share == share - 1",
        "false",
        (f"{LEASE}::test_interactive_goes_first_but_batch_has_its_share",),
    ),
    "a claim has no size limit": Mutation(
        f"{SCRIPTS}/claim_jobs.lua",
        " and weight < HEAVY",
        "",
        ("tests/broker/test_claim.py::test_a_claim_ends_with_the_job_that_makes_it_heavy",),
    ),
    "a dead worker's leases are not released": Mutation(
        "workers/supervision/lease_release.py",
        "if worker.process == process_name(pid):",
        "if False:",
        (f"{BURIAL}::test_the_leases_of_a_process_end_with_it",),
    ),
    "the leases of another host's worker are released": Mutation(
        "workers/supervision/lease_release.py",
        "if worker.process == process_name(pid):",
        "if worker.pid == pid:",
        (f"{BURIAL}::test_a_process_with_the_same_id_in_another_container_keeps_its_lease",),
    ),
    "reserved tokens are never returned": Mutation(
        f"{SCRIPTS}/prelude.lua",
        " - time_for(reserved, per_minute) + time_for(used, per_minute)",
        "",
        (
            f"{LIMITS}::test_reserved_tokens_that_were_not_used_are_returned",
            f"{LIMITS}::test_random_histories_equal_a_token_bucket",
        ),
    ),
    "claimed jobs still count as waiting": Mutation(
        f"{SCRIPTS}/claim_jobs.lua",
        "      count_waiting(id, -1, look_up(id).tenant, look_up(id).account)\n",
        "",
        (
            f"{LIMITS}::test_live_and_queued_jobs_have_limits",
            f"{LIMITS}::test_waiting_bytes_of_a_tenant_have_a_limit",
            f"{LIMITS}::test_all_waiting_requests_together_have_a_limit_in_bytes",
        ),
    ),
    "a lost message loses its job": Mutation(
        f"{SCRIPTS}/claim_jobs.lua",
        "if #taken == 0 then\n",
        "taken = {}\nif #taken == 0 then\n",
        (f"{HANDOVER}::test_after_a_lost_message_the_next_claim_returns_the_job",),
    ),
    "a late message answers the next claim": Mutation(
        "ktqueue/broker/lease.py",
        'if not line or number != b"%d" % self._claim_number or self._answered or len(words) < 3:',
        "if not line:",
        (f"{HANDOVER}::test_a_message_that_arrives_after_the_claim_is_ignored",),
    ),
    "a job is handed to a worker that is gone": Mutation(
        f"{SCRIPTS}/submit_job.lua",
        "'\\n' .. ARGV[5]) == 0 then",
        "'\\n' .. ARGV[5]) == -1 then",
        (f"{HANDOVER}::test_a_worker_whose_process_has_exited_gets_nothing",),
    ),
    "a paused worker loses its lease early": Mutation(
        f"{SCRIPTS}/reap.lua",
        "home_of(worker) == '' and",
        "",
        (f"{CLOSED}::test_a_stopped_process_keeps_its_lease_until_it_expires",),
    ),
    "workers count as dead after a restart of the server": Mutation(
        f"{SCRIPTS}/reap.lua",
        " and run_id() == home",
        "",
        (f"{CLOSED}::test_a_restarted_server_draws_no_conclusion_from_missing_connections",),
    ),
    "a lease expires while long journals are read": Mutation(
        "ktqueue/broker/lease.py",
        "        if start:\n",
        "        if False:\n",
        ("tests/broker/test_claim.py::test_long_journals_are_decoded_with_pauses",),
    ),
    "a lease expires during a long prompt": Mutation(
        "ktqueue/loading/tokenizer/library.py",
        "model.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids",
        "model.encode(text, add_special_tokens=add_special_tokens).ids",
        ("tests/loading/tokenizer/test_tokenizer.py::test_other_threads_run_while_a_long_text_is_tokenised",),
    ),
    **UPGRADES,
    **INSTALLING,
    **MODELS,
    **OTHER_APIS,
    **DRAFTS,
    **PROMPTS,
    **ROTARY,
    **OVERLAP,
    **STEPS_AHEAD,
    **HOSTILE_CLIENTS,
    **ANSWERS,
    **BATCHES,
    **HTTP_REQUESTS,
    **OPERATION,
    **STORED_FILES,
    **STORED_JOBS,
    **TURNS_OF_TENANTS,
    **STRUCTURED_OUTPUT,
    **TOOLS,
}
