"""What a step computes becomes tokens of its sequences."""

from collections.abc import Callable

from ktqueue.core.errors import EngineFailure
from ktqueue.core.events import FinishReason
from ktqueue.core.request import JobClass
from ktqueue.engine.batch import Batch
from ktqueue.engine.drafts import Drafts
from ktqueue.engine.logits import Logits
from ktqueue.engine.outputs import SequenceOutput
from ktqueue.engine.prompt_logprobs import prompt_logprobs
from ktqueue.engine.request_table import RequestTable, no_token
from ktqueue.engine.rows import Rows
from ktqueue.engine.sequence import Sequence, SequenceStatus
from ktqueue.engine.step_plan import StepPlan
from ktqueue.engine.step_sampler import Ready
from ktqueue.engine.token_selector import TokenSelection


class StepResults:
    """Records the results of steps, and counts tokens: of prompts, generated, and those of them for the batch class."""

    def __init__(
        self, rows: Rows, requests: RequestTable, drafts: Drafts, special_token_bytes: Callable[[int], bytes]
    ) -> None:
        self.prompt_tokens = self.generation_tokens = self.batch_tokens = 0
        self._rows = rows
        self._requests = requests
        self._drafts = drafts
        self._special_token_bytes = special_token_bytes

    def commit(self, plan: StepPlan, batch: Batch) -> tuple[Ready, list[Sequence]]:
        """Record which tokens the step computes, except drafts. Call it before the tokens of the step are chosen.

        Returns the rows of logits of sequences that get a token, and the sequences that end with their prompt.
        """
        ready: list[tuple[int, Sequence, int]] = []
        complete, row = [], 0
        for sequence, count in plan.rows.items():
            if sequence.status is not SequenceStatus.RUNNING:  # ended after the launch of a decode step
                row += 1
                continue
            uncomputed_prompt = len(sequence.request.prompt) - sequence.num_computed_tokens
            if uncomputed_prompt > 0:
                self.prompt_tokens += min(count, uncomputed_prompt)
            drafts = len(plan.drafts.get(sequence, ())) if plan.drafts else 0
            forks = self._rows.commit(sequence, count - drafts)
            if sequence.length > sequence.num_computed_tokens:
                # It is a part of a prompt, or its grammar forced tokens after the launch.
                row += batch.decodes
                continue
            if not forks and not drafts and sequence.samples:
                ready.append((row, sequence, 0))
                row += 1
                continue
            finished = [sequence, *(fork for fork in forks if fork.remaining == 0)]
            if sequence.samples:
                ready += [(row, sibling, 0) for sibling in finished]
                ready += [(row + number, sequence, number) for number in range(1, 1 + drafts)]
                row += 1 + drafts
            else:
                complete += finished
        if batch.next_rows is not None:
            ready = [(batch.next_rows[row], sequence, ahead) for row, sequence, ahead in ready]
        return ready, complete

    def _score_prompts(self, batch: Batch, logits: Logits) -> list[SequenceOutput]:
        """Compute the log probabilities of prompt tokens that this step gives."""
        outputs = []
        for scored in batch.prompts:
            request = scored.sequence.request
            found = prompt_logprobs(logits, scored, self._special_token_bytes)
            if found is None:
                fault = EngineFailure("the model computed logits that are not finite numbers for the prompt")
                outputs += self._requests.fail_all(request, fault)
            else:
                request.prompt_entries = scored.positions.stop + 1
                outputs.append(
                    SequenceOutput(request_id=request.id, index=scored.sequence.index, prompt_logprobs=found)
                )
        return outputs

    def outputs(
        self,
        plan: StepPlan,
        batch: Batch,
        logits: Logits,
        ready: Ready,
        complete: list[Sequence],
        selection: TokenSelection,
    ) -> list[SequenceOutput]:
        """What each sequence of the step gained. `ready`, `complete`: from `commit`; selection: the chosen tokens.

        logits: [scored, vocab]. Call it once the device has finished.
        """
        outputs = self._score_prompts(batch, logits) if batch.prompts else []
        outputs += self._advance(plan, ready, selection)
        return outputs + [
            self._requests.output(done, (), "", FinishReason.LENGTH) for done in complete if done.is_unfinished
        ]

    def _advance(self, plan: StepPlan, ready: Ready, selection: TokenSelection) -> list[SequenceOutput]:
        """Add the new tokens to their sequences, finish those that end, and make the outputs."""
        outputs, tokens = [], dict.fromkeys(JobClass, 0)
        for row, (_, sequence, ahead) in enumerate(ready):
            if not sequence.is_unfinished or (ahead and not self._drafts.accept(plan, sequence, ahead - 1)):
                continue
            if selection.finite[row]:
                output = self._requests.advance(sequence, selection.token_ids[row], selection.logprobs.get(row))
                added = len(output.token_ids)
                tokens[sequence.request.job_class] += added
                if added > 1:
                    self._rows.jumped()
            else:
                output = self._requests.fail(sequence, no_token(sequence))
            outputs.append(output)
        self.generation_tokens += sum(tokens.values())
        self.batch_tokens += tokens[JobClass.BATCH]
        return outputs
