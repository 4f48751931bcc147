"""Mutations of the turns that tenants and their callers take, in the queue and in the rows of a worker."""

from mutation import SCRIPTS, Mutation

TURNS, CLASSES = "tests/broker/test_turns.py", "tests/workers/generation/test_classes.py"

TURNS_OF_TENANTS: dict[str, Mutation] = {
    "a turn costs nothing": Mutation(
        f"{SCRIPTS}/turns.lua",
        "write_account(list, name, time + tokens, floor, mean)",
        "write_account(list, name, time, floor, mean)",
        (f"{TURNS}::test_tenants_with_backlogs_get_tokens_by_weight_whatever_happens[0]",),
    ),
    "a pause earns turns": Mutation(
        f"{SCRIPTS}/turns.lua",
        "if not time or time < start then",
        "if not time then",
        (f"{TURNS}::test_what_an_answer_really_used_decides_and_a_pause_earns_nothing",),
    ),
    "estimates are never corrected": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "if charged and used then",
        "if false then",
        (f"{TURNS}::test_what_an_answer_really_used_decides_and_a_pause_earns_nothing",),
    ),
    "addresses take turns with tenants": Mutation(
        f"{SCRIPTS}/claim_jobs.lua",
        "entry.tenant.planned = entry.tenant.planned + entry.tokens / entry.tenant.weight",
        "entry.tenant.planned = entry.tenant.planned",
        (f"{TURNS}::test_many_addresses_have_no_more_than_their_tenants_share",),
    ),
    "jobs of older gateways wait for all others": Mutation(
        f"{SCRIPTS}/claim_jobs.lua",
        "for _, key in ipairs(common) do enter_first(class, key) end",
        "",
        (f"{TURNS}::test_a_job_of_an_older_gateway_goes_by_arrival_at_the_latest",),
    ),
    "a job is charged for each attempt": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "  if charged then return join_front(id, class, format or 1, model, place) end\n",
        "",
        (f"{TURNS}::test_a_job_that_loses_its_worker_goes_first_and_is_charged_once",),
    ),
    "cached prefixes take all turns": Mutation(
        f"{SCRIPTS}/claim_jobs.lua",
        " and jump(entry, first) <= WORTH_TOKENS",
        "",
        (f"{TURNS}::test_a_cached_prefix_goes_before_the_turn_of_others_for_some_tokens_only",),
    ),
    "accounts are never forgotten": Mutation(
        f"{SCRIPTS}/turns.lua",
        "if is_new and redis.call('HLEN', list.accounts) > MAX_ACCOUNTS then",
        "if false then",
        (f"{TURNS}::test_the_accounts_of_callers_are_bounded",),
    ),
    "a full worker gives no row away": Mutation(
        "ktqueue/engine/rows.py",
        "return OVER_SHARE if sequence in self._over_share else 0",
        "return 0",
        (f"{CLASSES}::test_a_newcomer_gets_a_row_of_a_tenant_that_has_them_all",),
    ),
    "requests over share are admitted by arrival": Mutation(
        "ktqueue/engine/rows.py",
        "        if self._over_share and JobClass.INTERACTIVE in classes:",
        "        if False:",
        ("tests/engine/test_row_shares.py::test_an_owner_with_few_requests_waits_for_none_of_one_with_many[pages]",),
    ),
    "one tenant fills the queue": Mutation(
        f"{SCRIPTS}/submit_job.lua",
        "    room = room + math.floor(room / NEWCOMERS)\n",
        "    room = room\n",
        (f"{TURNS}::test_a_full_queue_takes_one_job_of_tenants_and_callers_without_waiting_jobs",),
    ),
    "a full worker gives rows to anybody": Mutation(
        f"{SCRIPTS}/claim_jobs.lua",
        "or not is_owed(look_up(id)) then",
        "then",
        (f"{TURNS}::test_a_full_worker_takes_a_job_of_an_owner_with_fewer_rows",),
    ),
}
