"""A run's results beside the paper's numbers: figures, claims with verdicts, and one page that holds them all. No torch."""

from ffmem.experiments.rules import Claim
from ffmem.reports.claims import judge_claims
from ffmem.reports.figures import figure, plot, save_figures
from ffmem.reports.page import report

__all__ = ["Claim", "figure", "judge_claims", "plot", "report", "save_figures"]
