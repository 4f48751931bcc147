"""`ktqueue bench serve`: latency and throughput of any OpenAI-compatible server under load."""

from ktqueue.cli.bench.serve_flags import LoadFlags, PromptFlags, ResultFlags, ServerFlags
from ktqueue.cli.flags import expand


@expand
def serve(server: ServerFlags, load: LoadFlags, prompts: PromptFlags, result: ResultFlags) -> None:
    """Measure any OpenAI-compatible server under load: first token, gaps, end to end, throughput, failures.

    Flags and figures have the names of `vllm bench serve`. Without flags, 100 prompts of random words are sent at once.
    No two share a beginning, and each run has new ones, so that no prefix cache helps. Ctrl-C shows what was measured.
    """
    from ktqueue.cli.bench.serve_session import run

    run(server, load, prompts, result)
