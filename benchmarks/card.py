"""The numbers of the bundled model as the tables that docs/wiki16.md shows: `python -m benchmarks.card` writes them.

docs/wiki16.json holds what `ffmem train` logged (`training`, `curve`) and what `benchmarks/wiki16.py` printed for the
weights as they were trained (`float32`) and as they are bundled (`rows8`, and the curves by layer). docs/whole.json is what
`benchmarks/whole.py` wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.table import put_between_markers

MEASURED = Path(__file__).parents[1] / "docs" / "wiki16.json"
WHOLE = "<!-- whole -->"


def card() -> str:
    """Markdown, from docs/wiki16.json."""
    found: dict[str, Any] = json.loads(MEASURED.read_text("utf-8"))
    whole, rows = found["perplexity"]["float32"], found["perplexity"]["rows8"]
    training = found["training"]
    return "\n".join(
        [
            "| WikiText-103 | tokens | unknown | perplexity, windows of 256 | sentences alone | as trained, windows |",
            "|---|---|---|---|---|---|",
            *(
                f"| {name} | {one['tokens']:,} | {one['unknown']:.2%} | **{one['windows']:.2f}** | {one['sentences']:.2f} "
                f"| {whole[name]['windows']:.2f} |"
                for name, one in rows.items()
            ),
            "",
            f"Training: {training['step']:,} steps, {training['tokens'] / 1e6:,.0f} million tokens, "
            f"{training['seconds'] / 60:.0f} minutes on one {found['machine']}, {training['parameters']:,} parameters, "
            f"{training['vocabulary']:,} words. The validation glance of the log is at the file's first windows only.",
            "",
            "| step | " + " | ".join(f"{one['step']:,}" for one in found["curve"]) + " |",
            "|---|" + "---|" * len(found["curve"]),
            "| training loss | " + " | ".join(f"{one['loss']:.2f}" for one in found["curve"]) + " |",
            "| validation glance | " + " | ".join(f"{one['valid_perplexity']:.1f}" for one in found["curve"]) + " |",
            "",
            f"By layer, for the bundled weights: every cell's top trigger over {found['trigger_tokens']:,} tokens of "
            "training text (Figs 4 and 5), and 2,000 validation prefixes (Figs 7 and 9).",
            "",
            "| layer | agreement | shuffled | median rank | active, median | residual predicts output | its probability |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {one['layer']} | {one['share']:.2%} | {one['shuffled']:.2%} | {one['rank_median']:,.0f} "
                f"| {one['active_median']:.1%} | {one['residual_matches_output']:.1%} "
                f"| {one['residual_probability_median']:.4f} |"
                for one in found["layers"]
            ),
            "",
            f"Measured on {found['date']} with `benchmarks/wiki16.py` on one {found['machine']}.",
        ]
    )


def whole() -> str:
    """Markdown, from docs/whole.json."""
    found: dict[str, Any] = json.loads(MEASURED.with_name("whole.json").read_text("utf-8"))
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| text | {found['tokens']:,} tokens in {found['sentences']:,} sentences, read in {found['shards']} shards |",
            f"| found | {found['triggers']:,} triggers of {found['cells']:,} cells, in {found['sentences_kept']:,} of the "
            "sentences |",
            f"| time | {found['seconds']:.0f} s in all: {found['reading_seconds']:.1f} s to read, "
            f"{found['writing_seconds']:.1f} s to write the run |",
            f"| speed | {found['tokens_per_second']:,} tokens/s, all in all |",
            f"| memory | {found['gpu_memory_beyond_the_model'] / 1e9:.1f} GB on the GPU beyond the model, "
            f"{found['host_memory'] / 1e9:.1f} GB of the host's |",
            f"| run folder | {found['run_folder_bytes'] / 1e9:.2f} GB |",
            "",
            "| layer | agreement | shuffled | median rank |",
            "|---|---|---|---|",
            *(
                f"| {one['layer']} | {one['share']:.2%} | {one['shuffled']:.2%} | {one['rank_median']:,.0f} |"
                for one in found["agreement"]
            ),
            "",
            f"{found['machine']}, {found['dtype']}, {found['date']}, `benchmarks/whole.py`.",
        ]
    )


if __name__ == "__main__":
    put_between_markers(MEASURED.with_suffix(".md"), card())
    put_between_markers(MEASURED.with_suffix(".md"), whole(), WHOLE)
