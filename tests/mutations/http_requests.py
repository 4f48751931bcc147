"""Mutations of what the gateway accepts, refuses or limits before the engine sees a request."""

from mutation import Mutation

FIELDS, LARGE = "tests/openai/test_foreign_fields.py", "tests/gateway/test_large_bodies.py"
HTTP, ERRORS, JOBS = "tests/gateway/test_http.py", "tests/gateway/test_errors.py", "tests/gateway/test_jobs.py"
TEMPLATES, ADMISSION = "tests/loading/tokenizer/test_template_process.py", "tests/workers/generation/test_admission.py"

HTTP_REQUESTS: dict[str, Mutation] = {
    "tools are dropped": Mutation(
        "ktqueue/openai/tool_choice.py",
        "if card is not None and not card.tool_parser:",
        "if False:",
        (f"{FIELDS}::test_tools_are_refused_for_a_model_whose_calls_cannot_be_read",),
    ),
    "a template drops tools": Mutation(
        "ktqueue/loading/tokenizer/chat_template.py",
        "            return self._render(conversation) == text\n",
        "            return False\n",
        (f"{TEMPLATES}::test_tools_that_the_template_leaves_out_are_refused",),
    ),
    "unknown fields are dropped": Mutation(
        "ktqueue/openai/foreign_fields.py",
        "        if rule is not None and not rule.is_neutral(value, body):\n",
        "        if False:\n",
        (f"{FIELDS}::test_a_refusal_names_the_field[top_a]",),
    ),
    "aliases are dropped": Mutation(
        "ktqueue/openai/foreign_fields.py",
        "            translated[ours] = value\n",
        "",
        (f"{FIELDS}::test_an_alias_is_honoured[n_predict]",),
    ),
    "large bodies on the loop": Mutation(
        "ktqueue/gateway/http/body.py",
        "        if size <= LARGE:\n",
        "        if True:\n",
        (f"{LARGE}::test_large_bodies_are_parsed_by_a_thread",),
    ),
    "any structure is parsed": Mutation(
        "ktqueue/gateway/http/body_decoding.py",
        "    if _marks(body) <= MAX_PARTS:\n",
        "    if True:\n",
        (f"{LARGE}::test_structure_is_counted_outside_of_strings", f"{LARGE}::test_costly_bodies_are_refused_by_field"),
    ),
    "brackets in strings count": Mutation(
        "ktqueue/gateway/http/body_decoding.py",
        'parts += _marks(b"".join(pieces[in_string::2]))',
        'parts += _marks(b"".join(pieces))',
        (f"{LARGE}::test_structure_is_counted_outside_of_strings",),
    ),
    "a compression bomb is unpacked": Mutation(
        "ktqueue/gateway/http/body_decoding.py",
        "decoder.decompress(rest, max_bytes + 1 - len(plain))",
        "decoder.decompress(rest)",
        (f"{LARGE}::test_a_compression_bomb_is_not_decompressed",),
    ),
    "prompts that cannot fit are tokenised": Mutation(
        "ktqueue/loading/tokenizer/tokenizer.py",
        "            if max_model_len is not None and request.truncate_prompt_tokens is None:\n",
        "            if False:\n",
        (f"{ADMISSION}::test_a_text_that_cannot_fit_is_not_tokenised",),
    ),
    "a long prompt is tokenised to its end": Mutation(
        "ktqueue/loading/tokenizer/tokenizer.py",
        "                self._check_beginning(text, max_model_len, field)\n",
        "",
        ("tests/loading/tokenizer/test_tokenizer.py::test_a_long_text_is_refused_by_its_beginning",),
    ),
    "large prompts take all threads": Mutation(
        "ktqueue/workers/generation/admission.py",
        "if is_large and self._large_running == THREADS - 1:",
        "if False:",
        (f"{ADMISSION}::test_large_prompts_leave_a_thread_for_small_prompts",),
    ),
    "claims wait for a prompt": Mutation(
        "ktqueue/workers/generation/incarnation.py",
        "                admission = group.create_task(self._admit(job)",
        "                await self._admit(job)\n                admission = group.create_task(asyncio.sleep(0)",
        (f"{ADMISSION}::test_small_prompts_are_admitted_while_large_prompts_are_tokenised",),
    ),
    "templates have no time limit": Mutation(
        "ktqueue/loading/tokenizer/template_process.py",
        "signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, CPU_SECONDS)",
        "pass",
        (f"{TEMPLATES}::test_a_template_is_stopped_when_its_cpu_time_is_over",),
    ),
    "templates have no memory limit": Mutation(
        "ktqueue/core/line_process.py",
        "    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))\n",
        "",
        (f"{TEMPLATES}::test_the_memory_of_a_template_is_limited",),
    ),
    "constants are computed at load": Mutation(
        "ktqueue/loading/tokenizer/chat_template.py",
        "        if not isinstance(node, nodes.TemplateData):\n",
        "        if False:\n",
        (f"{TEMPLATES}::test_constants_are_not_computed_when_the_template_is_loaded",),
    ),
    "webhooks call private addresses": Mutation(
        "ktqueue/core/webhook.py",
        '        if _is_private(parts.hostname or ""):\n',
        "        if False:\n",
        (f"{JOBS}::test_webhooks_are_refused_if_they_could_not_be_called",),
    ),
    "clients of HTTP/1.0 get chunks": Mutation(
        "ktqueue/gateway/http/http10.py",
        "cycle.chunked_encoding = False",
        "pass",
        (f"{HTTP}::test_http_1_0_clients_get_no_chunks",),
    ),
    "what follows an offer of HTTP/2 is read as its body": Mutation(
        "ktqueue/gateway/http/protocol.py",
        "        self._ignores_input = True\n        raise _StopParsing\n\n    def on_message_begin",
        "\n    def on_message_begin",
        (f"{HTTP}::test_an_offer_of_another_protocol_is_declined[10000-chunked]",),
    ),
    "a preflight needs a key": Mutation(
        "ktqueue/gateway/app.py",
        "[*_cors(config.gateway.cors_origins), _edge(gateway)]",
        "[_edge(gateway), *_cors(config.gateway.cors_origins)]",
        (f"{HTTP}::test_pages_of_allowed_origins_can_call_the_api",),
    ),
    "any name may resolve to the gateway": Mutation(
        "ktqueue/gateway/http/edge.py",
        "            self._hosts.check(headers)\n",
        "",
        (f"{HTTP}::test_a_local_gateway_answers_under_local_names_only",),
    ),
    "a wrong event id is the server's error": Mutation(
        "ktqueue/gateway/errors.py",
        '    """A reader claims to have an event that is not in the journal."""\n\n    status = 400\n',
        '    """A reader claims to have an event that is not in the journal."""\n',
        (f"{JOBS}::test_a_wrong_last_event_id_is_an_error",),
    ),
    "a refused request cancels another client's job": Mutation(
        "ktqueue/gateway/generation.py",
        "        if key is None:\n            gateway.abandon(record.id",
        "        if True:\n            gateway.abandon(record.id",
        ("tests/gateway/test_completions.py::test_a_refused_request_cancels_no_job_of_its_idempotency_key",),
    ),
}
