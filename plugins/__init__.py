"""The backends that come with Suimon, loaded by the same code as anybody else's plugin."""
