"""Files of drafters, ours and published ones: configs, weights, packagings, quantisation, vocabularies."""
