"""Decisions that follow measured times: how many drafts a block verifies, and how many threads a CPU decodes with."""
