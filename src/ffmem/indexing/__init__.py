"""Making a run: a model and a corpus in, triggers, statistics and values of every memory cell out."""
