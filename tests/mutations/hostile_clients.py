"""Mutations of promises about clients without a key."""

from mutation import Mutation

LIMITS = "tests/gateway/test_limits.py"
TOO_MUCH = f"{LIMITS}::test_input_beyond_a_limit_gets_an_error_and_ends_the_connection"
PROTOCOL = "ktqueue/gateway/http/protocol.py"

HOSTILE_CLIENTS: dict[str, Mutation] = {
    "headers have no size limit": Mutation(
        PROTOCOL,
        "if self._header_bytes > self._settings.max_header_bytes:",
        "if False:",
        (TOO_MUCH,),
    ),
    "a header that never ends is read": Mutation(
        PROTOCOL,
        "if self._unparsed_bytes > settings.max_header_bytes:",
        "if False:",
        (TOO_MUCH,),
    ),
    "headers have no time limit": Mutation(
        PROTOCOL,
        "        self._header_timer = self.loop.call_later(self._settings.header_timeout, self._on_header_timeout)\n\n"
        "    def connection_lost",
        "        self._header_timer = None\n\n    def connection_lost",
        (f"{LIMITS}::test_headers_have_a_time_limit_and_silent_connections_end",),
    ),
    "a body has no time limit": Mutation(
        "ktqueue/gateway/http/uploads.py",
        "                began + settings.body_timeout,\n"
        "                began + self.grace_seconds + len(upload.data) / settings.min_body_rate,\n",
        "",
        (f"{LIMITS}::test_a_body_has_a_time_limit_and_a_minimum_rate",),
    ),
    "an unfinished body takes the place of a request": Mutation(
        "ktqueue/gateway/http/edge.py",
        "                if _has_body(scope, headers):",
        "                if False:",
        (f"{LIMITS}::test_slow_senders_do_not_keep_others_out",),
    ),
    "all bodies together have no limit": Mutation(
        "ktqueue/gateway/http/uploads.py",
        "if self.held_bytes > self._settings.max_bodies_bytes:",
        "if False:",
        (f"{LIMITS}::test_all_bodies_share_a_limit_and_the_largest_is_dropped",),
    ),
    "one address can take all connections": Mutation(
        "ktqueue/gateway/http/connections.py",
        "if self._per_address and not trusted and",
        "if False and",
        (f"{LIMITS}::test_connections_of_an_address_are_limited",),
    ),
    "the key is checked after the body": Mutation(
        "ktqueue/gateway/http/edge.py",
        '            scope["tenant"] = self._keys.tenant(path, headers, _client_host(scope))\n',
        '            while _has_body(scope, headers) and (await receive()).get("more_body"):\n'
        "                pass\n"
        '            scope["tenant"] = self._keys.tenant(path, headers, _client_host(scope))\n',
        (f"{LIMITS}::test_the_key_is_checked_before_the_body_is_read",),
    ),
    "a client that never reads stays connected": Mutation(
        PROTOCOL,
        '            self._end("not_reading")',
        "            pass",
        (f"{LIMITS}::test_a_client_that_reads_no_answer_is_dropped",),
    ),
    "probes have no room of their own": Mutation(
        "ktqueue/gateway/http/edge.py",
        "            if path not in PROBES:",
        "            if True:",
        (f"{LIMITS}::test_probes_are_answered_when_all_connections_are_busy",),
    ),
    "clients without a key learn the names of models": Mutation(
        "ktqueue/gateway/health.py",
        "    if not known:",
        "    if False:",
        ("tests/gateway/test_edge.py::test_a_request_needs_one_of_the_keys",),
    ),
}
