"""Mutations of the promise that drafts change no answer."""

from mutation import Mutation

TESTS = "tests/engine/test_drafts.py"
MTP = "tests/engine/test_next_token_drafts.py"
MODEL = "tests/engine/test_draft_model.py"
COSTS = "tests/engine/test_draft_costs.py"
STATES = "tests/engine/test_states.py::test_wrong_drafts_change_no_state"
SAME = "drafts change no answer"
ON_DEVICE = f"{TESTS}::test_answers_stay_the_same[device-0-18]"
ANSWERS = f"{TESTS}::test_answers_stay_the_same[host-0-18]"

DRAFTS: dict[str, Mutation] = {
    "a wrong draft is accepted": Mutation(
        "ktqueue/engine/drafts.py",
        "        is_right = drafts[number : number + 1] == [sequence.tokens.item(sequence.num_computed_tokens)]\n",
        "        is_right = bool(drafts)\n",
        (ANSWERS,),
    ),
    "what follows a wrong draft is accepted": Mutation(
        "ktqueue/engine/drafts.py", "            drafts.clear()\n", "            pass\n", (ANSWERS,)
    ),
    "drafts are committed before they are verified": Mutation(
        "ktqueue/engine/step_results.py",
        "self._rows.commit(sequence, count - drafts)",
        "self._rows.commit(sequence, count)",
        (ANSWERS,),
    ),
    "drafts have the noise of the last token": Mutation(
        "ktqueue/engine/token_selector.py", "(ahead[row] if ahead else 0)", "0", (ANSWERS,)
    ),
    "on a device drafts have the noise of the last token": Mutation(
        "ktqueue/engine/gpu/device_selector.py",
        "(sequences, ahead, drawn)",
        "(sequences, (), drawn)",
        (ON_DEVICE,),
    ),
    "a draft that is a row of its own sees the keys after it": Mutation(
        "ktqueue/engine/batch.py", "contexts.append(context - later)", "contexts.append(context)", (ON_DEVICE,)
    ),
    "a step that was prepared without drafts is launched ahead of them": Mutation(
        "ktqueue/engine/prepared_step.py",
        " or (self._drafts is not None and self._drafts.may_be_wanted(plan))",
        "",
        (f"{TESTS}::test_a_device_replays_steps_with_drafts_and_launches_the_others_ahead",),
    ),
    "a draft has the mask of the last token": Mutation(
        "ktqueue/engine/token_masks.py",
        "known[sequence] + ahead for",
        "known[sequence] for",
        (f"{TESTS}::test_answers_with_a_grammar_stay_the_same[host-1.0-24]",),
    ),
    "a forced token is chosen again": Mutation(
        "ktqueue/engine/drafts.py",
        "        return sequence.remaining == 0\n",
        "        return True\n",
        (f"{TESTS}::test_answers_with_a_grammar_stay_the_same[host-1.0-24]",),
    ),
    "a draft model draws with the noise of the last token": Mutation(
        "ktqueue/engine/draft_model.py",
        "ahead=[ahead] * len(live)",
        "ahead=[0] * len(live)",
        (f"{MODEL}::test_a_model_that_is_the_same_is_always_right[host-1.0]",),
    ),
    "wrong drafts stay in the cache of a draft model": Mutation(
        "ktqueue/engine/draft_model.py",
        "                if progress.ahead.pop(0) != sequence.tokens.item(progress.computed):\n",
        "                if progress.ahead.pop(0) < 0:\n",
        (f"{MODEL}::test_wrong_drafts_are_overwritten_in_its_cache[host]",),
    ),
    "a draft model reads pages of another sequence": Mutation(
        "ktqueue/engine/rows.py",
        "        sequence.draft_progress = None\n",
        "",
        (f"{MODEL}::test_answers_stay_the_same[host-1-18]",),
    ),
    "further drafts forget what the layer computed": Mutation(
        "ktqueue/operators/next_token_layer.py",
        "        if len(outputs):\n",
        "        if False:\n",
        (f"{MTP}::test_drafts_are_those_of_the_twin[glm4_moe-host]",),
    ),
    "on a device further drafts forget what the layer computed": Mutation(
        "ktqueue/operators/gpu/next_token_layer.py",
        "        kept.index_copy_(0, step.next_slots(), x if facts.normed_further else residual)\n",
        "",
        (f"{MTP}::test_drafts_are_those_of_the_twin[glm4_moe-cpu]",),
    ),
    "on a device the layer sees only the last token of a step": Mutation(
        "ktqueue/operators/gpu/decoder.py",
        "self._hidden.index_copy_(0, step.slot_mapping, x)",
        "self._hidden.index_copy_(0, step.slot_mapping[-1:], x[-1:])",
        (f"{MTP}::test_drafts_are_those_of_the_twin[glm4_moe-cpu]",),
    ),
    "the norms of token and hidden row are exchanged": Mutation(
        "ktqueue/operators/next_token_layer.py",
        "zip(both, self._norms, strict=True)",
        "zip(both, self._norms[::-1], strict=True)",
        (f"{MTP}::test_drafts_are_those_of_the_twin[glm4_moe-host]",),
    ),
    "Qwen's layer passes on what its last norm gets": Mutation(
        "ktqueue/operators/decoder_facts.py",
        "        normed_further=family.normed_further,\n",
        "",
        (
            f"{MTP}::test_drafts_are_those_of_the_twin[qwen3_next-host]",
            f"{MTP}::test_drafts_are_those_of_the_twin[qwen3_next-cpu]",
        ),
    ),
    "another vocabulary drafts": Mutation(
        "workers/startup/draft_model.py",
        "        if ours != theirs:\n",
        "        if False:\n",
        ("tests/workers/startup/test_draft_model.py::test_another_vocabulary_is_refused",),
    ),
    "drafts are made whatever they cost": Mutation(
        "ktqueue/engine/draft_costs.py",
        "            if expected / whole > best_rate:\n",
        "            if True:\n",
        (f"{TESTS}::test_a_step_has_drafts_only_where_they_pay",),
    ),
    "drafts go on though they lose": Mutation(
        "ktqueue/engine/draft_costs.py",
        "            if whole - usual > self._balance * usual:\n",
        "            if False:\n",
        (f"{TESTS}::test_drafts_stop_where_they_turn_out_to_lose",),
    ),
    "a step has more drafts than the balance pays for": Mutation(
        "ktqueue/engine/draft_costs.py",
        "            if whole - usual > self._balance * usual:\n",
        "            if self._balance < 0:\n",
        ("tests/engine/test_draft_costs.py::test_drafts_lose_no_more_than_a_step_and_a_hundredth",),
    ),
    "the host's time before drafts is forgotten": Mutation(
        "ktqueue/engine/draft_costs.py",
        "        usual, drafted = seconds + between, self._seconds_before_drafts()\n",
        "        usual, drafted = seconds, 0.0\n",
        ("tests/engine/test_draft_costs.py::test_a_step_that_is_launched_ahead_is_faster",),
    ),
    "drafts displace the tokens of other rows": Mutation(
        "ktqueue/engine/drafts.py",
        "chances[: min(room, MOST_OF_A_STEP)]",
        "chances[:MOST_OF_A_STEP]",
        (f"{TESTS}::test_drafts_save_steps_and_stay_within_the_budget[3]",),
    ),
    "angles change beyond a draft": Mutation(
        "ktqueue/engine/engine_parts.py",
        "    return config.drafts and not layout.original_length\n",
        "    return config.drafts\n",
        ("tests/engine/test_drafts_of_models.py::test_models_with_changing_angles_have_no_drafts",),
    ),
    "the state after a wrong draft remains": Mutation(
        "ktqueue/engine/states.py",
        "sequence.draft_states.pop(0)",
        "sequence.draft_states.pop()",
        (f"{STATES}[host-24-8-False]", f"{STATES}[device-24-8-False]"),
    ),
    "a draft reads the state before the last token": Mutation(
        "ktqueue/engine/batch.py",
        "sources += targets[len(sources) - 1 : -1] if more_rows else []",
        "sources += sources[-1:] * more_rows",
        (f"{STATES}[device-24-8-False]",),
    ),
    "slots of wrong drafts stay in use": Mutation(
        "ktqueue/engine/states.py",
        "            self._slots.release(slot)\n        sequence.draft_states = []\n",
        "            pass\n        sequence.draft_states = []\n",
        (f"{STATES}[host-24-8-False]",),
    ),
    "probes tell how often drafts are right": Mutation(
        "ktqueue/engine/drafts.py",
        " and drafts and not self.probed:",
        " and drafts:",
        (f"{MODEL}::test_probes_do_not_tell_how_often_drafts_are_right[host]",),
    ),
    "a step is launched ahead of drafts that the token before must be right for": Mutation(
        "ktqueue/engine/drafts.py",
        "return self._model.chances(sequence, most, ahead)",
        "return self._model.chances(sequence, most + ahead)[ahead:]",
        (f"{MODEL}::test_a_good_model_is_tried_where_only_good_ones_pay[device-ahead]",),
    ),
    "an early launch that drafts prevented is no loss": Mutation(
        "ktqueue/engine/draft_costs.py",
        "            saved = min(0.0, before - between)\n",
        "            pass\n",
        (f"{COSTS}::test_a_step_that_drafts_kept_from_an_early_launch_is_their_loss",),
    ),
    "drafts forget what they saved": Mutation(
        "ktqueue/engine/draft_costs.py",
        "min(MOST_SAVED, self._balance + saved)",
        "min(MOST_ALLOWED, self._balance + saved)",
        (f"{COSTS}::test_what_drafts_saved_may_be_lost_again",),
    ),
    "new tokens of a draft model are read before each pass": Mutation(
        "ktqueue/engine/draft_model.py",
        "min(self.joined, room)",
        "0",
        (f"{MODEL}::test_known_tokens_are_computed_beside_the_last_one[host]",),
    ),
    "a draft model reads before it is paid": Mutation(
        "ktqueue/engine/draft_costs.py",
        "        if steps <= self._kept + max(0.0, self._balance - MOST_ALLOWED):\n",
        "        if True:\n",
        (f"{COSTS}::test_drafts_and_reading_together_lose_no_more[0.0-4]",),
    ),
    "a draft model reads for the end of an answer": Mutation(
        "ktqueue/engine/draft_costs.py",
        "        if own > MOST_READING * rest * usual / tokens:\n",
        "        if False:\n",
        (f"{COSTS}::test_nothing_is_read_for_the_end_of_an_answer",),
    ),
}
