"""What was measured on a GPU, as docs/gpu.md shows it: `python -m benchmarks.gpu_page` writes it there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.table import put_between_markers

DOCS = Path(__file__).parents[1] / "docs"
PROJECTED = "<!-- projected -->"


def looked() -> str:
    """Markdown, from docs/gpu.json, which `python -m benchmarks.gpu` writes."""
    found: dict[str, Any] = json.loads((DOCS / "gpu.json").read_text("utf-8"))
    return "\n\n".join(_looked(name, one) for name, one in found.items())


def _looked(name: str, one: dict[str, Any]) -> str:
    lines = [
        f"**{name}**: {one['layers']} layers of {one['d']}, {one['cells']:,} cells, {one['tokens']:,} tokens in batches of "
        f"up to {one['batch_tokens']:,}, {one['padding']:.1%} of them padding. The trunk runs at {one['tflops']:.0f} "
        f"TFLOP/s; {one['peak_memory'] / 1e9:.1f} GB of memory; batches were read again at {one['read_again']}. "
        f"{one['machine']}, {one['date']}.",
        "",
        "| way | whole | median | spread | tokens/s |",
        "|---|---|---|---|---|",
    ]
    whole = {way: times for way, times in one["ways"].items() if "whole" in times}
    for way, times in whole.items():
        low, high = times["spread"]
        lines.append(
            f"| {way} | **{times['whole']:.3f}** | {times['median']:.3f} | {low:.3f} to {high:.3f} "
            f"| {times['tokens_per_second']:,} |"
        )
    lines += [f"| {way}, one part | {times['part']:.2f} | | | |" for way, times in one["ways"].items() if way not in whole]
    return "\n".join(lines)


def projected() -> str:
    """Markdown, from docs/values.json, which `python -m benchmarks.values` writes."""
    found: dict[str, Any] = json.loads((DOCS / "values.json").read_text("utf-8"))
    lines = [
        "| cells × words, width | what | seconds | TFLOP/s | share of the ceiling | × a full product at the ceiling "
        "| memory beyond the weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found.values():
        for way, cost in one["ways"].items():
            full, memory = cost["times_a_full_width_product_at_the_ceiling"], cost["memory_beyond_the_weights"]
            lines.append(
                f"| {one['cells']:,} × {one['vocabulary']:,}, {one['d']:,} | {NAMES[way]} | {cost['seconds']:.3f} "
                f"| {cost['tflops']:.0f} | {cost['share_of_ceiling']:.0%} | {full:.2f} | {memory / 1e9:.1f} GB |"
            )
    last = next(reversed(found.values()))
    ceiling = " and ".join(f"{one['ceiling_tflops']:.0f}" for one in found.values())
    measured = f"{last['machine']}, {last['date']}"
    lines += ["", f"The ceiling, a large square product in the same run: {ceiling} TFLOP/s. {measured}."]
    return "\n".join(lines)


NAMES = {
    "extremes": "fifty tokens at either end",
    "extremes as a table": "the same, as rows of the table",
    "judge": "the first token, and the rank of a given one",
}

if __name__ == "__main__":
    put_between_markers(DOCS / "gpu.md", looked())
    put_between_markers(DOCS / "gpu.md", projected(), PROJECTED)
