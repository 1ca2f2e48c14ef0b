"""Packages of other people, as pip would leave them, and a Python in which one is installed."""

import os
import subprocess
import sys
from pathlib import Path


def install(site: Path, modules: dict[str, str], points: dict[str, dict[str, str]]) -> Path:
    """Put a package `toy` into a folder: the code of its files, and its entry points by group and name."""
    about = site / "toy-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in of.items()) for group, of in points.items()]
    (about / "entry_points.txt").write_text("".join(lines))
    for name, code in modules.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(code, "utf-8")
    return site


def python(site: Path, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code where the packages of a folder are installed; what a process has registered cannot change while it runs."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])},
    )
