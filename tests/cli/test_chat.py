"""`ktqueue chat` on a real terminal and through pipes: locally, through Redis, over HTTP."""


def test_a_local_conversation(terminal):
    chat = terminal("chat", "--local", "--temperature", "0", "--max-tokens", "400")
    chat.wait_for("Ctrl-C stops an answer")
    chat.wait_for("> ")
    chat.type("Tell me a story about a fox.\r")
    chat.wait_for("fox.\r\n")
    chat.wait_for(" ")  # the answer has begun
    chat.type("\x03")
    stopped = chat.wait_for("tok/s")
    assert "stopped" in stopped
    assert "^C" not in stopped
    chat.wait_for("> ")
    chat.type("And then?\r")
    chat.wait_for("tok/s")
    chat.wait_for("> ")
    chat.type("half a line\x03")
    chat.wait_for("Ctrl-D or /exit leaves")
    chat.type("/reset\r")
    chat.wait_for("a new conversation")
    chat.type("/exit\r")
    assert chat.end() == 0
    assert "Traceback" not in chat.screen


def test_through_redis_on_a_terminal(terminal, stack):
    chat = terminal("chat", "--max-tokens", "3000", "--temperature", "0", *stack.flags)
    chat.wait_for("Ctrl-C stops an answer")
    chat.type("Tell me a story.\r")
    chat.wait_for("story.\r\n")
    chat.wait_for(" ")
    chat.type("\x03")
    chat.wait_for("stopped")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.end() == 0
    assert "Traceback" not in chat.screen


def test_over_http_on_a_terminal(terminal, stack):
    chat = terminal("chat", "--base-url", f"{stack.url}/v1", "--max-tokens", "3000", "--temperature", "0")
    chat.wait_for("Ctrl-C stops an answer")
    chat.type("Tell me a story.\r")
    chat.wait_for("story.\r\n")
    chat.wait_for(" ")
    chat.type("\x03")
    chat.wait_for("stopped")
    chat.type("/exit\r")
    assert chat.end() == 0


def test_all_three_give_the_same_greedy_answers_through_pipes(ktqueue, stack):
    words = ("chat", "--temperature", 0, "--max-tokens", 16, "--system", "You tell tales.")
    turns = "Tell me a story.\nGo on.\n"
    local = ktqueue(*words, "--local", stdin=turns)
    through_redis = ktqueue(*words, *stack.flags, stdin=turns)
    over_http = ktqueue(*words, "--base-url", stack.url, stdin=turns)
    assert local.returncode == through_redis.returncode == over_http.returncode == 0, local.stderr
    assert local.stdout == through_redis.stdout == over_http.stdout
    assert len(local.stdout) > 20
    assert "\033" not in local.stdout + local.stderr


def test_a_turn_that_does_not_fit_is_told_and_the_next_one_works(ktqueue, stack):
    turns = "x " * 9000 + "\nhello\n"
    for where in (stack.flags, ("--base-url", stack.url)):
        done = ktqueue("chat", "--max-tokens", 4, *where, stdin=turns)
        assert "maximum context length" in done.stderr
        assert len(done.stdout) > 2
        assert done.returncode == 1
