"""Torch's weight files, before they are opened: what they hold is no more than they are long."""

from __future__ import annotations

import zipfile
from pathlib import Path

from ffmem.errors import ModelError
from ffmem.text import visible


def bytes_of_archive(path: Path) -> int:
    """A torch file's size; an error where it is an archive that unpacks to more than that, which torch never writes."""
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
        if unpacked > size:
            raise ModelError(
                f"{visible(str(path))}: expected weights that are not compressed, found {size:,} bytes "
                f"that unpack to {unpacked:,}"
            )
    return size
