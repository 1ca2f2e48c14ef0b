"""Processes that read text, until there is one kind of them."""

from ffmem.corpus import workers
from ffmem.corpus.workers import cores as cores


def get_ready(count: int) -> None:
    workers.get_ready()
