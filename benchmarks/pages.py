"""Writes the pages of benchmarks/figures from the files in results/: `python -m benchmarks.pages`.

A section of a page is a function that takes one result file and returns Markdown lines.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine import page as engine
from benchmarks.gpu import page as gpu
from benchmarks.gpu import turns_page
from benchmarks.quality import page as quality
from benchmarks.queue import page as queue
from benchmarks.tables import own_section

FOLDER = Path(__file__).parent
Section = Callable[[dict[str, Any]], list[str]]
PAGES: dict[str, tuple[str, dict[str, Section]]] = {  # file: title, sections by pattern of their result files
    "cpu": (
        "The CPU's engine",
        {
            "cpu-*": engine.compare,
            "grammars-*-cpu": own_section,
            "one-call-*": own_section,
            "experts-*": engine.experts,
            "system": queue.system,
        },
    ),
    "gpu": (
        "A GPU's engine",
        {
            "gpu*": gpu.engine,
            "models-*": own_section,
            "latent-*": own_section,
            "linear-*": own_section,
            "attention*": gpu.attention,
            "dense-*": own_section,
            "served-*": gpu.served,
            "grammars-*-cuda": own_section,
            "regrouped-*": own_section,
            "endurance-*": engine.endurance,
        },
    ),
    "placement": (
        "Experts in GPU memory",
        {"placement": gpu.placement, "least-used": own_section, "residency*": gpu.residency},
    ),
    "steps": (
        "A step of a GPU",
        {
            "profile*": gpu.profile,
            "launches*": gpu.launches,
            "trials*": gpu.trials,
            "prefill-*": turns_page.prefill,
        },
    ),
    "tiles": (
        "Kernels for some rows on a GPU",
        {"matrix-steps-*": gpu.trials, "expert-steps-*": gpu.trials, "expert-tiles-*": gpu.expert_tiles},
    ),
    "llama": ("Beside llama.cpp on a GPU", {"beside-llama-*": turns_page.beside_llama}),
    "drafts": ("Drafted tokens", {"drafts-*": turns_page.drafts, "simulated-drafts": engine.simulated_drafts}),
    "quality": (
        "How near to the model",
        {
            "accuracy": quality.accuracy,
            "perplexity": quality.perplexity,
            "quantisers": quality.quantisers,
            "deferral": own_section,
            "cache-*": own_section,
            "step-perplexity-*": own_section,
        },
    ),
    "floods": ("Hostile sockets", {"floods": queue.floods}),
    "queue": (
        "The queue",
        {
            "queue": queue.peers,
            "streams": queue.streams,
            "depth": queue.depth,
            "chaos": queue.chaos,
            "fairness": queue.fairness,
            "backlog-*": gpu.backlog,
            "overlap*": gpu.overlap,
            "simulated-backlog": engine.simulated_backlog,
            "tenants": queue.tenants,
            "crew": queue.fleet,
        },
    ),
}


def write() -> None:
    """Write all pages."""
    for name, (title, sections) in PAGES.items():
        parts = [f"# {title}\nMade by `python -m benchmarks.pages`; how they are taken: [benchmarks](../README.md)."]
        for pattern, section in sections.items():
            paths = sorted((FOLDER / "results").glob(f"{pattern}.json"))
            parts += ["\n".join(section(json.loads(path.read_text()))) for path in paths]
        (FOLDER / "figures" / f"{name}.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    write()
