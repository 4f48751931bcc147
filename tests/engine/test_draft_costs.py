"""DraftCosts: the number of drafts by costs and chances, and the most that drafts can lose."""

import random

import pytest

from ktqueue.engine.draft_costs import ALLOWED_LOSS, FIRST_BALANCE, FIRST_READING, MOST_SAVED, DraftCosts
from ktqueue.engine.step_costs import StepCosts


def learnt(seconds: dict[int, float], between: float = 0.0, before_drafts: float | None = None) -> DraftCosts:
    """Costs of decode steps by tokens, one row in each, and the times before them."""
    made = DraftCosts(StepCosts(64))
    for tokens, taken in seconds.items():
        gap = before_drafts if tokens > 1 else between
        made.learn(tokens, tokens - 1, 0, taken, gap, decodes=True)
    made.begin_again()
    return made


def test_without_costs_nothing_is_drafted() -> None:
    assert DraftCosts(StepCosts(64)).best(1, [1.0], decodes=True) == 0


def test_as_many_drafts_as_give_the_most_tokens_a_second() -> None:
    costs = learnt({1: 1.0, 2: 1.1, 3: 1.2, 4: 2.0})
    assert costs.best(1, [1.0, 1.0, 1.0], decodes=True) == 2
    assert costs.best(1, [0.5, 0.1, 0.1], decodes=True) == 1
    assert costs.best(1, [0.1], decodes=True) == 0


def test_a_step_that_is_launched_ahead_is_faster() -> None:
    """Before drafts the host takes half a step. So a draft that is right in half of the cases gains nothing."""
    costs = learnt({1: 1.0, 2: 1.0}, between=0.0, before_drafts=0.5)
    assert costs.best(1, [0.5], decodes=True) == 0
    assert costs.best(1, [0.7], decodes=True) == 1
    assert learnt({1: 1.0, 2: 1.0}, between=0.5, before_drafts=0.5).best(1, [0.2], decodes=True) == 1


def test_steps_that_read_prompts_have_costs_of_their_own() -> None:
    everything = StepCosts(64)
    costs = DraftCosts(everything)
    costs.learn(1, 0, 0, 1.0, None, decodes=True)
    costs.learn(2, 1, 1, 9.0, None, decodes=False)  # an eager step with a prompt
    for tokens in (1, 2):
        costs.learn(tokens, tokens - 1, 0, 1.0, 0.0, decodes=True)
    costs.begin_again()
    assert costs.best(1, [0.9], decodes=True) == 1 and costs.best(1, [0.9], decodes=False) == 0
    for tokens in (1, 40, 60):
        everything.observe(tokens, 1.0)
    assert costs.best(40, [0.9] * 4, decodes=False) == 4


@pytest.mark.parametrize("each", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("right", [0.0, 0.3])
def test_drafts_lose_no_more_than_a_step_and_a_hundredth(each: float, right: float) -> None:
    """However wrong the chances are, if the costs are right. Right drafts may be lost again."""
    noise = random.Random(0)
    costs = learnt({tokens: 1.0 + each * (tokens - 1) for tokens in range(1, 10)})
    lost, drafted = 0.0, 0
    for step in range(1, 2000):
        count = costs.best(1, [0.9**ahead for ahead in range(1, 9)], decodes=True)
        accepted = 0
        while accepted < count and noise.random() < right:
            accepted += 1
        seconds = 1.0 + each * count
        costs.learn(1 + count, count, accepted, seconds, 0.0, decodes=True)
        lost += seconds - (1 + accepted)
        drafted += count
        assert lost <= FIRST_BALANCE + ALLOWED_LOSS * step + 1e-9
    assert drafted > 0


def test_drafts_that_are_right_soon_become_many() -> None:
    costs = learnt({tokens: 1.0 + 0.6 * (tokens - 1) for tokens in range(1, 10)})
    counts = []
    for _ in range(10):
        counts.append(costs.best(1, [0.99**ahead for ahead in range(1, 9)], decodes=True))
        costs.learn(1 + counts[-1], counts[-1], counts[-1], 1.0 + 0.6 * counts[-1], 0.0, decodes=True)
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] >= 6


def test_a_step_that_drafts_kept_from_an_early_launch_is_their_loss() -> None:
    """Here drafts are wrong and cost nothing. But the host takes long before the steps that follow them."""
    costs = learnt({1: 1.0, 2: 1.0})
    assert costs.best(1, [0.9], decodes=True) == 1
    for _ in range(10):
        costs.learn(2, 1, 0, 1.0, 0.0, decodes=True)
        costs.learn(1, 0, 0, 1.0, 0.3, decodes=True)
    assert costs.best(1, [0.9], decodes=True) == 0
    for _ in range(200):
        costs.learn(1, 0, 0, 1.0, 0.0, decodes=True)
    assert costs.best(1, [0.9], decodes=True) == 1
    assert costs.best(1, [0.04], decodes=True) == 0, "steps that are launched ahead wait for no host"


def test_what_drafts_saved_may_be_lost_again() -> None:
    """So a model whose drafts are mostly right goes on after some bad luck."""
    costs = learnt({1: 1.0, 9: 3.0})
    for _ in range(10):
        costs.learn(9, 8, 8, 3.0, 0.0, decodes=True)
    lost = 0.0
    while (count := costs.best(1, [0.9] * 8, decodes=True)) and lost < 100:
        costs.learn(1 + count, count, 0, 1.0 + count / 4, 0.0, decodes=True)
        lost += count / 4
    assert 8.0 < lost < MOST_SAVED + 1.0


def test_reading_is_paid_before_by_the_allowed_loss() -> None:
    """It is kept for the least reading that was refused, and drafts get it otherwise."""
    costs = learnt({1: 1.0, 2: 1.9})
    assert costs.may_read(1, FIRST_READING, 0.0, 1, decodes=True)
    steps = 0
    while not costs.may_read(1, FIRST_READING + 3.0, 0.0, 1, decodes=True):
        assert not costs.may_read(1, FIRST_READING + 1.0, 0.0, 1, decodes=True) or steps >= 99
        costs.learn(1, 0, 0, 1.0, 0.0, decodes=True)
        steps += 1
    assert 299 <= steps <= 301
    costs.learn(2, 1, 0, 1.9, 0.0, decodes=True, reading=FIRST_READING + 3.0)
    for _ in range(50):
        assert not costs.may_read(1, 1.0, 0.0, 1, decodes=True)
        costs.learn(1, 0, 0, 1.0, 0.0, decodes=True)
    assert costs.best(1, [1.0], decodes=True) == 0, "nothing was left for drafts meanwhile"
    for _ in range(90):
        costs.learn(1, 0, 0, 1.0, 0.0, decodes=True)
    assert costs.best(1, [1.0], decodes=True) == 1


def test_nothing_is_read_for_the_end_of_an_answer() -> None:
    """A quarter of the rest's time is the most. Four rows share a step of two seconds here."""
    costs = learnt({1: 1.0, 4: 2.0})
    assert costs.may_read(4, 1.0, 1.0, 8, decodes=True) and not costs.may_read(4, 1.0, 1.0, 7, decodes=True)


def test_reading_that_took_longer_is_paid_later() -> None:
    costs = learnt({1: 1.0, 2: 1.0})
    costs.learn(2, 1, 0, 1.0, 0.0, decodes=True, reading=FIRST_READING + 100.0)
    for _ in range(10_000):
        assert not costs.may_read(1, 0.1, 0.0, 1, decodes=True)
        costs.learn(1, 0, 0, 1.0, 0.0, decodes=True)
    for _ in range(20):
        costs.learn(1, 0, 0, 1.0, 0.0, decodes=True)
        found = costs.may_read(1, 0.1, 0.0, 1, decodes=True)
    assert found


def test_savings_pay_for_reading_that_took_longer() -> None:
    """So drafts that save begin for other sequences too, however dear the first was."""
    costs = learnt({1: 1.0, 9: 1.0})
    costs.learn(2, 1, 0, 1.0, 0.0, decodes=True, reading=FIRST_READING + 100.0)
    for saved in range(0, 160, 8):
        assert not costs.may_read(1, 1.0, 0.0, 1, decodes=True) or saved > 100
        costs.learn(9, 8, 8, 1.0, 0.0, decodes=True)
    assert costs.may_read(1, 1.0, 0.0, 1, decodes=True)


def test_reading_is_paid_by_what_drafts_saved() -> None:
    costs = learnt({1: 1.0, 9: 1.0})
    costs.learn(9, 8, 8, 1.0, 0.0, decodes=True)
    assert costs.may_read(1, FIRST_READING + 4.0, 0.0, 1, decodes=True)
    assert not costs.may_read(1, 99.0, 0.0, 1, decodes=True)
    costs.learn(9, 8, 8, 1.0, 0.0, decodes=True, reading=4.0)
    costs.learn(9, 8, 0, 1.0, 0.0, decodes=True, reading=10.0)
    assert not costs.may_read(1, FIRST_READING, 0.0, 1, decodes=True)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("right", [0.0, 0.8])
def test_drafts_and_reading_together_lose_no_more(rows: int, right: float) -> None:
    """Sequence after sequence of 120 tokens, which a draft model reads for 3 seconds, as far as it may."""
    noise = random.Random(0)
    costs = learnt({tokens: 1.0 + 0.4 * (tokens - 1) for tokens in range(1, 40)})
    lost, drafted, is_read = 0.0, 0, False
    for step in range(1, 6000):
        reads = not is_read and costs.may_read(rows, 3.0, 0.0, 1, decodes=True)
        count = costs.best(rows, [0.9] * rows, decodes=True) if is_read or reads else 0
        is_read = (is_read or count > 0) and step % 120 > 0
        accepted = sum(noise.random() < right for _ in range(count))
        usual = 1.0 + 0.4 * (rows - 1)
        seconds, reading = usual + 0.4 * count, 3.0 if reads and count else 0.0
        costs.learn(rows + count, count, accepted, seconds, 0.0, decodes=True, reading=reading)
        lost += (seconds + reading) / usual - (rows + accepted) / rows
        drafted += count
        assert lost <= FIRST_BALANCE + FIRST_READING + ALLOWED_LOSS * step + 1e-9
    assert drafted > 0


def test_one_of_many_steps_has_no_drafts() -> None:
    """So the costs of steps without drafts stay new."""
    costs = learnt({1: 1.0, 2: 1.0})
    drafted = []
    for _ in range(100):
        drafted.append(costs.best(1, [1.0], decodes=True))
        costs.learn(1 + drafted[-1], drafted[-1], drafted[-1], 1.0, 0.0, decodes=True)
    assert drafted.count(0) == 3
