"""Random requests for an engine over a CacheModel: they arrive in bursts, end, fork, are resumed and aborted."""

import random
from typing import Any

from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.outputs import EmittedChoice
from ktqueue.engine.prepared_step import never


def random_sampling(noise: Any, name: Any) -> Any:
    """A random mix of parameters that end, edit, fork or describe a choice."""
    settings = {"temperature": noise.choice([0.0, 0.7, 1.0]), "max_tokens": noise.randint(3, 20), "seed": name}
    for chance, more in (
        (0.2, {"stop": ("5", "AB")}),
        (0.3, {"stop_token_ids": tuple(noise.sample(range(96), 8))}),
        (0.2, {"top_p": 0.8, "top_k": 9}),
        (0.2, {"min_tokens": 3, "logit_bias": {7: 4.0, 96: 6.0}}),
        (0.2, {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}),
        (0.2, {"logprobs": 2}),
        (0.5, {"ignore_eos": True}),
    ):
        if noise.random() < chance:
            settings |= more
    if settings["temperature"]:
        settings["n"] = noise.choice([1, 1, 2, 3])
    return SamplingParams(**settings)


def workload(seed: Any) -> Any:
    """What happens before each step: names to abort and requests to add, in bursts. Some requests are resumed."""
    noise = random.Random(seed)
    stems = [[noise.randrange(96) for _ in range(25)] for _ in range(3)]
    turns, names = [], list(range(20))
    while names:
        adds = []
        while names and noise.random() < 0.25:
            prompt = noise.choice(stems)[: noise.randint(0, 25)] + [noise.randrange(96) for _ in range(3)]
            sampling = random_sampling(noise, names[0])
            emitted: list[EmittedChoice] = []
            if noise.random() < 0.2 and sampling.max_tokens > 4:
                emitted = [EmittedChoice(token_ids=(1, 2, 3)) for _ in range(noise.randint(1, sampling.n))]
            kind = noise.choice([JobClass.BATCH, JobClass.INTERACTIVE, JobClass.INTERACTIVE])
            adds.append((str(names.pop(0)), prompt, sampling, kind, emitted))
        turns.append(([str(noise.randrange(20))] if noise.random() < 0.06 else [], adds))
    return turns


def outputs_of_steps(engine: Any, turns: Any, compile_grammar: Any, launch_next: Any = never) -> Any:
    """Run the workload, in which some requests have a grammar. Returns the outputs of each step."""
    outputs = []
    turns = list(turns)
    while turns or engine.has_work:
        aborts, adds = turns.pop(0) if turns else ((), ())
        for name in aborts:
            engine.abort(name)
        for name, prompt, sampling, kind, emitted in adds:
            constrained = len(prompt) % 3 == 0 and not emitted
            matcher = compile_grammar('start: ("[" /[0-9A-F]{2,4}/ ("yes" | "maybe")? "]")+') if constrained else None
            engine.add(name, prompt, sampling, job_class=kind, emitted=emitted, matcher=matcher)
        outputs.append(engine.step(launch_next))
        engine.check()
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages and stats.running == stats.waiting == 0
    return outputs
