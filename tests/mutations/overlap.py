"""Mutations of promises about steps that run while a step of the batch class is computed."""

from mutation import Mutation

SIMULATED = "tests/bench/test_simulated_backlog.py"
TESTS = "tests/gpu/test_overlap.py"
STEPS = "tests/operators/gpu/experts/test_overlapped_steps.py"

OVERLAP: dict[str, Mutation] = {
    "pages of an overlapped step are given away": Mutation(
        "ktqueue/engine/rows.py",
        "(one for one in reversed(self.running) if one not in self.in_flight)",
        "(one for one in reversed(self.running))",
        (f"{TESTS}::test_pages_of_a_running_batch_step_are_given_to_nobody[cpu]",),
    ),
    "experts are fetched over those of an overlapped step": Mutation(
        "ktqueue/operators/gpu/experts/memory.py",
        "self._fetched.allowed.zero_()",
        "pass",
        (
            "tests/operators/gpu/test_decoder.py::"
            "test_a_captured_step_fetches_nothing_while_another_streams_all_experts[cpu]",
        ),
    ),
    "a request is aborted while its step is computed": Mutation(
        "ktqueue/engine/engine.py",
        "        if self._overlap.computes(request_id):\n",
        "        if False:\n",
        (f"{TESTS}::test_a_request_can_be_aborted_while_its_step_is_computed[cpu]",),
    ),
    "a sequence is in two steps at once": Mutation(
        "ktqueue/engine/scheduler.py",
        "[sequence for sequence in running if sequence not in in_flight]",
        "list(running)",
        (f"{TESTS}::test_both_classes_get_the_tokens_that_they_get_alone[cpu-False]",),
    ),
    "an overlapped step begins while experts move": Mutation(
        "ktqueue/operators/gpu/experts/memory.py",
        "self._placement.finish_moves()",
        "pass",
        (f"{STEPS}::test_an_overlapped_step_leaves_the_cpu_alone_while_experts_move[cpu]",),
    ),
    "an overlapped step uses the hand-off": Mutation(
        "ktqueue/operators/gpu/experts/memory.py",
        "StepExperts(self._layers, residency, None, decoded=decoded, warpgroups",
        "StepExperts(self._layers, residency, self.handoff, decoded=decoded, warpgroups",
        (f"{STEPS}::test_an_overlapped_step_leaves_the_cpu_alone_where_one_layer_is_on_the_gpu[cpu-1]",),
    ),
    "copies outlive the step that is given up": Mutation(
        "ktqueue/operators/gpu/experts/memory.py",
        "        self._copies.finish()  # a step",
        "        # a step",
        (f"{STEPS}::test_a_step_that_is_given_up_leaves_no_copies_behind[cpu]",),
    ),
    "steps overtake where none is overlapped": Mutation(
        "ktqueue/engine/overlap.py",
        "nullcontext() if self._running is None or self._runner is None else self._runner.beside()",
        "self._runner.beside()",
        (f"{TESTS}::test_only_a_step_that_has_begun_is_overtaken[cpu-ALL]",),
    ),
    "an overlapped step has all rows": Mutation(
        "ktqueue/engine/scheduler.py",
        "most_rows - min(MOST_BESIDE_ROWS, most_rows // BATCH_PART)",
        "most_rows",
        (f"{TESTS}::test_a_request_that_arrives_during_a_step_takes_a_row_that_was_left[PROMPTS]",),
    ),
    "steps beside others are measured as if alone": Mutation(
        "ktqueue/engine/overlap.py",
        "self._is_alone = False",
        "pass",
        (f"{TESTS}::test_a_loss_is_held_against_steps_beside_which_nothing_ran[ALL]",),
    ),
    "the same rows are left out of each overlapped step": Mutation(
        "ktqueue/engine/scheduler.py",
        "left_out=self._left_out",
        "left_out=None",
        (f"{TESTS}::test_rows_that_an_overlapped_step_leaves_out_take_turns",),
    ),
    "prompts ride in long steps": Mutation(
        "ktqueue/engine/overlap.py",
        "not self._is_soon(time.monotonic())",
        "False",
        (f"{SIMULATED}::test_a_first_token_waits_for_no_long_step_even_where_the_prompt_arrives_between_two",),
    ),
    "overlapped steps are never measured again": Mutation(
        "ktqueue/engine/batch_loss.py",
        "self._unknown > PATIENCE",
        "False",
        ("tests/engine/test_batch_loss.py::test_a_step_is_measured_from_time_to_time",),
    ),
    "tokens never ride": Mutation(
        "ktqueue/engine/overlap.py",
        "self._beside = self._loss.borne",
        "self._beside = Beside.ALL",
        (f"{TESTS}::test_a_request_that_arrives_during_a_step_takes_a_row_that_was_left[PROMPTS]",),
    ),
    "experts move beside an overlapped step": Mutation(
        "ktqueue/operators/gpu/experts/memory.py",
        "if self._is_overlapped:  # its tables must stay as they are",
        "if False:",
        (f"{STEPS}::test_interactive_steps_move_no_experts_beside_another[cpu]",),
    ),
    "two steps decode experts to the same memory": Mutation(
        "ktqueue/operators/gpu/experts/memory.py",
        "residency, decoded = self._resident, None",
        "residency = self._resident",
        (f"{STEPS}::test_steps_beside_an_overlapped_one_decode_no_experts[cpu]",),
    ),
    "both steps plan attention in the same memory": Mutation(
        "ktqueue/operators/gpu/attention/triton.py",
        "return type(self)(self._shape)",
        "return self",
        ("tests/operators/gpu/attention/test_triton.py::test_another_planner_has_memory_of_its_own",),
    ),
}
