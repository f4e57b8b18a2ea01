"""The step loop of an engine: trace, paged cache, continuous batching and speculative decode."""
