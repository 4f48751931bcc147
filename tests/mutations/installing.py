"""Mutations of promises about installing ktqueue and downloading models."""

from mutation import Mutation

FOLDER, CLIENT = "tests/install/test_current_folder.py", "tests/install/test_client.py"
DISTRIBUTIONS = "tests/install/test_distributions.py"

INSTALLING: dict[str, Mutation] = {
    "workers import from the current folder": Mutation(
        "workers/supervision/fork_client.py",
        'COMMAND = [sys.executable, "-P", ',
        "COMMAND = [sys.executable, ",
        (
            f"{FOLDER}::test_up_and_a_batch_ignore_modules_of_the_folder",
            f"{FOLDER}::test_the_demo_ignores_modules_of_the_folder",
        ),
    ),
    "the bridge imports from the current folder": Mutation(
        "workers/supervision/supervisor.py",
        'BRIDGE_COMMAND = [sys.executable, "-P", ',
        "BRIDGE_COMMAND = [sys.executable, ",
        (f"{FOLDER}::test_up_and_a_batch_ignore_modules_of_the_folder",),
    ),
    "a client installation contains the model": Mutation(
        "pyproject.toml",
        ', "*.gguf"]',
        "]",
        (f"{DISTRIBUTIONS}::test_ktqueue_is_one_pure_package",),
    ),
    "kernels of any version are called": Mutation(
        "ktqueue/operators/native.py",
        "if ktqueue_kernels.__version__ != __version__:",
        "if False:",
        (f"{DISTRIBUTIONS}::test_kernels_of_another_version_are_refused",),
    ),
    "`up` starts without a worker's packages": Mutation(
        "ktqueue/cli/up.py",
        '    require("gateway", "worker", *(["arq"]',
        '    print("gateway", "worker", *(["arq"]',
        (f"{CLIENT}::test_commands_that_need_an_extra_name_it_and_start_nothing[up-gateway,worker,arq]",),
    ),
    "a code block of the guides does not run": Mutation(
        "docs/guides/watching.md",
        "-H 'Content-Type: application/json' -H 'X-Conversation-Id",
        "-H 'X-Conversation-Id",
        ("tests/docs/test_pages.py::test_each_page_runs_as_printed[docs/guides/watching.md]",),
    ),
}
