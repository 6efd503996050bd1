"""Stage 5: from a loss to weights, for any model, in a run that can be interrupted at any moment."""
