"""Each file here is one experiment, found by itself: it assigns an `Experiment` to `EXPERIMENT`."""
