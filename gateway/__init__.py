"""The gateway: HTTP in, SSE out, and the contract by which backends plug in."""
