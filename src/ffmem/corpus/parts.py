"""Parts of a corpus, until there are more than one."""

from ffmem.corpus.corpus import Part as Part
from ffmem.corpus.plan import SENTENCE_BITS as SENTENCE_BITS
