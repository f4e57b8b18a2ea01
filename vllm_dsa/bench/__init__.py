"""Measurements of the decode indexer: logits by form, metadata builds, a layer's whole indexer."""
