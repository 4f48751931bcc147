"""`ktqueue chat` on a real terminal and through pipes: locally, through Redis, over HTTP."""

import pytest


def _say(chat, text):
    """Type a turn at the prompt, wait for the first words of the answer."""
    chat.wait_for("> ")
    chat.type(text)
    chat.wait_for(text)
    chat.type("\r")
    chat.wait_for("\n")
    chat.wait_for(" ")


def test_a_local_conversation(terminal):
    chat = terminal("chat", "--local", "--temperature", "0", "--max-tokens", "400")
    _say(chat, "Tell me a story about a fox.")
    chat.type("\x03")
    stopped = chat.wait_for("tok/s")
    assert "stopped" in stopped
    assert "^C" not in stopped
    _say(chat, "And then?")
    chat.wait_for("tok/s")
    chat.wait_for("> ")
    chat.type("half a line")
    chat.wait_for("half a line")
    chat.interrupt("Ctrl-D or /exit leaves")
    chat.type("/reset\r")
    chat.wait_for("a new conversation")
    chat.type("/exit\r")
    assert chat.end() == 0
    assert "Traceback" not in chat.screen


@pytest.mark.parametrize("over_http", [False, True])
def test_ctrl_c_stops_the_answer_and_not_the_program(terminal, stack, over_http):
    where = ("--base-url", f"{stack.url}/v1") if over_http else stack.flags
    chat = terminal("chat", "--max-tokens", "3000", "--temperature", "0", *where)
    for turn in ("Tell me a story.", "And then?"):
        _say(chat, turn)
        chat.type("\x03")
        chat.wait_for("stopped")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.end() == 0
    assert "Traceback" not in chat.screen


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
