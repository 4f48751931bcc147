"""Mutations of promises about the command line, the state folder, logs and the bridge."""

from mutation import Mutation

BATCHES, BENCH_SERVE = "tests/cli/test_batches_over_http.py", "tests/cli/test_bench_serve.py"
STATE_FOLDER, LOG_FILES = "tests/broker/redis/test_state_folder.py", "tests/workers/supervision/test_log_files.py"

OPERATION: dict[str, Mutation] = {
    "other users can read the state folder": Mutation(
        "ktqueue/broker/redis/state_folder.py",
        "PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600\nPRIVATE_UMASK = 0o077",
        "PRIVATE_FOLDER, PRIVATE_FILE = 0o755, 0o644\nPRIVATE_UMASK = 0o022",
        (
            f"{STATE_FOLDER}::test_a_new_folder_is_private_whatever_the_umask",
            "tests/cli/test_up_down.py::test_a_detached_installation_works_from_start_to_end",
        ),
    ),
    "an old state folder stays readable": Mutation(
        "ktqueue/broker/redis/state_folder.py",
        "        path.chmod(",
        "        str(",
        (f"{STATE_FOLDER}::test_files_that_an_older_version_left_open_become_private",),
    ),
    "two installations use one folder": Mutation(
        "ktqueue/broker/redis/state_folder.py",
        "fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        (f"{STATE_FOLDER}::test_two_processes_do_not_share_a_folder",),
    ),
    "logs have no size limit": Mutation(
        "workers/supervision/log_files.py",
        "        source.truncate(0)\n",
        "",
        (f"{LOG_FILES}::test_a_log_stays_below_its_size_while_a_process_writes",),
    ),
    "the access log has queries": Mutation(
        "ktqueue/gateway/http/access_log.py",
        'path = scope["path"]',
        'path = (scope["path"] + "?" + scope["query_string"].decode())',
        ("tests/gateway/test_access_log.py::test_each_request_is_one_line",),
    ),
    "the bridge joins another program's queue": Mutation(
        "workers/arq/worker.py",
        "        if await self.pool.exists(key):\n",
        "        if False:\n",
        ("tests/workers/arq/test_bridge.py::test_a_queue_that_another_arq_worker_serves_is_refused",),
    ),
    "a worker of arq leaves before its results are written": Mutation(
        "workers/arq/worker.py",
        "                await asyncio.gather(*self._ends, return_exceptions=True)\n",
        "",
        ("tests/workers/arq/test_batch_files.py::test_a_worker_that_leaves_waits_until_results_are_written",),
    ),
    "the bridge uses arq's own queue by default": Mutation(
        "ktqueue/core/settings/processes.py",
        '"ktqueue:arq",',
        '"arq:queue",',
        ("tests/workers/arq/test_bridge.py::test_by_default_the_bridge_does_not_touch_jobs_of_other_programs",),
    ),
    "bridges exclude each other": Mutation(
        "workers/arq/worker.py",
        'HEALTH_SUFFIX = ":ktqueue-health-check"',
        "HEALTH_SUFFIX = health_check_key_suffix",
        ("tests/workers/arq/test_bridge.py::test_two_bridges_share_a_queue",),
    ),
    "a batch continues with another input": Mutation(
        "ktqueue/batches/spool.py",
        "        if not filecmp.cmp(draft, path, shallow=False):",
        "        if False:",
        ("tests/batches/test_files.py::test_a_batch_from_standard_input_is_resumed_only_with_the_same_input",),
    ),
    "a skipped line is not in the error file": Mutation(
        "ktqueue/batches/run.py",
        "                        self._output.fail(failure_record(name, line.custom_id, line.info()))\n",
        "",
        ("tests/cli/test_batch_run.py::test_plain_lines_from_standard_input_with_some_that_are_invalid",),
    ),
    "typed keys appear in an answer": Mutation(
        "ktqueue/cli/chat/input.py",
        "termios.ECHO | termios.ECHONL | termios.ICANON",
        "termios.ECHONL",
        ("tests/cli/test_chat.py::test_typing_during_an_answer_waits_for_the_next_prompt",),
    ),
    "triple quotes end at the first line": Mutation(
        "ktqueue/cli/chat/input.py",
        "    if not first.lstrip().startswith(QUOTES):",
        "    if True:",
        ("tests/cli/test_chat.py::test_a_conversation_through_a_pipe_has_commands_and_quotes",),
    ),
    "half of a batch's output is kept": Mutation(
        "ktqueue/cli/batch/over_http.py",
        "        draft.unlink(missing_ok=True)",
        "        draft.replace(path)",
        (f"{BATCHES}::test_half_of_a_file_is_not_kept",),
    ),
    "a busy server ends a follow": Mutation(
        "ktqueue/cli/batch/over_http.py",
        "            except KtqueueError as error:\n                if not",
        "            except KtqueueError as error:\n                raise\n                if not",
        (f"{BATCHES}::test_a_server_that_fails_for_a_while_does_not_end_a_follow",),
    ),
    "half an answer counts as measured": Mutation(
        "ktqueue/bench/serving/answer.py",
        "if not self._done and self.finish_reason is None:",
        "if False:",
        (f"{BENCH_SERVE}::test_answers_are_timed_and_failures_are_counted_by_kind",),
    ),
    "a line end in two pieces counts twice": Mutation(
        "ktqueue/bench/serving/event_stream.py",
        'if self._after_cr and piece[:1] == b"\\n":',
        "if False:",
        ("tests/bench/test_serving_load.py::test_an_event_stream_is_read_alike_in_any_pieces",),
    ),
}
