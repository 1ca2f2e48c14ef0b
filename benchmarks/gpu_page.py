"""What was measured on a GPU, as docs/gpu.md shows it: `python -m benchmarks.gpu_page` writes it there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.table import put_between_markers

DOCS = Path(__file__).parents[1] / "docs"
KERNELS, END_TO_END, PROJECTED = "<!-- kernels -->", "<!-- end to end -->", "<!-- projected -->"


def measured() -> dict[str, Any]:
    """docs/gpu.json, which `python -m benchmarks.gpu` writes."""
    found: dict[str, Any] = json.loads((DOCS / "gpu.json").read_text("utf-8"))
    return found


def looked() -> str:
    """Markdown: the index pass against the bare trunk."""
    return "\n\n".join(_looked(name, one) for name, one in measured().items() if "ways" in one)


def _looked(name: str, one: dict[str, Any]) -> str:
    read, parts = one["parts"].split(" of ")
    cut = "" if read == parts else f" The run was cut short: {one['parts']} parts."
    again = f"; batches were read again at {one['read_again']}" if "read_again" in one else ""
    memory = f"; {one['peak_memory'] / 1e9:.1f} GB of memory" if "peak_memory" in one else ""
    lines = [
        f"**{name}**: {one['layers']} layers of {one['d']}, {one['cells']:,} cells, {one['tokens']:,} tokens in batches of "
        f"up to {one['batch_tokens']:,}, {one['padding']:.1%} of them padding. The trunk runs at {one['tflops']:.0f} "
        f"TFLOP/s{memory}{again}.{cut} {one['machine']}, {one['date']}.",
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


def activated() -> str:
    """Markdown: what the activation takes, alone and with the read."""
    one = measured()["kernels"]
    rows = {name: times for name, times in one.items() if isinstance(times, dict)}
    return "\n".join(
        [
            "| activation | alone, µs | with the read, µs |",
            "|---|---|---|",
            *(f"| `{name}` | {times['alone']:,.0f} | {times['with the read']:,.0f} |" for name, times in rows.items()),
            "",
            f"One layer of the shape {one['shape']}, a batch of {one['gigabytes']:.2f} GB; the read alone takes "
            f"{one['read']:.0f} µs. {one['machine']}, {one['date']}.",
        ]
    )


def finished() -> str:
    """Markdown: from files to a finished run."""
    one = measured()["end to end"]
    before = one["seconds"] - one["reading_seconds"] - one["writing_seconds"]
    again = one.get("read_again")
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| tokens | {one['tokens']:,} in {one['shards']} shards |",
            f"| the bare trunk on ready batches | {one['bare_seconds']:.1f} s |",
            f"| from files to a finished run | {one['seconds']:.1f} s, **{one['ratio']:.3f}** times as long |",
            f"| before reading, reading, writing the run | {before:.1f}, {one['reading_seconds']:.1f} and "
            f"{one['writing_seconds']:.1f} s |",
            f"| tokens a second, all in all | {one['tokens_per_second']:,} |",
            f"| tokens a second that the text alone could be fed at | {one['fed_tokens_per_second']:,} |",
            *([] if again is None else [f"| groups of batches and a layer that were read again | {again} |"]),
            f"| GPU memory | {one['peak_memory'] / 1e9:.1f} GB |",
            f"| run folder | {one['run_folder_bytes'] / 1e9:.2f} GB |",
            "",
            f"{one['machine']}, {one['date']}.",
        ]
    )


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
    put_between_markers(DOCS / "gpu.md", activated(), KERNELS)
    put_between_markers(DOCS / "gpu.md", finished(), END_TO_END)
    put_between_markers(DOCS / "gpu.md", projected(), PROJECTED)
