"""The page of quality: sections for accuracy.json, perplexity.json and quantisers.json."""

from typing import Any

from benchmarks.tables import Cell, section, software

SOURCES = ("ktqueue", "llama.cpp")


def accuracy(result: dict[str, Any]) -> list[str]:
    """Distance of each source from the float twin, file by file."""
    rows = [
        {"file": name, "source": source, **sources[source]}
        for name, sources in result["figures"].items()
        for source in SOURCES
        if source in sources
    ]
    return section(
        "Error against float",
        f"Logits of {result['tokens']} random tokens in windows of {result['window']}, against transformers in float32 "
        "on the same file's dequantised weights: relative error of the median token, share of tokens more than 10 % "
        f"off (another expert was chosen), mean KL divergence, share with the same likeliest token. {software(result)}",
        {
            "file": "{file}", "of": "{source}", "median error": "{median_error:.2%}",
            "far off": "{far_tokens:.1%}", "KL": "{mean_divergence:.2g}", "same token": "{same_token:.1%}",
        },
        rows,
        words=2,
    )  # fmt: skip


def perplexity(result: dict[str, Any]) -> list[str]:
    """Perplexity by format: the twin's, ours, llama.cpp's, and how far the latter two drift from the twin."""
    text, figures = result["text"], result["figures"]
    reference = figures[result["reference"]]["twin"]["perplexity"]

    def drift(source: str) -> Cell:
        return lambda row: f"{row[source]['perplexity'] / row['twin']['perplexity'] - 1:+.3%}"

    return section(
        "Perplexity",
        f"The weights of the demo model in each format, {result['windows']} windows of {result['window']} tokens of "
        f"`{text['name']}` ({text['bytes']} bytes, sha256 {text['sha256']}) from its beginning, all but a window's "
        "first token scored. Twin: transformers in float32 on the same file's dequantised weights; drift: from the "
        "twin, what the kernels alone do. Experts and attention have the format, embeddings too from 8 bits up (else "
        f"Q8_0), norms and routers are F32. {software(result)}",
        {
            "format": "{format}",
            "twin": "{twin[perplexity]:.3f}",
            f"against {result['reference']}": lambda row: f"{row['twin']['perplexity'] / reference - 1:+.2%}",
            "ktqueue": "{ktqueue[perplexity]:.3f}",
            "drift": drift("ktqueue"),
            "llama.cpp": lambda row: f"{row['llama.cpp']['perplexity']:.3f}",
            "its drift": drift("llama.cpp"),
        },
        [{"format": name, **sources} for name, sources in figures.items()],
        words=1,
    )


def quantisers(result: dict[str, Any]) -> list[str]:
    """Errors of our quantisers as a share of llama.cpp's, by weights and importance."""
    formats = result["figures"][0]["ratios"]
    return section(
        "Quantisers",
        "Sum of the squared errors of weights, each weighted by the importance of its column. It is divided by the sum "
        f"for llama.cpp's quantiser with the same importance. Below 1 ours is nearer. {software(result)}",
        {"weights": "{weights}", "importance": "{importance}"}
        | {quant: f"{{ratios[{quant}]:.3f}}" for quant in formats},
        result["figures"],
        words=2,
    )
