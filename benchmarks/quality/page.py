"""The page of quality: sections for accuracy.json, perplexity.json and deferral.json."""

from collections.abc import Callable
from typing import Any

from benchmarks.tables import software, table

SOURCES = ("ktqueue", "llama.cpp")


def accuracy(result: dict[str, Any]) -> list[str]:
    """Distance of each source from the float twin, file by file."""
    rows = [
        {"file": name, "source": source, **sources[source]}
        for name, sources in result["figures"].items()
        for source in SOURCES
        if source in sources
    ]
    return [
        "### Error against float",
        f"Logits of {result['tokens']} random tokens in windows of {result['window']}, against transformers in float32 "
        "on the same file's dequantised weights: relative error of the median token, share of tokens more than 10 % "
        f"off (another expert was chosen), mean KL divergence, share with the same likeliest token. {software(result)}",
        "",
        *table(
            {
                "file": "{file}", "of": "{source}", "median error": "{median_error:.2%}",
                "far off": "{far_tokens:.1%}", "KL": "{mean_divergence:.2g}", "same token": "{same_token:.1%}",
            },
            rows,
            words=2,
        ),
    ]  # fmt: skip


def perplexity(result: dict[str, Any]) -> list[str]:
    """Perplexity by format: the twin's, ours, llama.cpp's, and how far the latter two drift from the twin."""
    text, figures = result["text"], result["figures"]
    reference = figures[result["reference"]]["twin"]["perplexity"]

    def cells(quant: str, sources: dict[str, Any]) -> list[str]:
        twin = sources["twin"]["perplexity"]
        values = [quant, f"{twin:.3f}", f"{twin / reference - 1:+.2%}"]
        for source in SOURCES:
            value = sources.get(source, {}).get("perplexity")
            values += [f"{value:.3f}", f"{value / twin - 1:+.3%}"] if value else ["-", "-"]
        return values

    def column(place: int) -> Callable[[list[str]], str]:
        return lambda row: row[place]

    headings = ("format", "twin", f"against {result['reference']}", "ktqueue", "drift", "llama.cpp", "its drift")
    return [
        "### Perplexity",
        f"The weights of the demo model in each format, {result['windows']} windows of {result['window']} tokens of "
        f"`{text['name']}` ({text['bytes']} bytes, sha256 {text['sha256']}) from its beginning, all but a window's "
        "first token scored. Twin: transformers in float32 on the same file's dequantised weights; drift: from the "
        "twin, what the kernels alone do. Experts and attention have the format, embeddings too from 8 bits up (else "
        f"Q8_0), norms and routers are F32. {software(result)}",
        "",
        *table(
            {heading: column(place) for place, heading in enumerate(headings)},
            [cells(*item) for item in figures.items()],
            words=1,
        ),
    ]


def deferral(result: dict[str, Any]) -> list[str]:
    """What expert deferral, which was removed, cost in perplexity."""
    text, figures, experts = result["text"], result["figures"], result["experts_per_token"]
    plain = figures[0]["perplexity"]
    return [
        "### Deferred experts",
        f"Model {result['model']}, {experts} experts a token: {result['windows']} windows of {result['window']} tokens "
        f"of `{text['name']}` ({text['bytes']} bytes, sha256 {text['sha256']}) from its beginning, fed token by token, "
        "so that each defers; all but a window's first token scored; float32. KL divergence and likeliest token: "
        f"against deferring none. {software(result)}",
        "",
        *table(
            {
                "deferred": f"{{deferred}} of {experts}", "perplexity": "{perplexity:.3f}",
                "against none": lambda row: f"{row['perplexity'] / plain - 1:+.2%}",
                "KL": "{mean_divergence:.2g}", "same token": "{same_token:.1%}",
            },
            figures,
        ),
    ]  # fmt: skip
