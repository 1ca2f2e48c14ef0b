"""Texts as sentences, and sentences as a fixed plan of shards and batches."""
