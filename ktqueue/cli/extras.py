"""Optional parts of the installation: which extra provides a module, and whether it is installed."""

from importlib.util import find_spec

MODULES = {
    "gateway": ("uvicorn", "starlette", "httptools", "prometheus_client"),
    "worker": ("torch", "transformers", "gguf", "ktqueue_kernels"),
    "arq": ("arq",),
}
"""Modules that show that an extra is installed. Modules of several extras are not listed."""


def extra_with(module: str) -> str:
    """Return the extra that provides a missing module; `worker` if the module is not listed."""
    return next((extra for extra, modules in MODULES.items() if module.partition(".")[0] in modules), "worker")


def command(*extras: str) -> str:
    """Return the command that installs the extras. In a clone the kernels are a separate folder."""
    names = ",".join(extras)
    kernels = "./csrc " if "worker" in extras else ""
    return f"pip install 'ktqueue[{names}]' (in a clone: pip install {kernels}'.[{names}]')"


def require(*extras: str) -> None:
    """Raise ModuleNotFoundError, with the command that installs them, if any of the extras is missing."""
    missing = [extra for extra in extras if not all(find_spec(module) for module in MODULES[extra])]
    if missing:
        raise ModuleNotFoundError(f"this needs packages that are not installed: {command(*missing)}")
