"""A model at work: how its memories build one prediction, and what happens when they are changed."""
