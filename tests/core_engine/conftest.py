"""Fixtures of the engine's tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """engine_builders.py: builders with defaults, executors with a model that can be foreseen, and the oracle."""
    path = Path(__file__).with_name("engine_builders.py")
    spec = importlib.util.spec_from_file_location("suimon_test_engine_builders", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
