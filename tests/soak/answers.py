"""Samples answers that must match schemas, and validates each: `python -m tests.soak.answers [--answers 1000]`.

Fifty schemas in turn, with random seeds, temperatures and numbers of choices, on one engine. Some answers are cut by
`max_tokens`. From what was written of them, an engine goes on as after the death of a worker, and the whole must be
valid too. Exits with 1 if an answer is not valid JSON of its schema, or failed.
"""

import argparse
import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.results import RESULTS, write
from ktqueue.answers.grammar import byte_compiler
from ktqueue.answers.grammar_errors import GrammarFailed
from ktqueue.core.config import EngineConfig
from ktqueue.core.events import FinishReason
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.engine.outputs import EmittedChoice
from ktqueue.openai.json_schema import lark_of_schema
from ktqueue.workers.generation.request_encoder import RequestEncoder
from ktqueue.workers.startup.build import Built, build
from tests.soak.schemas import SCHEMAS, Schema

ROWS = 32
LONGEST = 900  # tokens of an answer; a text that is still incomplete is cut and continued
CUT = 0.2  # of all answers are cut


def valid(schema: Schema, text: str) -> str:
    """Return what is wrong with a text; empty if it is valid."""
    try:
        document = json.loads(text)
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(document)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return ""


def _beginning(grammar: str, text: str) -> str:
    """Return why a text is not the beginning of one that matches; empty if it is."""
    matcher = byte_compiler().compile(grammar)
    try:
        for byte in text.encode():
            matcher.consume(byte)
    except GrammarFailed as error:
        return error.message
    return ""


class Sampler:
    """Answers requests on one engine, ROWS at a time."""

    def __init__(self, built: Built) -> None:
        self._engine = built.engine
        self._encoder = RequestEncoder(built.tokenizer, built.card.max_model_len)
        self.steps = 0

    def answers(self, requests: dict[str, GenerationRequest], emitted: dict[str, EmittedChoice]) -> dict[str, "Answer"]:
        """Return the answer to each request. It continues after what was emitted."""
        waiting = list(requests)
        found = {name: Answer(emitted.get(name, EmittedChoice())) for name in requests}
        running = 0
        while waiting or self._engine.has_work:
            while waiting and running < ROWS:
                name = waiting.pop()
                request, known = requests[name], emitted.get(name)
                prompt = self._encoder(request)
                self._engine.add(
                    name,
                    prompt.token_ids,
                    request.sampling,
                    emitted=() if known is None else (known,),
                    matcher=prompt.matcher,
                )
                running += 1
            for output in self._engine.step():
                found[output.request_id].add(output)
                running -= output.request_done
            self.steps += 1
        return found

    def close(self) -> None:
        """End the engine and its processes."""
        self._encoder.close()
        self._engine.close()


class Answer:
    """The tokens and text of one answer, and how it ended."""

    def __init__(self, known: EmittedChoice) -> None:
        self.token_ids = list(known.token_ids)
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.error = ""

    def add(self, output: Any) -> None:
        """Add an output of a step."""
        self.token_ids += output.token_ids
        self.text += output.text
        self.finish_reason = output.finish_reason or self.finish_reason
        self.error = output.error.message if output.error is not None else self.error


def request(schema: Schema, draw: random.Random) -> GenerationRequest:
    """A request for an answer of this schema."""
    sampling = SamplingParams(
        seed=draw.getrandbits(40),
        temperature=draw.choice((0.0, 0.7, 1.0, 1.4)),
        top_p=draw.choice((1.0, 0.95)),
        top_k=draw.choice((0, 0, 40)),
        repetition_penalty=draw.choice((1.0, 1.0, 1.15)),
        max_tokens=draw.randint(3, 25) if draw.random() < CUT else LONGEST,
    )
    messages = ({"role": "user", "content": f"Tell me number {draw.randrange(100)} as JSON."},)
    return GenerationRequest(
        model="demo", messages=messages, sampling=sampling, grammar=lark_of_schema(schema, "schema")
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sample, validate, complete."""
    draw = random.Random(arguments.seed)
    built = build(EngineConfig(model=arguments.model, max_num_seqs=ROWS, threads=arguments.threads, max_model_len=2048))
    sampler = Sampler(built)
    schemas = {str(number): SCHEMAS[number % len(SCHEMAS)] for number in range(arguments.answers)}
    requests = {name: request(schema, draw) for name, schema in schemas.items()}
    first = sampler.answers(requests, {})
    cut = {name: answer for name, answer in first.items() if answer.finish_reason is FinishReason.LENGTH}
    (quote,) = built.tokenizer.encode_plain('"')
    longer = {name: _longer(requests[name], quote) for name in cut}
    emitted = {
        name: EmittedChoice(token_ids=tuple(answer.token_ids), text_length=len(answer.text))
        for name, answer in cut.items()
    }
    rest = sampler.answers(longer, emitted)
    sampler.close()
    wrong: list[str] = []
    ends: Counter[str] = Counter()
    for name, schema in schemas.items():
        answer = rest.get(name, first[name])
        # Not the texts of both parts: a cut may halve a character.
        text = b"".join(map(built.tokenizer.token_bytes, answer.token_ids)).decode(errors="ignore")
        if answer.finish_reason is FinishReason.LENGTH:  # such as a tree that never stops branching
            ends["a valid beginning after 1,800 tokens"] += 1
            problem = answer.error or _beginning(requests[name].grammar or "", text)
        else:
            ends["cut, then completed" if name in cut else "stop"] += 1
            problem = answer.error or valid(schema, text)
        if problem:
            wrong.append(f"{name}: {problem}: {json.dumps(schema)[:200]}: {text[:200]!r}")
    return {
        "what": "sampled answers that must match a schema, validated by jsonschema",
        "model": built.card.name,
        "schemas": len(SCHEMAS),
        "answers": len(schemas),
        "ends": dict(ends),
        "tokens": sum(len(answer.token_ids) for answer in (first | rest).values()),
        "steps": sampler.steps,
        "wrong": wrong,
    }


def _longer(original: GenerationRequest, quote: int) -> GenerationRequest:
    """Return the request with room for the rest. A quotation mark is made likely, so that a text of any length ends."""
    sampling = replace(original.sampling, max_tokens=2 * LONGEST, logit_bias={quote: 6.0}, temperature=1.0)
    return replace(original, sampling=sampling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a folder to write answers.json to")
    arguments = parser.parse_args()
    result = measure(arguments)
    for problem in result["wrong"]:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write("".join(f"{name}: {value}\n" for name, value in result.items() if name != "wrong"))
    write((arguments.results or RESULTS) / "answers.json", result)
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
