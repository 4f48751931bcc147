"""Mutations of promises about steps that run while a step of the batch class is computed."""

from mutation import Mutation

TESTS = "tests/gpu/test_overlap.py"

OVERLAP: dict[str, Mutation] = {
    "pages of an overlapped step are given away": Mutation(
        "a sequence keeps its pages while the device computes its tokens",
        "ktqueue/engine/rows.py",
        "(one for one in self.running if one not in self.in_flight)",
        "(one for one in self.running)",
        (f"{TESTS}::test_pages_of_a_running_batch_step_are_given_to_nobody[cpu]",),
    ),
    "experts are fetched over those of an overlapped step": Mutation(
        "steps beside an overlapped one leave its experts in GPU memory alone",
        "ktqueue/operators/gpu/experts/memory.py",
        "self._fetched.allowed.zero_()",
        "pass",
        (
            "tests/operators/gpu/test_decoder.py::"
            "test_a_captured_step_fetches_nothing_while_another_streams_all_experts[cpu]",
        ),
    ),
    "a request is aborted while its step is computed": Mutation(
        "pages of an aborted request are not free before the device has done its step",
        "ktqueue/engine/engine.py",
        "        if self._overlap.computes(request_id):\n",
        "        if False:\n",
        (f"{TESTS}::test_a_request_can_be_aborted_while_its_step_is_computed[cpu]",),
    ),
    "a sequence is in two steps at once": Mutation(
        "sequences of an overlapped step are in no other",
        "ktqueue/engine/scheduler.py",
        "[sequence for sequence in running if sequence not in in_flight]",
        "list(running)",
        (f"{TESTS}::test_both_classes_get_the_tokens_that_they_get_alone[cpu-False]",),
    ),
}
