"""Mutations of how answers are read, of the names of models, and of the web page."""

from mutation import Mutation

PARSER, MODELS, PAGE = "tests/answers/test_parser.py", "tests/gateway/test_models.py", "tests/gateway/test_page.py"
RESPONSES = "tests/gateway/test_responses.py"
SHAPES = "tests/answers/test_recorded_shapes.py"
CUTS = f"{PARSER}::test_parts_do_not_depend_on_how_the_text_is_cut"

ANSWERS: dict[str, Mutation] = {
    "a marker is missed when a piece of text ends inside it": Mutation(
        "ktqueue/answers/parser.py",
        "keep = 0 if final else max([overlap(self._buffer, marker) for marker in possible], default=0)",
        "keep = 0",
        (f"{CUTS}[Kimi-K2]",),
    ),
    "text that is not a tool call is lost": Mutation(
        "ktqueue/answers/parser.py",
        "self._parts.append(AnswerReasoning(whole) if self._in_reasoning else AnswerText(whole))",
        "pass",
        (f"{CUTS}[text that looks like a call]",),
    ),
    "a marker before prose holds the whole answer back": Mutation(
        "ktqueue/answers/parser.py",
        "if not final and len(text) <= MAX_HEADER + max(map(len, ends)):",
        "if not final:",
        ("tests/answers/test_broken_answers.py::test_a_marker_before_prose_does_not_hold_the_answer_back[mistral]",),
    ),
    "white space behind what is no call is lost": Mutation(
        "ktqueue/answers/parser.py",
        "        self._said = self._said or not self._in_reasoning\n        self._at_edge = False",
        "        self._said = self._said or not self._in_reasoning",
        (f"{CUTS}[text behind what is no call]",),
    ),
    "brackets in a call's strings count": Mutation(
        "ktqueue/answers/call_readers.py",
        'elif character in "{[":\n            self._depth += 1',
        'if character in "{[":\n            self._depth += 1',
        (f"{CUTS}[Hermes, two calls, a marker inside a string]",),
    ),
    "a call inside reasoning is reasoning": Mutation(
        "ktqueue/answers/parser.py",
        "calls = (*self._tools.starts, *self._tools.sections) if not self._tools.heads else ()",
        "calls = ()",
        (f"{SHAPES}::test_a_call_ends_reasoning",),
    ),
    "a line break of a text belongs to its tags": Mutation(
        "ktqueue/answers/xml_reader.py",
        'text = value[1:].removesuffix("\\n") if value.startswith("\\n") else value',
        'text = value.strip("\\n")',
        (f"{SHAPES}::test_a_text_between_tags_keeps_its_line_breaks",),
    ),
    "any line like a tag begins a parameter": Mutation(
        "ktqueue/answers/xml_reader.py",
        "if types and _key_and_attributes(found[2])[0] not in types:",
        "if not types:",
        (f"{SHAPES}::test_a_line_like_a_tag_is_part_of_a_value",),
    ),
    "one wrong call drops those beside it": Mutation(
        "ktqueue/answers/python_reader.py",
        "if not calls:",
        "if len(calls) < len(parts) or not calls:",
        (f"{SHAPES}::test_a_wrong_call_drops_no_other",),
    ),
    "an alias has its own queue": Mutation(
        "ktqueue/broker/models.py",
        "named or next((card for card in cards if name in card.aliases), None)",
        "named",
        (f"{MODELS}::test_an_alias_means_the_model_and_answers_have_its_name[gpt-4o]",),
    ),
    "the model's sampling defaults win": Mutation(
        "ktqueue/openai/common_fields.py",
        'temperature=_or(self.temperature, defaults.get("temperature", 1.0)),',
        'temperature=defaults.get("temperature", _or(self.temperature, 1.0)),',
        (f"{MODELS}::test_the_model_s_defaults_stand_in_for_what_a_request_leaves_out",),
    ),
    "every tenant sees all workers": Mutation(
        "ktqueue/gateway/health.py",
        '_check_operator(request, "the status needs")',
        "pass",
        (f"{PAGE}::test_the_page_needs_no_key_but_its_data_do",),
    ),
    "the page may load scripts from anywhere": Mutation(
        "ktqueue/gateway/web_page.py",
        "script-src 'self'",
        "script-src *",
        (f"{PAGE}::test_the_page_may_load_nothing_from_elsewhere",),
    ),
    "events of a response depend on the reader": Mutation(
        "ktqueue/gateway/responses.py",
        "for delta in self._choices.absorb([place_and_event])",
        "for delta in self._choices.absorb(batch)",
        (f"{RESPONSES}::test_a_response_in_the_background_can_be_followed_from_any_event",),
    ),
    "responses of others can be read": Mutation(
        "ktqueue/broker/responses.py",
        "name = digest(tenant, response_id)",
        'name = digest("", response_id)',
        (f"{RESPONSES}::test_a_response_belongs_to_its_tenant",),
    ),
}
