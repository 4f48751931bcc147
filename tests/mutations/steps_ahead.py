"""Mutations of promises about steps that are launched before the tokens of the step before are read."""

from mutation import Mutation

AHEAD, STATES = "tests/engine/test_steps_ahead.py", "tests/engine/test_states.py"
NEXT_STEP, SAMPLER = "ktqueue/engine/prepared_step.py", "ktqueue/engine/step_sampler.py"

STEPS_AHEAD: dict[str, Mutation] = {
    "a step with a wrong token counts": Mutation(
        NEXT_STEP,
        "            if not redrawn:\n",
        "            if True:\n",
        (f"{AHEAD}::test_answers_stay_the_same[0-400]",),
    ),
    "a step that is repeated reads states that it wrote": Mutation(
        NEXT_STEP,
        "may_repeat=not are_final",
        "may_repeat=False",
        (f"{STATES}::test_steps_that_are_launched_ahead_change_no_state[device-26-24]",),
    ),
    "rows get the tokens of others": Mutation(
        NEXT_STEP,
        "for sequence in plan.rows])",
        "for sequence in reversed(plan.rows)])",
        (f"{AHEAD}::test_all_steps_that_only_decode_are_launched_ahead",),
    ),
    "logits are overwritten before all rows are sampled": Mutation(
        SAMPLER,
        "            launch_next = never\n",
        "            pass\n",
        (f"{AHEAD}::test_nothing_is_launched_ahead_while_other_rows_need_their_logits",),
    ),
    "forced tokens shift the rows of others": Mutation(
        "ktqueue/engine/step_results.py",
        "                row += batch.decodes\n",
        "",
        (f"{AHEAD}::test_answers_stay_the_same[3-400]",),
    ),
    "masks of steps ahead are old": Mutation(
        NEXT_STEP,
        "self._masks.begin({one: 1",
        "dict({one: 1",
        (f"{AHEAD}::test_answers_stay_the_same[0-400]",),
    ),
    "a waiting request misses the row that is free next": Mutation(
        "ktqueue/engine/scheduler.py",
        "                if self._rows.num_waiting or self._both_classes():\n                    return False\n",
        "",
        (f"{AHEAD}::test_nothing_is_launched_ahead_while_a_request_waits_for_a_row_that_ends",),
    ),
}
