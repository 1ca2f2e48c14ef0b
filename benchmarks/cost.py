"""What the experiments cost, as the table that docs/experiments.md shows: `python -m benchmarks.cost` writes it there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.table import put_between_markers

MEASURED = Path(__file__).parents[1] / "docs" / "experiments.json"


def cost() -> str:
    """Markdown, from docs/experiments.json."""
    return "\n\n".join(_one(result) for result in json.loads(MEASURED.read_text("utf-8")).values())


def _one(result: dict[str, Any]) -> str:
    alone = result["alone"]
    return "\n".join(
        [
            f"{result['layers']} layers, {result['cells']:,} cells, {result['vocabulary']:,} words; triggers from "
            f"{result['indexed_tokens']:,} tokens, {result['examples']:,} examples, {result['cells_removed_from']} cells a "
            f"layer in `removal`. All six together: **{result['together_seconds']:.0f} s** ({result['machine']}, "
            f"{result['date']}).",
            "",
            "| | " + " | ".join(f"`{name}`" for name in alone) + " |",
            "|---|" + "---|" * len(alone),
            "| time of a bare forward of its examples | " + " | ".join(f"× {one['ratio']}" for one in alone.values()) + " |",
        ]
    )


if __name__ == "__main__":
    put_between_markers(MEASURED.with_suffix(".md"), cost())
