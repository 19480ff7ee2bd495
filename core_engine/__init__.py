"""The engine library: paged attention, one scheduler, one sampler. Knows nothing of HTTP or of the gateway."""
