"""The OpenAI wire format: bodies to GenerateRequest, Deltas to bytes, errors to their shape."""
