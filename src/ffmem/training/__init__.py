"""Training of a language model like the paper's: text to tokens, batches by step, a schedule by clock or by steps."""
