"""Measures what steps cost before the first job, so that the scheduler knows how many rows are worth having.

The engine runs real steps of random tokens. They are too short to fill a page, so the cache knows nothing of them.
"""

import logging
import random
import time

from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.engine import Engine

WARM_UPS = (2, 4, 16)  # rows for which a GPU has kernels that other probes do not compile
ROWS = (1, 8, 32, 128, 512, 1024, 2048)
PROMPT_TOKENS = 2
OUTPUT_TOKENS = 3
OVERLAPPED_ROWS = 256  # of the batch class, beside which an interactive sequence runs, if steps overlap
FULL_PROMPT_TOKENS = 15  # of a full step's prompts: one fewer than a page has
GROWTH = 2.5  # a probe of four times the rows takes at most about so many times as long, if experts dominate
LEAST_SECONDS, MOST_SECONDS = 0.3, 3.0  # for all probes, of a fast and of a slow model
PROBES_ALLOWED = 30  # of one row, that all probes may last
DRAFTED_ROWS = (1, 4, 16)
MOST_DRAFTS = 8  # of a row

log = logging.getLogger(__name__)


def probe_steps(engine: Engine, vocabulary: int, full_step: int = 0) -> None:
    """Time steps of more and more rows, as far as all take no longer than 30 times the probe of one row.

    `full_step`: tokens of one more step, of prompts, however long it takes. Then also steps of all rows and steps that
    overlap are run, since that compiles kernels of a GPU, for which a request would wait.
    """
    stats = engine.stats()
    most = min(stats.rows_limit, stats.total_pages)
    draw = random.Random(0)
    for rows in (1, *(WARM_UPS if full_step else ())):
        _run(engine, min(rows, most), vocabulary, draw)  # the first step of all takes longer
    engine.costs.clear()
    left = MOST_SECONDS
    for rows in (min(rows, most) for rows in ROWS):
        began = time.monotonic()
        _run(engine, rows, vocabulary, draw)
        seconds = time.monotonic() - began
        if rows == 1:
            left = min(MOST_SECONDS, max(LEAST_SECONDS, PROBES_ALLOWED * seconds))
        left -= seconds
        if rows == most or GROWTH * seconds > left:
            break
    rows = min(most, full_step // FULL_PROMPT_TOKENS)
    for _ in range(2 if rows else 0):  # kernels for such a step may be compiled in the first
        _run(engine, rows, vocabulary, draw, FULL_PROMPT_TOKENS, outputs=1)
    if full_step:
        _run(engine, min(most, ROWS[-1]), vocabulary, draw)
        _run(engine, 1, vocabulary, draw, beside=min(most - 1, OVERLAPPED_ROWS))
    engine.reset_statistics()
    points = ", ".join(f"{tokens:g} in {1e3 * seconds:.1f} ms" for tokens, seconds in engine.costs.points)
    log.info("tokens of a step: %s", points)


def probe_drafts(engine: Engine, vocabulary: int, most: int) -> None:
    """Time steps of 1, 4 and 16 rows: without drafts, and with `most` drafts a row at first and then fewer and fewer.

    Larger steps are left out where the smaller ones take long.
    """
    limit, draw = engine.stats().rows_limit, random.Random(0)
    most = min(most, MOST_DRAFTS)
    left = MOST_SECONDS
    engine.drafts.probed = 1
    _run(engine, 1, vocabulary, draw, FULL_PROMPT_TOKENS - OUTPUT_TOKENS)  # a draft model reads as much as possible
    for rows in sorted({min(rows, limit) for rows in DRAFTED_ROWS}):
        began = time.monotonic()
        for engine.drafts.probed in (0, most):
            _run(engine, rows, vocabulary, draw, outputs=engine.drafts.probed + 2)
        seconds = time.monotonic() - began
        left -= seconds
        if GROWTH * seconds > left:
            break
    engine.drafts.probed = 0
    engine.drafts.costs.begin_again()
    engine.reset_statistics()


def _run(
    engine: Engine,
    rows: int,
    vocabulary: int,
    draw: random.Random,
    tokens: int = PROMPT_TOKENS,
    outputs: int = OUTPUT_TOKENS,
    beside: int = 0,
) -> None:
    """Run `rows` sequences with prompts of random tokens to their end, and `beside` more of the batch class."""
    sampling = SamplingParams(temperature=0.0, seed=0, ignore_eos=True, max_tokens=outputs)
    for row in range(rows + beside):
        job_class = JobClass.INTERACTIVE if row < rows else JobClass.BATCH
        prompt = [draw.randrange(vocabulary) for _ in range(tokens)]
        engine.add(f"probe-{row}", prompt, sampling, job_class=job_class)
    while engine.has_work:
        engine.step()
