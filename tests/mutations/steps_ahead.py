"""Mutations of promises about steps that are launched before the tokens of the step before are read."""

from mutation import Mutation

AHEAD, STATES = "tests/engine/test_steps_ahead.py", "tests/engine/test_states.py"
NEXT_STEP, SAMPLER = "ktqueue/engine/prepared_step.py", "ktqueue/engine/step_sampler.py"

STEPS_AHEAD: dict[str, Mutation] = {
    "a step with a wrong token counts": Mutation(
        "a token that is drawn again is the one that the next step computes",
        NEXT_STEP,
        "            if not redrawn:\n",
        "            if True:\n",
        (f"{AHEAD}::test_answers_stay_the_same[0-400]",),
    ),
    "a step that is repeated reads states that it wrote": Mutation(
        "a step that is computed twice finds the states of before",
        NEXT_STEP,
        "may_repeat=not are_final",
        "may_repeat=False",
        (f"{STATES}::test_steps_that_are_launched_ahead_change_no_state[device-26-200]",),
    ),
    "rows get the tokens of others": Mutation(
        "each row computes the token that was chosen for its sequence",
        NEXT_STEP,
        "for sequence in plan.rows])",
        "for sequence in reversed(plan.rows)])",
        (f"{AHEAD}::test_all_steps_that_only_decode_are_launched_ahead",),
    ),
    "logits are overwritten before all rows are sampled": Mutation(
        "a step is launched once nobody needs the logits of the step before",
        SAMPLER,
        "            launch_next = never\n",
        "            pass\n",
        (f"{AHEAD}::test_nothing_is_launched_ahead_while_other_rows_need_their_logits",),
    ),
    "forced tokens shift the rows of others": Mutation(
        "a row whose grammar forced tokens after the launch keeps its row of logits",
        "ktqueue/engine/step_results.py",
        "                row += batch.decodes\n",
        "",
        (f"{AHEAD}::test_answers_stay_the_same[3-400]",),
    ),
    "masks of steps ahead are old": Mutation(
        "a grammar's mask follows from all tokens before",
        NEXT_STEP,
        "self._masks.begin({one: 1",
        "dict({one: 1",
        (f"{AHEAD}::test_answers_stay_the_same[0-400]",),
    ),
    "a waiting request misses the row that is free next": Mutation(
        "a request that waits for a row gets it in the step after its end",
        "ktqueue/engine/scheduler.py",
        "                if self._rows.num_waiting or self._both_classes():\n                    return False\n",
        "",
        (f"{AHEAD}::test_nothing_is_launched_ahead_while_a_request_waits_for_a_row_that_ends",),
    ),
}
