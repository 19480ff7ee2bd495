"""Ollama servers as backends of Suimon."""
