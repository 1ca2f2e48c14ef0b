"""The paper's claims judged on a run's results and on its control, and how they fared together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ffmem.errors import RunError
from ffmem.experiments.panels import Results
from ffmem.experiments.rules import RUN_CONTROL, VERDICTS, Claim, Finding, Verdict, find
from ffmem.run.registry import all_experiments
from ffmem.run.results import Result


def judge_claims(results: Results, controls: Results | None = None) -> list[Claim]:
    """Every claim, in the order of the figures; those whose experiment was not run are not measured.

    `controls` are the same experiments on a model of the same shape with random weights, as far as they were run.
    """
    claims = []
    for name, experiment in all_experiments().items():
        not_run = Finding("not measured", f"not run: ffmem experiments RUN {name}")
        for claim in experiment.claims():
            here, control = (_found(claim, of.get(name)) for of in (results, controls or {}))
            claims.append(replace(claim, found=here or not_run, control=control))
    return claims


def _found(claim: Claim, result: Result | None) -> Finding | None:
    """The finding on a claim in one result; None where there is no result."""
    if result is None:
        return None
    try:
        return find(claim.read(result), result)
    except (KeyError, TypeError, ValueError) as error:  # of another version, or altered
        which = f" --control {result.control}" if result.control else ""
        again = f"make it again with ffmem experiments RUN {result.experiment}{which}"
        raise RunError(f"the result {result.experiment} lacks what {claim.figure} needs ({error!r}): {again}") from error


def summary(claims: Sequence[Claim]) -> str:
    """A sentence or two on how the claims fared: what holds, what of that is evidence, what is open."""
    worth = [claim.evidence for claim in claims if claim.evidence]
    counts: dict[Verdict, int] = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    hold = counts["holds"]
    whose = "the paper's " if all(claim.paper for claim in claims) else ""  # other packages have claims of their own
    first = f"Of {whose}{len(claims)} claims {hold} {_do(hold, 'hold')} on this model"
    if hold and all(one == "control not run" for one in worth):
        first += f"; which of them are evidence is not known ({RUN_CONTROL})"
    elif hold:
        yes, none = worth.count("evidence"), worth.count("no evidence")
        first += f": {yes} {_be(yes)} evidence, {none} {_be(none)} no evidence, since random weights do the same"
        if rest := len(worth) - yes - none:
            first += f", and {rest} cannot be told apart"
    phrases: dict[Verdict, Callable[[int], str]] = {
        "undecided": lambda n: f"{n} {_be(n)} undecided",
        "does not hold": lambda n: f"{n} {_do(n, 'do')} not hold",
        "does not apply": lambda n: f"{n} {_do(n, 'do')} not apply",
        "not measured": lambda n: f"{n} {'was' if n == 1 else 'were'} not measured",
    }
    others = [say(counts[verdict]) for verdict, say in phrases.items() if counts[verdict]]
    last = ", ".join(others[:-1]) + (" and " if others[1:] else "") + others[-1] if others else ""
    return f"{first}. {last[:1].upper()}{last[1:]}{'.' if last else ''}".strip()


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def _do(count: int, verb: str) -> str:
    return {"do": "does"}.get(verb, f"{verb}s") if count == 1 else verb
