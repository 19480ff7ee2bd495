"""Fixtures of the plugins' tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"suimon_test_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def wire() -> ModuleType:
    """scripted_upstream.py: a server that does what a script says."""
    return _load(Path(__file__).with_name("scripted_upstream.py"))


@pytest.fixture(scope="session")
def gateway_tests() -> ModuleType:
    """The gateway tests' helpers: a scripted backend, and a real server in front of any backend."""
    return _load(Path(__file__).parent.parent / "gateway" / "conftest.py")


@pytest.fixture(scope="session")
def trtllm() -> ModuleType:
    """fake_tensorrt_llm.py: a stand-in for tensorrt_llm that knows what the contract names."""
    return _load(Path(__file__).with_name("fake_tensorrt_llm.py"))
