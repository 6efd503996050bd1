"""Drafters' files, ours and those of others: configs, weights, packagings, quantisation, partial vocabularies."""
