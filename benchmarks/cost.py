"""What experiments and traces cost, as their pages in the docs show it: `python -m benchmarks.cost` writes it there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.table import put_between_markers

MEASURED = Path(__file__).parents[1] / "docs" / "experiments.json"
LIVE = MEASURED.with_name("live.json")


def cost() -> str:
    """Markdown, from docs/experiments.json."""
    return "\n\n".join(_one(result) for result in json.loads(MEASURED.read_text("utf-8")).values())


def _one(result: dict[str, Any]) -> str:
    alone, beyond = result["alone"], result["memory_beyond_the_model"]
    memory = f", {beyond / 1e9:.2f} GB of its memory beyond the model" if beyond else ""
    return "\n".join(
        [
            f"{result['layers']} layers, {result['cells']:,} cells, {result['vocabulary']:,} words; triggers from "
            f"{result['indexed_tokens']:,} tokens, {result['examples']:,} examples, {result['cells_removed_from']} cells a "
            f"layer in `removal`. All six together: **{result['together_seconds']:.0f} s** ({result['machine']}{memory}, "
            f"{result['date']}).",
            "",
            "| | " + " | ".join(f"`{name}`" for name in alone) + " |",
            "|---|" + "---|" * len(alone),
            "| time of a bare forward of its examples | " + " | ".join(f"× {one['ratio']}" for one in alone.values()) + " |",
        ]
    )


def live_cost() -> str:
    """Markdown, from docs/live.json."""
    found: dict[str, Any] = json.loads(LIVE.read_text("utf-8"))
    return "\n".join(
        [
            f"| {found['tokens']} tokens through wiki16 | seconds | × a forward with logits |",
            "|---|---|---|",
            *(f"| {name} | {one['seconds']} | {one['ratio']} |" for name, one in found["ways"].items()),
            "",
            f"`python -m benchmarks.live`, best of five, {found['machine']}, {found['date']}.",
        ]
    )


if __name__ == "__main__":
    put_between_markers(MEASURED.with_suffix(".md"), cost())
    put_between_markers(LIVE.with_suffix(".md"), live_cost())
