"""The index: every cell's triggers and statistics, built in one pass and read from a run folder."""
