"""The extras of the installation: which extra brings a module, and which of them are missing here."""

from importlib.util import find_spec

MODULES = {
    "gateway": ("uvicorn", "starlette", "httptools", "prometheus_client"),
    "worker": ("torch", "transformers", "gguf", "ktqueue_kernels"),
    "arq": ("arq",),
}
"""The modules by which an extra is recognised. Modules that several extras bring are named under none."""


def extra_with(module: str) -> str:
    """The extra to install where the module is missing; `worker` for one that no extra names."""
    return next((extra for extra, modules in MODULES.items() if module.partition(".")[0] in modules), "worker")


def command(*extras: str) -> str:
    """What to type to install the extras, from an index or in a clone; there the kernels are a folder of their own."""
    names = ",".join(extras)
    kernels = "./csrc " if "worker" in extras else ""
    return f"pip install 'ktqueue[{names}]' (in a clone: pip install {kernels}'.[{names}]')"


def require(*extras: str) -> None:
    """Raise ModuleNotFoundError with the command to type where any of the extras is not installed."""
    missing = [extra for extra in extras if not all(find_spec(module) for module in MODULES[extra])]
    if missing:
        raise ModuleNotFoundError(f"this needs packages that are not installed: {command(*missing)}")
