"""Shards of parts, until a corpus has more than one."""

from ffmem.corpus.plan import Progress as Progress
from ffmem.corpus.plan import Shard as Shard
from ffmem.corpus.plan import Span as Span
