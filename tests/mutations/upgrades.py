"""Mutations of promises about replacing models and versions."""

from mutation import SCRIPTS, Mutation

DIGEST, FORMATS = "tests/broker/test_digest.py", "tests/broker/test_formats.py"
IDENTITY, BURIAL = "tests/loading/test_identity.py", "tests/workers/supervision/test_lease_release.py"

UPGRADES: dict[str, Mutation] = {
    "a job that has begun goes to any worker": Mutation(
        f"{SCRIPTS}/prelude.lua",
        "(seq > 0 and digest or '-')",
        "'-'",
        (f"{DIGEST}::test_a_job_whose_digest_is_gone_for_good_fails_and_says_why",),
    ),
    "the queue of an older version is trusted": Mutation(
        f"{SCRIPTS}/claim_jobs.lua",
        "job.digest and job.digest ~= digest and tail_of(id) or 0",
        "0",
        (f"{DIGEST}::test_a_job_that_an_older_reaper_queued_is_still_bound",),
    ),
    "a changed model fails jobs at once": Mutation(
        f"{SCRIPTS}/fail_unserved.lua",
        "local able = not served",
        "local able = false",
        (f"{DIGEST}::test_a_job_whose_digest_is_gone_for_good_fails_and_says_why",),
    ),
    "the digest covers half of a file": Mutation(
        "ktqueue/loading/identity.py",
        "starts = range(0, size, self._part_bytes)",
        "starts = range(0, size // 2, self._part_bytes)",
        (f"{IDENTITY}::test_one_bit_of_the_weights_makes_another_model",),
    ),
    "embeddings stay mapped": Mutation(
        "ktqueue/operators/decoder.py",
        "data=stored.data.copy()",
        "data=stored.data",
        (f"{IDENTITY}::test_no_file_is_mapped_once_a_model_is_loaded[gguf-default]",),
    ),
    "a job is blamed for SIGBUS": Mutation(
        f"{SCRIPTS}/reap.lua",
        "if field[2] or on_trial",
        "if on_trial",
        (f"{BURIAL}::test_a_fault_of_the_machine_does_not_count_as_an_attempt",),
    ),
    "newer jobs block older workers": Mutation(
        f"{SCRIPTS}/submit_job.lua",
        "if format ~= '1' then redis.call('HSET', job, 'format', format) end",
        "",
        (f"{FORMATS}::test_an_older_worker_claims_the_jobs_behind_those_of_a_newer_format",),
    ),
    "newer jobs are handed to older workers": Mutation(
        f"{SCRIPTS}/submit_job.lua",
        "tonumber(format) <= tonumber(newest_format or 1)",
        "true",
        (f"{FORMATS}::test_no_newer_job_is_handed_to_an_older_worker_that_waits",),
    ),
    "a job that cannot be read fails": Mutation(
        "ktqueue/broker/lease.py",
        "            except NewerFormat as fault:\n                newer +=",
        "            except ZeroDivisionError as fault:\n                newer +=",
        (f"{FORMATS}::test_a_job_of_an_unexpected_format_is_put_aside_without_an_attempt",),
    ),
    "a newer record hides the job": Mutation(
        "ktqueue/broker/job_record.py",
        "    except (CodecError, InvalidRequest) as error:",
        "    except InvalidRequest as error:",
        ("tests/gateway/test_newer.py::test_a_newer_record_can_be_shown_listed_and_cancelled",),
    ),
    "a damaged batch ends the runs of others": Mutation(
        "ktqueue/core/codec.py",
        "    except (AttributeError, CodecError, KeyError, TypeError, ValueError) as error:",
        "    except CodecError as error:",
        ("tests/workers/arq/test_failing_batches.py::test_a_batch_with_a_damaged_record_holds_up_no_other",),
    ),
    "a damaged batch is taken for ever": Mutation(
        f"{SCRIPTS}/release_batch.lua",
        "failures >= tonumber(ARGV[5])",
        "false",
        ("tests/broker/test_foreign_keys.py::test_a_damaged_batch_is_put_aside_after_some_takes",),
    ),
}
