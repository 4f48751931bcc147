"""Mutations of promises about uploaded files and the store."""

from mutation import Mutation

UPLOADS = "tests/gateway/test_files.py"
LIMITED = f"{UPLOADS}::test_uploads_are_limited_in_size_time_and_number"
WRONG = f"{UPLOADS}::test_wrong_forms_are_refused_by_name_and_leave_nothing"
STORES = "tests/storage/test_stores.py"
RECORDS = "tests/broker/test_files.py"

STORED_FILES: dict[str, Mutation] = {
    "a file that is added again counts again": Mutation(
        "ktqueue/broker/lua/add_file.lua",
        "redis.call('HINCRBY', bytes, tenant, size - (old_size or 0))",
        "redis.call('HINCRBY', bytes, tenant, size)",
        (f"{RECORDS}::test_a_file_counts_once_until_it_is_deleted",),
    ),
    "a tenant has as many files as it likes": Mutation(
        "ktqueue/broker/lua/add_file.lua",
        "not old_size and count >= tonumber(ARGV[7])",
        "false",
        (f"{RECORDS}::test_no_race_exceeds_a_quota",),
    ),
    "an upload has no minimum rate": Mutation(
        "ktqueue/gateway/http/file_uploads.py",
        "min(self._stall_seconds, self.grace_seconds + size / rate - waited)",
        "self._stall_seconds",
        (LIMITED,),
    ),
    "one caller can take all uploads": Mutation(
        "ktqueue/gateway/http/file_uploads.py",
        "if count <= counts[caller] + 1:",
        "if True:",
        (LIMITED,),
    ),
    "a file has no size limit": Mutation(
        "ktqueue/gateway/http/upload_form.py",
        "if self._file_bytes > self._max_file_bytes:",
        "if False:",
        (WRONG,),
    ),
    "a form that was cut is a whole file": Mutation(
        "ktqueue/gateway/http/upload_form.py",
        "if not self._is_complete:",
        "if False:",
        (WRONG,),
    ),
    "a name beyond ASCII is lost": Mutation(
        "ktqueue/gateway/http/upload_form.py",
        "_extended_name(self._disposition) or ",
        "",
        (WRONG,),
    ),
    "foreign web pages can upload files": Mutation(
        "ktqueue/gateway/files.py",
        '        check_origin(request.headers, gateway.config.gateway.cors_origins, "upload files")\n',
        "",
        (WRONG,),
    ),
    "a sweep deletes what is being written": Mutation(
        "ktqueue/storage/folder.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        (f"{STORES}::test_a_sweep_deletes_what_a_dead_writer_left_and_nothing_else",),
    ),
    "objects of another installation are deleted": Mutation(
        "workers/arq/stored_files.py",
        "if records and await _is_ours(broker, store):",
        "if records:",
        ("tests/workers/arq/test_stored_files.py::test_objects_of_another_installation_are_left_alone",),
    ),
    "the input of a batch is deleted while it runs": Mutation(
        "ktqueue/broker/lua/expired_files.lua",
        "if not inputs[tenant][id] then",
        "if true then",
        (f"{RECORDS}::test_the_input_of_a_batch_is_kept_until_the_batch_has_ended",),
    ),
    "the input of a batch can be deleted while it runs": Mutation(
        "ktqueue/broker/lua/delete_file.lua",
        "if reader then",
        "if false then",
        (f"{RECORDS}::test_the_input_of_a_batch_is_kept_until_the_batch_has_ended",),
    ),
    "a list ends at a deleted file": Mutation(
        "ktqueue/broker/lua/list_files.lua",
        " or redis.call('ZSCORE', TAG .. 'files:deleted:' .. ARGV[1], ARGV[4])",
        "",
        (f"{RECORDS}::test_a_list_goes_on_after_a_deleted_file",),
    ),
    "the place of a deleted file is given again": Mutation(
        "ktqueue/broker/lua/add_file.lua",
        "{ list, TAG .. 'files:deleted:' .. tenant }",
        "{ list }",
        (f"{RECORDS}::test_a_list_goes_on_after_a_deleted_file",),
    ),
    "a store that is not mounted has no objects": Mutation(
        "ktqueue/storage/folder.py",
        "if not (self._root / WRITING).is_dir():",
        "if False:",
        (f"{STORES}::test_a_store_that_is_not_mounted_does_not_look_like_one_without_objects",),
    ),
    "the bytes before a range are sent": Mutation(
        "ktqueue/gateway/files.py",
        "gateway.store.read(name, span.start, len(span))",
        "gateway.store.read(name, 0, span.stop)",
        (f"{UPLOADS}::test_a_range_of_a_file_is_sent_alone_and_a_head_has_no_body",),
    ),
    "an upload whose record is on its way is deleted": Mutation(
        "workers/arq/stored_files.py",
        "if await store.age(name) >= seconds:",
        "if True:",
        ("tests/workers/arq/test_stored_files.py::test_old_files_are_deleted_and_others_kept",),
    ),
}
