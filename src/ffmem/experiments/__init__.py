"""The paper's experiments, one function a question: (model, index, ...) -> Result."""

from ffmem.experiments.activity import activity
from ffmem.experiments.agreement import agreement
from ffmem.experiments.composition import composition
from ffmem.experiments.normaliser import normaliser
from ffmem.experiments.refinement import refinement
from ffmem.experiments.removal import removal
from ffmem.experiments.run import each_experiment, run_experiments

__all__ = [
    "activity",
    "agreement",
    "composition",
    "each_experiment",
    "normaliser",
    "refinement",
    "removal",
    "run_experiments",
]
