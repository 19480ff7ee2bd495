"""Fixtures of the engine's tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import tempfile
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


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """The folder ``models`` of llama.cpp: vocabularies with texts and their token ids, and chat templates of real models.

    It comes from a source distribution (77 MB, nothing is built), fetched once and then kept in the user's cache.
    """
    from suimon.core_engine.loader.cache import default_cache_dir

    folder = default_cache_dir() / "tests" / "llama-cpp-python-0.3.36-models"
    if not folder.is_dir():
        fetch_llama_cpp_models(folder)
    return folder


def fetch_llama_cpp_models(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = "pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python"
        subprocess.run(
            [sys.executable, "-m", *command.split(), "--dest", scratch, "llama-cpp-python==0.3.36"], check=True
        )
        inside = "llama_cpp_python-0.3.36/vendor/llama.cpp/models/"
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
            members = [member for member in archive if member.name.startswith(inside)]
            archive.extractall(scratch, members, filter="data")
        try:
            (Path(scratch) / inside).rename(folder)
        except OSError:  # another test process was faster
            if not folder.is_dir():
                raise
