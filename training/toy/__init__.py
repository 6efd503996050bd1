"""How the bundled models are made: their tasks, tokenizer and target. The package uses only its check of answers."""
