"""The paper's claims judged on a run's results and on its control, and how they fared together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ffmem.errors import RunError
from ffmem.reports.curves import Results
from ffmem.reports.questions import Question, questions
from ffmem.reports.verdicts import RUN_CONTROL, VERDICTS, Claim, Finding, Verdict, find


def judge_claims(results: Results, controls: Results | None = None) -> list[Claim]:
    """Every claim, in the order of the figures; those whose experiment was not run are not measured.

    `controls` are the same experiments on a model of the same shape with random weights, as far as they were run.
    """
    found = []
    for one in questions():
        here = _find(one, results) or Finding("not measured", f"not run: ffmem experiments RUN {one.experiment}")
        control = _find(one, controls or {})
        found.append(Claim(one.id, one.figure, one.claim, one.paper, one.rule, here, control))
    return found


def _find(one: Question, results: Results) -> Finding | None:
    """What was found in one result, where it is there."""
    if one.experiment not in results:
        return None
    result = results[one.experiment]
    try:
        return find(one.read(result), result)
    except (KeyError, TypeError, ValueError) as error:  # of another version, or altered
        which = f" --control {result.control}" if result.control else ""
        again = f"make it again with ffmem experiments RUN {one.experiment}{which}"
        raise RunError(f"the result {one.experiment} lacks what {one.figure} needs ({error!r}): {again}") from error


def summary(claims: Sequence[Claim]) -> str:
    """How the claims fared, in a sentence or two: what holds, what of that is evidence, what is open."""
    worth = [claim.evidence for claim in claims if claim.evidence]
    counts: dict[Verdict, int] = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    hold = counts["holds"]
    first = f"Of the paper's {len(claims)} claims {hold} {_do(hold, 'hold')} on this model"
    if hold and all(one == "control not run" for one in worth):
        first += f"; which of them are evidence is not known ({RUN_CONTROL})"
    elif hold:
        yes, none = worth.count("evidence"), worth.count("no evidence")
        first += f": {yes} {_be(yes)} evidence, {none} {_be(none)} no evidence, since random weights do the same"
        if rest := len(worth) - yes - none:
            first += f", and {rest} cannot be told apart"
    said: dict[Verdict, Callable[[int], str]] = {
        "undecided": lambda n: f"{n} {_be(n)} undecided",
        "does not hold": lambda n: f"{n} {_do(n, 'do')} not hold",
        "does not apply": lambda n: f"{n} {_do(n, 'do')} not apply",
        "not measured": lambda n: f"{n} {'was' if n == 1 else 'were'} not measured",
    }
    others = [say(counts[verdict]) for verdict, say in said.items() if counts[verdict]]
    last = ", ".join(others[:-1]) + (" and " if others[1:] else "") + others[-1] if others else ""
    return f"{first}. {last[:1].upper()}{last[1:]}{'.' if last else ''}".strip()


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def _do(count: int, verb: str) -> str:
    return {"do": "does"}.get(verb, f"{verb}s") if count == 1 else verb
