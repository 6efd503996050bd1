"""Foundations: errors, files, registries, settings, devices. They know no model and nothing of decoding."""
