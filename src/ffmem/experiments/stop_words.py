"""English function words, for the question whether a prediction is one of them."""

from __future__ import annotations

LIST = "ffmem-en-1: English articles, pronouns, prepositions, conjunctions, auxiliaries and punctuation"

_WORDS = """
a an the this that these those
i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself
it its itself they them their theirs themselves who whom whose which what
about above across after against along among around as at before behind below beneath beside between beyond by despite
down during except for from in inside into like near of off on onto out outside over past per since through throughout to
toward towards under until up upon via with within without
and but or nor so yet if because although though while whereas unless than when where whether why how
am is are was were be been being have has had having do does did doing can could may might must shall should will would
not no any all both each few more most other some such only own same too very just also then there here once again further
's 't 'm 're 've 'd 'll s t m re ve d ll
""".split()
_MARKS = ", . ; : ! ? ( ) [ ] { } \" ' ` “ ” ‘ ’ - – — ... … / @-@ @,@ @.@ </s> <eos> <|endoftext|> <unk> =".split()

STOP_WORDS = frozenset(_WORDS) | frozenset(_MARKS)
