"""Mutations of promises about batches over HTTP."""

from mutation import SCRIPTS, Mutation

BROKER, OWNER, PARTS = (
    "tests/broker/test_batches.py", "tests/workers/arq/test_batch_owner.py", "tests/batches/test_stored.py"
)  # fmt: skip
EXECUTION = "tests/workers/arq/test_batch_execution.py"
STORED = "ktqueue/batches/stored"
DEATHS = f"{OWNER}::test_every_death_of_an_owner_gives_the_same_files"
FAILING = "tests/workers/arq/test_failing_batches.py"
OBJECTS = "tests/gateway/test_batch_objects.py"

BATCHES: dict[str, Mutation] = {
    "an owner with an old fence writes": Mutation(
        f"{SCRIPTS}/update_batch.lua",
        "if fence ~= ARGV[2] then",
        "if not fence then",
        (f"{BROKER}::test_a_batch_has_one_owner_at_a_time",),
    ),
    "a batch with an owner is taken": Mutation(
        f"{SCRIPTS}/take_batch.lua",
        "live, '-inf', digits(now), 'LIMIT', 0, MAX_FREE",
        "live, '-inf', '+inf', 'LIMIT', 0, MAX_FREE",
        (f"{BROKER}::test_a_batch_has_one_owner_at_a_time",),
    ),
    "a cancelled batch goes on": Mutation(
        f"{SCRIPTS}/update_batch.lua",
        "if from == '' or status == from then",
        "if true then",
        (f"{BROKER}::test_facts_and_status_change_together_or_not_at_all",),
    ),
    "another tenant's batch is found": Mutation(
        f"{SCRIPTS}/get_batch.lua",
        "if redis.call('HGET', batch, 'tenant') ~= ARGV[2] then return false end",
        "if redis.call('EXISTS', batch) == 0 then return false end",
        (f"{BROKER}::test_tenants_see_their_own_batches_page_by_page",),
    ),
    "records are committed but not stored": Mutation(
        f"{STORED}/execution.py",
        "self._patience.call(partial(self._segments.write, name, records))",
        "self._patience.call(partial(self._segments.write, name, []))",
        (DEATHS,),
    ),
    "two owners have one fence": Mutation(
        f"{SCRIPTS}/take_batch.lua",
        "math.max(now, count_of(redis.call('HGET', batch, 'fence')) + 1)",
        "redis.call('HGET', batch, 'fence') + 1",
        (f"{BROKER}::test_no_two_owners_have_the_same_fence_even_if_redis_forgets_one",),
    ),
    "many batches of one tenant keep all others out": Mutation(
        "workers/arq/batch_owner.py",
        "if count < 2 * MAX_BATCHES:",
        "if count < MAX_BATCHES:",
        (
            "tests/workers/arq/test_batches_side_by_side.py"
            "::test_a_tenant_without_a_running_batch_is_not_kept_out_by_many_of_another",
        ),
    ),
    "a batch whose store was emptied is completed": Mutation(
        f"{STORED}/batch.py",
        "            raise _InputLost(findings.faults[0])",
        "            pass",
        (f"{OWNER}::test_a_batch_whose_store_was_emptied_says_so",),
    ),
    "lines that cannot run keep all others waiting": Mutation(
        f"{STORED}/window.py",
        "self.lines < self._size or group.lines < max(1, share * self._size)",
        "self.lines < self._size",
        (f"{PARTS}::test_a_group_gets_its_share_of_a_window_that_others_have_filled",),
    ),
    "a segment is written again with more records": Mutation(
        f"{STORED}/execution.py",
        "self._begun = self._begun or len(self._pending)",
        "self._begun = len(self._pending)",
        (f"{EXECUTION}::test_a_segment_has_the_same_records_whenever_it_is_written",),
    ),
    "what a batch needs is deleted before Redis remembers its end": Mutation(
        f"{STORED}/batch.py",
        "            await asyncio.sleep(SETTLE_SECONDS)\n",
        "            break\n",
        (f"{OWNER}::test_an_end_that_redis_forgets_comes_again_without_running_a_line_twice",),
    ),
    "records are in the order in which lines ended": Mutation(
        f"{STORED}/segments.py",
        "{place: data[start : start + self._length[place]]",
        "{places[places.index(place) - 1]: data[start : start + self._length[place]]",
        (f"{PARTS}::test_records_are_put_into_the_order_of_the_input",),
    ),
    "lines of a late batch are left out": Mutation(
        f"{STORED}/merge.py",
        "                elif unfinished and errors is not None:",
        "                elif False:",
        (f"{OWNER}::test_a_late_batch_expires",),
    ),
    "segments are read one by one": Mutation(
        f"{STORED}/segments.py",
        "map_concurrently(self._header, names, READS_AT_ONCE)",
        "map_concurrently(self._header, names, 1)",
        (f"{PARTS}::test_many_segments_are_read_at_once_and_count_in_their_order",),
    ),
    "a batch that always fails is tried for ever": Mutation(
        f"{STORED}/batch.py",
        "                if self._record.failures_without_progress < self._max_failures:\n",
        "                if True:\n",
        (f"{FAILING}::test_a_batch_that_fails_again_and_again_without_progress_ends",),
    ),
    "failures with progress between them end a batch": Mutation(
        f"{SCRIPTS}/update_batch.lua",
        "'failures', ARGV[7], 'deaths', 0, ",
        "",
        (f"{FAILING}::test_progress_ends_a_row_of_failures",),
    ),
    "a batch that kills its owners is tried for ever": Mutation(
        f"{SCRIPTS}/take_batch.lua",
        "failures + ((tried or deaths >= MOST) and 1 or 0), deaths + 1",
        "failures, deaths",
        (f"{FAILING}::test_a_batch_that_kills_its_owners_ends",),
    ),
    "batches beside the one that kills its owners fail": Mutation(
        f"{SCRIPTS}/take_batch.lua",
        "  if tried and tried ~= id then return failures, deaths end\n",
        "",
        (f"{BROKER}::test_a_death_counts_for_the_batch_on_trial_alone",),
    ),
    "a key is unknown once the input is deleted": Mutation(
        "ktqueue/gateway/batches.py",
        "        if key is not None:",
        "        if False:",
        (f"{OBJECTS}::test_a_key_answers_its_batch_after_the_input_was_deleted",),
    ),
    "one address can hold all batches": Mutation(
        f"{SCRIPTS}/create_batch.lua",
        "if count >= most and caller == '' then",
        "if count >= most then",
        (
            f"{BROKER}::test_callers_without_keys_have_even_shares",
            f"{OBJECTS}::test_an_address_has_its_share_of_batches",
        ),
    ),
    "batches of one address run before those of all others": Mutation(
        f"{SCRIPTS}/take_batch.lua",
        "return tenant and tenant .. ' ' .. (caller or '')",
        "return tenant",
        (f"{BROKER}::test_callers_without_keys_have_even_shares",),
    ),
    "a tenant's limit fails lines": Mutation(
        "ktqueue/batches/line_runner.py",
        "                except (QueueFull, TenantLimitReached):\n",
        "                except QueueFull:\n",
        (f"{OWNER}::test_limits_of_the_tenant_slow_its_lines_down",),
    ),
}
