"""The tables of accuracy.json, perplexity.json and deferral.json."""

from typing import Any

from benchmarks.cpu_table import software

SOURCES = ("ktqueue", "llama.cpp")


def accuracy(result: dict[str, Any]) -> list[str]:
    """Distance of each source from the float twin, file by file."""
    lines = [
        "### Error against float",
        f"Logits of {result['tokens']} random tokens in windows of {result['window']}, against transformers in float32 "
        "on the same file's dequantised weights: relative error of the median token, share of tokens more than 10 % "
        f"off (another expert was chosen), mean KL divergence, share with the same likeliest token. {software(result)}",
        "",
        "| file | of | median error | far off | KL | same token |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, figures in result["figures"].items():
        told = [(source, figures[source]) for source in SOURCES if source in figures]
        lines += [
            f"| {name} | {source} | {one['median_error']:.2%} | {one['far_tokens']:.1%} | "
            f"{one['mean_divergence']:.2g} | {one['same_token']:.1%} |"
            for source, one in told
        ]
    return lines


def perplexity(result: dict[str, Any]) -> list[str]:
    """Perplexity format by format: the twin's, ours, llama.cpp's, and how far the latter two drift from the twin."""
    text, figures = result["text"], result["figures"]
    reference = figures[result["reference"]]["twin"]["perplexity"]
    lines = [
        "### Perplexity",
        f"The weights of the demo model in each format, {result['windows']} windows of {result['window']} tokens of "
        f"`{text['name']}` ({text['bytes']} bytes, sha256 {text['sha256']}) from its beginning, all but a window's "
        "first token scored. Twin: transformers in float32 on the same file's dequantised weights; drift: from the "
        "twin, what the kernels alone do. Experts and attention have the format, embeddings too from 8 bits up (else "
        f"Q8_0), norms and routers are F32. {software(result)}",
        "",
        f"| format | twin | against {result['reference']} | ktqueue | drift | llama.cpp | drift |",
        f"| --- |{' ---: |' * 6}",
    ]
    for quant, one in figures.items():
        true = one["twin"]["perplexity"]
        cells = [quant, f"{true:.3f}", f"{true / reference - 1:+.2%}"]
        for source in SOURCES:
            value = one[source]["perplexity"] if source in one else None
            cells += [f"{value:.3f}", f"{value / true - 1:+.3%}"] if value else ["-", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def deferral(result: dict[str, Any]) -> list[str]:
    """What deferred experts cost, by how many of a token are."""
    text, figures, experts = result["text"], result["figures"], result["experts_per_token"]
    plain = figures[0]["perplexity"]
    return [
        "### Deferred experts",
        f"Model {result['model']}, {experts} experts a token: {result['windows']} windows of {result['window']} tokens "
        f"of `{text['name']}` ({text['bytes']} bytes, sha256 {text['sha256']}) from its beginning, fed token by token, "
        "so that each defers; all but a window's first token scored; float32. KL divergence and likeliest token: "
        f"against deferring none. {software(result)}",
        "",
        "| deferred | perplexity | against none | KL | same token |",
        "| ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {one['deferred']} of {experts} | {one['perplexity']:.3f} | {one['perplexity'] / plain - 1:+.2%} | "
            f"{one['mean_divergence']:.2g} | {one['same_token']:.1%} |"
            for one in figures
        ),
    ]
