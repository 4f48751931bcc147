"""Mutations of the promise that drafts change no answer."""

from mutation import Mutation

TESTS = "tests/engine/test_drafts.py"
SAME = "drafts change no answer"
ANSWERS = f"{TESTS}::test_answers_stay_the_same[0-18-free]"

DRAFTS: dict[str, Mutation] = {
    "a wrong draft is accepted": Mutation(
        SAME,
        "ktqueue/engine/drafts.py",
        "        if drafts[number : number + 1] != [sequence.tokens.item(sequence.length - 1)]:\n",
        "        if not drafts:\n",
        (ANSWERS,),
    ),
    "what follows a wrong draft is accepted": Mutation(
        SAME, "ktqueue/engine/drafts.py", "            drafts.clear()\n", "            pass\n", (ANSWERS,)
    ),
    "drafts are committed before they are verified": Mutation(
        SAME,
        "ktqueue/engine/engine.py",
        "self._rows.commit(sequence, count - drafts)",
        "self._rows.commit(sequence, count)",
        (ANSWERS,),
    ),
    "drafts have the noise of the last token": Mutation(
        SAME, "ktqueue/engine/token_selector.py", "(ahead[row] if ahead else 0)", "0", (ANSWERS,)
    ),
    "drafts are made whatever they cost": Mutation(
        "drafts are made where they raise the tokens of a second",
        "ktqueue/engine/drafts.py",
        "            if expected / seconds > best_rate:\n",
        "            if True:\n",
        (f"{TESTS}::test_a_step_has_drafts_only_where_they_pay",),
    ),
    "drafts go on though they lose": Mutation(
        "drafts lose no more than a hundredth of the time",
        "ktqueue/engine/drafts.py",
        " or self._balance < 0:",
        ":",
        (f"{TESTS}::test_drafts_stop_where_they_turn_out_to_lose",),
    ),
    "drafts displace the tokens of other rows": Mutation(
        "drafts stay within the tokens of a step",
        "ktqueue/engine/drafts.py",
        "chances[: min(room, MOST_OF_A_STEP)]",
        "chances[:MOST_OF_A_STEP]",
        (f"{TESTS}::test_drafts_save_steps_and_stay_within_the_budget[3]",),
    ),
    "states are computed with drafts": Mutation(
        SAME,
        "ktqueue/engine/engine_parts.py",
        "is_alike and not layout.linear and not",
        "is_alike and not",
        (f"{TESTS}::test_models_with_states_or_changing_angles_have_no_drafts",),
    ),
}
