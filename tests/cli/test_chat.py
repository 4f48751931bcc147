"""`ktqueue chat` on a real terminal and through pipes: locally, through Redis, over HTTP."""

import json
from pathlib import Path

import pytest
from command_line import OpenTerminal, Run, Stack, Terminal


def _say(chat: Terminal, text: str) -> None:
    """Type a turn at the prompt and wait for the first words of the answer."""
    chat.wait_for("> ")
    chat.type(text)
    chat.wait_for(text)
    chat.type("\r")
    chat.wait_for("\n")
    chat.wait_for(" ")


def _say_and_save(chat: Terminal, first: str, second: str, name: str) -> None:
    for keys in (first, second):
        chat.wait_for("> " if keys is first else "one")
        chat.type(keys)
    chat.wait_for("tok/s")
    chat.wait_for("> ")
    chat.type(f"/save {name}\r")
    chat.wait_for("saved")


def test_typing_during_an_answer_waits_for_the_next_prompt(terminal: OpenTerminal, stack: Stack) -> None:
    chat = terminal("chat", "--temperature", "0", "--max-tokens", "200", *stack.flags)
    _say(chat, "Tell me a story.")
    chat.type("/set seed 424242\r")
    answer = chat.wait_for("tok/s")
    assert "/set" not in answer
    assert "424242" not in answer
    chat.wait_for("seed = 424242")
    chat.type("\x04")
    assert chat.end() == 0


def test_a_conversation_through_a_pipe_has_commands_and_quotes(ktqueue: Run, stack: Stack, tmp_path: Path) -> None:
    lines = ["/system You tell tales.", '"""one', 'two"""', "/save talk.json", "/nonsense", "/etc/passwd?"]
    done = ktqueue("chat", "--max-tokens", 2, *stack.flags, stdin="\n".join(lines) + "\n")
    assert "unknown command /nonsense" in done.stderr
    assert done.returncode == 1
    system, asked, answered = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert (system["content"], asked["content"]) == ("You tell tales.", "one\ntwo")
    assert done.stdout.startswith(answered["content"])
    (tmp_path / "bad.json").write_text('{"messages": [7]}')
    assert "not a conversation" in ktqueue("chat", *stack.flags, stdin="/load bad.json\n").stderr


@pytest.mark.long
def test_a_local_conversation(terminal: OpenTerminal, tmp_path: Path) -> None:
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
    chat.interrupt("Ctrl-D or /exit ends the chat")
    chat.type("/reset\r")
    chat.wait_for("a new conversation")
    chat.wait_for("> ")
    chat.type("/set max_tokens 3\r")
    chat.wait_for("max_tokens = 3")
    _say_and_save(chat, "\x1b[200~one\rtwo\x1b[201~", "\r", "a.json")  # pasted
    _say_and_save(chat, '"""one\r', 'two"""\r', "b.json")
    for name, said in (("a.json", "one\ntwo"), ("b.json", "one\ntwo")):
        messages = json.loads((tmp_path / name).read_text())["messages"]
        assert [message["content"] for message in messages if message["role"] == "user"][-1] == said
    chat.type("/system Be brief.\r")
    chat.wait_for("a new conversation")
    chat.type("/load a.json\r")
    chat.wait_for("loaded 2 messages from a.json")
    chat.type("/help\r")
    chat.wait_for("/save FILE")
    chat.type("/set top_p 7\r")
    chat.wait_for("top_p must be a number above 0")
    chat.wait_for("> ")
    chat.type("/exit\r")
    assert chat.end() == 0
    assert "Traceback" not in chat.screen


@pytest.mark.parametrize("over_http", [False, True])
def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: OpenTerminal, stack: Stack, over_http: bool) -> None:
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


@pytest.mark.long
def test_local_redis_and_http_chats_give_the_same_greedy_answers(ktqueue: Run, stack: Stack) -> None:
    words = ("chat", "--temperature", 0, "--max-tokens", 16, "--system", "You tell tales.")
    turns = "Tell me a story.\nGo on.\n"
    local = ktqueue(*words, "--local", stdin=turns)
    through_redis = ktqueue(*words, *stack.flags, stdin=turns)
    over_http = ktqueue(*words, "--base-url", stack.url, stdin=turns)
    assert local.returncode == through_redis.returncode == over_http.returncode == 0, local.stderr
    assert local.stdout == through_redis.stdout == over_http.stdout
    assert len(local.stdout) > 20
    assert "\033" not in local.stdout + local.stderr


def test_a_turn_that_is_too_long_is_an_error_and_the_next_turn_works(ktqueue: Run, stack: Stack) -> None:
    turns = "x " * 9000 + "\nhello\n"
    for where in (stack.flags, ("--base-url", stack.url)):
        done = ktqueue("chat", "--max-tokens", 4, *where, stdin=turns)
        assert "maximum context length" in done.stderr
        assert len(done.stdout) > 2
        assert done.returncode == 1
