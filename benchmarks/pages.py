"""What was measured, as the pages of the docs show it: everything between two markers of a page comes from here.

python -m benchmarks.pages             write benchmarks/results/*.json into the pages of docs/
python -m benchmarks.pages --check     only tell which pages do not show what is there, and fail if one does not
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks.growth import grown
from benchmarks.shared import DOCS, RESULTS
from ffmem.indexing.plan import plan

END = "<!-- end -->"
MACHINES = {"short": "the left column", "long": "the right column", "loop": "the Python loop", "memory": "memory"}
PLANNED = (("llama3-70b", 1e9, 8), ("llama3-8b", 1e9, 8), ("paper", 1e9, 8))
"""Models, tokens and GPUs of the plans that docs/scale.md shows."""


def measured(name: str) -> dict[str, Any]:
    """The results that a benchmark wrote under this name."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def benchmark() -> str:
    """What looking costs on a CPU: `benchmarks.index`."""
    found = measured("benchmark")
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


def looked() -> str:
    """The index pass against the bare trunk on a GPU: `benchmarks.gpu`."""
    return "\n\n".join(_looked(name, one) for name, one in measured("gpu").items() if "ways" in one)


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
    """What an activation takes on a GPU, alone and with the read: `benchmarks.gpu --kernels`."""
    one = measured("gpu")["kernels"]
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
    """From files to a finished run on a GPU: `benchmarks.gpu --corpus`."""
    one = measured("gpu")["end to end"]
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


def started() -> str:
    """Short runs over real text, the start included: `benchmarks.start`."""
    rows = []
    for name, one in measured("start").items():
        for run in ("cold", "warm"):
            found = one[run]
            steps = found["steps"][0] if found["steps"] else {}
            ends = found["seconds"] - found["to_the_last_forward"]
            rows.append(
                f"| {name}, {run} | {one['tokens']:,} | {one['bare_seconds']:.1f} | {found['seconds']:.1f} | "
                f"**{found['ratio']:.2f}** | {found['to_the_first_forward']:.1f} | {steps.get('first batch', 0):.1f} "
                f"| {ends:.1f} |"
            )
    last = list(measured("start").values())[-1]
    return "\n".join(
        [
            "| run | tokens | bare forward, s | all in all, s | ratio | to the first forward | then to the first batch "
            "| behind the last |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"{last['machine']}, bf16, {last['date']}.",
        ]
    )


def projected() -> str:
    """The projection of all values onto the vocabulary: `benchmarks.values`."""
    found = measured("values")
    seconds = {name: {way: cost["seconds"] for way, cost in one["ways"].items()} for name, one in found.items()}
    last = next(reversed(found.values()))
    return "\n".join(
        [
            "| shape | cells × words, width | fifty tokens at either end, as rows of the table | rank of a given token |",
            "|---|---|---|---|",
            *(
                f"| {name} | {one['cells']:,} × {one['vocabulary']:,}, {one['d']:,} "
                f"| {seconds[name]['extremes as a table']:.3g} s | {seconds[name]['rank']:.3g} s |"
                for name, one in found.items()
            ),
            "",
            f"{last['machine']}, {last['date']}.",
        ]
    )


def card() -> str:
    """The card of the bundled model: `benchmarks.wiki16`, and what `ffmem train` logged (`training`, `curve`)."""
    found = measured("wiki16")
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
    """The bundled model over a whole corpus: `benchmarks.whole`."""
    found = measured("whole")
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


def cost() -> str:
    """What the experiments cost: `benchmarks.experiments`."""
    return "\n\n".join(_cost(result) for result in measured("experiments").values())


def _cost(result: dict[str, Any]) -> str:
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
    """What a trace costs: `benchmarks.live`."""
    found = measured("live")
    return "\n".join(
        [
            f"| {found['tokens']} tokens through wiki16 | seconds | × a forward with logits |",
            "|---|---|---|",
            *(f"| {name} | {one['seconds']} | {one['ratio']} |" for name, one in found["ways"].items()),
            "",
            f"`python -m benchmarks.live`, best of five, {found['machine']}, {found['date']}.",
        ]
    )


def planned() -> str:
    """Plans of large models side by side, and what they rest on, made by the command's own code."""
    plans = [plan(model, tokens=tokens, gpus=gpus) for model, tokens, gpus in PLANNED]
    cells = [dict(one.rows()) for one in plans]
    commands = " | ".join(f"`{model} --tokens {tokens:.0e} --gpus {gpus}`" for model, tokens, gpus in PLANNED)
    assumed = list(dict.fromkeys(text for one in plans for text in one.assumptions))
    return "\n".join(
        [
            f"| `ffmem plan` | {commands} |".replace("e+09", "e9"),
            "|---|" + "---|" * len(plans),
            *(f"| {name} | " + " | ".join(row[name] for row in cells) + " |" for name in cells[0]),
            "",
            "Assumed:",
            "",
            *(f"- {text}" for text in assumed),
        ]
    )


def planned_and_measured() -> str:
    """The plan of the run that `benchmarks.gpu --corpus` made from end to end, beside what it took."""
    run = measured("gpu")["end to end"]
    said = plan("paper", tokens=run["tokens"])
    rows = {
        "time to read and to finish, s": (said.reading_seconds + said.finishing_seconds, run["seconds"]),
        "GPU memory, GB": (said.gpu_bytes / 1e9, run["peak_memory"] / 1e9),
        "disk, the run at most, GB": (said.run_bytes / 1e9, run["run_folder_bytes"] / 1e9),
    }
    return "\n".join(
        [
            f"The paper's shape over {run['tokens']:,} tokens ({run['machine']}, {run['date']}):",
            "",
            "| | planned | measured |",
            "|---|---|---|",
            *(f"| {name} | {expected:,.1f} | {found:,.1f} |" for name, (expected, found) in rows.items()),
        ]
    )


SHOWN: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("benchmark.md", "measured", benchmark),
    ("gpu.md", "measured", looked),
    ("gpu.md", "kernels", activated),
    ("gpu.md", "end to end", finished),
    ("gpu.md", "started", started),
    ("gpu.md", "projected", projected),
    ("wiki16.md", "measured", card),
    ("wiki16.md", "whole", whole),
    ("experiments.md", "measured", cost),
    ("live.md", "measured", live_cost),
    ("scale.md", "planned", planned),
    ("scale.md", "checked", planned_and_measured),
    ("scale.md", "grown", lambda: grown(measured("growth"))),
)
"""Pages, the markers in them, and what stands behind each marker."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a page shows something else")
    chosen = parser.parse_args()
    differing = []
    for name, marker, render in SHOWN:
        page, begin = DOCS / name, f"<!-- {marker} -->"
        text = page.read_text("utf-8")
        before, found, rest = text.partition(begin)
        if not found:
            raise SystemExit(f"expected {begin} in {page}, found none")
        made = f"{before}{begin}\n{render()}\n{END}{rest.partition(END)[2]}"
        if made != text:
            differing.append(f"{page} ({marker})")
            if not chosen.check:
                page.write_text(made, "utf-8")
    if chosen.check and differing:
        raise SystemExit(
            f"expected what benchmarks/results holds, found something else: {', '.join(differing)}; try make pages"
        )


if __name__ == "__main__":
    main()
