"""Training a drafter: data, loss, trainer and evaluation."""
