"""Compiles the C++ sources with the machine's own compiler, once, into the user's cache.

Knows compilers, flags and files; refuses to know what is in the library. The name of the library is a hash of the
sources, the flags, the compiler and the processor's features, so a changed one of them is another file, and a cache
that is shared by unlike machines serves each its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
# -ffp-contract=fast lets a product and a sum become one instruction; nothing else about rounding is loosened.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT = 600.0  # seconds


class BuildError(Exception):
    """There is no usable compiler; the message says what was tried and what would help."""


def library_path() -> Path:
    """The compiled library, made now if the cache does not have it. Raises BuildError."""
    compiler = _compiler()
    path = _cache() / f"libsuimon-{_fingerprint(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    return path


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    try:
        candidates = [shlex.split(named)] if named else [[name] for name in COMPILERS]
    except ValueError as error:
        raise BuildError(f"CXX is {named!r}, which is not a command: {error}") from error
    for command in candidates:
        found = shutil.which(command[0]) if command else None
        if found:
            return [found, *command[1:]]
    tried = named or ", ".join(COMPILERS)
    raise BuildError(f"no C++ compiler was found (tried {tried}): install one, such as g++ 12, or set CXX")


def _cache() -> Path:
    named = os.environ.get("SUIMON_CACHE")
    base = Path(named or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "suimon")
    try:
        return base.expanduser() / "kernels"
    except RuntimeError as error:  # a user without a home
        raise BuildError(f"there is no place for the compiled library: {error} Set SUIMON_CACHE") from error


def _fingerprint(compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (*_inputs(), *FLAGS, *compiler, _version(compiler), platform.machine(), _features()):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:24]


def _inputs() -> Iterator[str]:
    for path in sorted(SOURCES.iterdir()):
        yield path.name
        yield path.read_text(encoding="utf-8")


def _version(compiler: list[str]) -> str:
    try:
        run = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C++ compiler {compiler[0]} does not run: {error}") from error
    return run.stdout.partition("\n")[0]


def _features() -> str:
    """What ``-march=native`` goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: list[str], path: Path) -> None:
    """Compile beside the cached name and move it there: another process sees a whole library or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logger.info("compiling the CPU kernels with %s, once for this machine", compiler[0])
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as threads:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [
            [*compiler, *FLAGS, "-c", "-o", made, str(source)] for source, made in zip(sources, objects, strict=True)
        ]
        list(threads.map(_run, commands))
        library = Path(folder) / path.name
        _run([*compiler, "-shared", "-pthread", "-o", str(library), *objects])
        os.replace(library, path)


def _run(command: list[str]) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C++ compiler {command[0]} does not run: {error}") from error
    if run.returncode:
        first = next((line for line in run.stderr.splitlines() if "error" in line), run.stderr[:200])
        raise BuildError(f"the CPU kernels do not compile with {command[0]}, which needs C++20: {first}")
