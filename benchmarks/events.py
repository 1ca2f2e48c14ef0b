"""What a run noted in its log."""

from __future__ import annotations

import json
from typing import Any

from ffmem.run.reader import Index


def events(index: Index, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind, in order: `finished` when all was read, `written` when the run was."""
    lines = (index.folder.path / "log.jsonl").read_text("utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]
