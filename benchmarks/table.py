"""The measured numbers as the table that docs/benchmark.md shows: `python -m benchmarks.table` writes it there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- measured -->", "<!-- end -->"
MACHINES = {"short": "the left column", "long": "the right column", "loop": "the Python loop", "memory": "memory"}
MEASURED = Path(__file__).parents[1] / "docs" / "benchmark.json"


def table() -> str:
    """Markdown, from docs/benchmark.json."""
    found: dict[str, Any] = json.loads(MEASURED.read_text("utf-8"))
    short, long, loop, memory = (found[name] for name in ("short", "long", "loop", "memory"))
    lines = [
        f"| way | {_shape(short)} | {_shape(long)} |",
        "|---|---|---|",
        *(f"| {name} | {ratio} | {long['ratios'].get(name, '')} |" for name, ratio in short["ratios"].items()),
        f"| a Python loop over sentence, layer and cell ({loop['cells']} cells a layer, {loop['tokens']} tokens, scaled) "
        f"| {loop['ratio']} | |",
        "",
        f"Quartiles over batches of ffmem with sampled statistics: {_list(short)} and {_list(long)}.",
        "",
        f"A trunk that ends at the last layer's coefficients, as ffmem's pass does, takes {short['shorter_trunk']} and "
        f"{long['shorter_trunk']} of the bare one: divide by these to compare equal work.",
        "",
        f"Peak memory of a whole run over {' and '.join(f'{int(size):,}' for size in memory['peak_bytes'])} tokens: "
        f"{' and '.join(f'{size / 1e6:,.0f} MB' for size in memory['peak_bytes'].values())}, a ratio of {memory['ratio']}.",
        "",
        "Measured:",
        "",
        *(f"- {name}: {found[key]['date']}, {found[key]['machine']}" for key, name in MACHINES.items()),
    ]
    return "\n".join(lines)


def _shape(result: dict[str, Any]) -> str:
    return f"{result['layers']} layers of {result['d']}, {result['cells']:,} cells, {result['tokens']:,} tokens"


def _list(result: dict[str, Any]) -> str:
    return ", ".join(map(str, result["batch_quartiles"]))


def put_between_markers(page: Path, measured: str, begin: str = BEGIN) -> None:
    """What was measured, in the place that a page has for it."""
    before, _, rest = page.read_text("utf-8").partition(begin)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{begin}\n{measured}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    put_between_markers(MEASURED.with_suffix(".md"), table())
