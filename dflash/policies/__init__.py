"""How many drafts a block verifies, and with how many threads a CPU decodes: decisions that follow measured time."""
