"""How the bundled models are made: their tasks, tokenizer and target. Nothing else in ``training`` imports it."""
