"""The compiled loss: the same numbers, and one compilation for each shape of windows."""

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys
from functools import partial
from pathlib import Path
import torch
torch.set_num_threads(1)
from torch._dynamo.utils import counters
from ffmem.training import train as room
from ffmem.training.recipe import Recipe

torch.compile = partial(torch.compile, backend="aot_eager")
text, out = Path(sys.argv[1]), Path(sys.argv[2])
recipe = Recipe(d=16, cells=32, heads=2, layers=1, cutoffs=(20, 40), context=64, windows=((16, 4), (8, 4)), warmup=5)
rare = set()
step = room.Trainer.step

def spied(trainer, batches, rate):
    rare.update(tuple(len(rows) for rows, _ in windows.tails) for windows in batches)
    return step(trainer, batches, rate)

room.Trainer.step = spied
losses = []
for compiled in (False, True):
    folder = room.train(text, out=out / str(compiled), size=recipe, steps=8, min_count=2, device="cpu", compiled=compiled,
                        log_every=1, quiet=True)
    losses.append([json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()])
print(json.dumps({"losses": losses, "rare": len(rare), "graphs": counters["stats"]["unique_graphs"],
                  "breaks": sum(counters["graph_break"].values())}))
"""


@pytest.mark.slow
def test_compiled_steps_have_the_same_loss_and_are_compiled_once_for_each_shape_of_windows(text, tmp_path):
    # In a process of its own: here beartype looks at every call, which a compiler cannot. The graphs, forward and backward,
    # are those that inductor would get; to turn them into C++ takes a minute, and needs a compiler.
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(text), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    eager, compiled = found["losses"]
    assert compiled == pytest.approx(eager, rel=1e-3)
    assert found["rare"] > 8  # of 16 batches, most have a number of rare words of their own
    assert (found["graphs"], found["breaks"]) == (2, 0)
