"""plugins/README.md does what it says: its files are written, its commands run, its outputs compared, in its order.

A code block whose first line names a file is that file (a ``diff`` changes it); in a ``console`` block a line with a $
is a command and the lines after it are its output, with ``...`` for what varies. Three things differ from what a reader
does: the port is a free one, ``pip`` installs beside the environment instead of into it, and the server is stopped when
the next one starts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "plugins" / "README.md"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.M | re.S)
LINES = 25  # of the first plugin and of what makes it installable


def matches(output: str, expected: str) -> bool:
    """Whether the output is the expected one; each ``...`` stands for any text, on a line of its own for any lines."""
    expected = re.sub(r"^\.\.\.\n", "...", expected, flags=re.M)
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, output.strip(), re.S) is not None


def changed(source: str, diff: str) -> str:
    """``source`` after a diff of one place: lines with a space, a plus or a minus in front."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if line[0] in " -")
    after = "\n".join(line[1:] for line in lines if line[0] in " +")
    assert source.count(before) == 1, f"the diff does not fit:\n{diff}"
    return source.replace(before, after)


class Reader:
    """Somebody who follows the page in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: subprocess.Popen[str] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = str(free.getsockname()[1])
        site = folder.parent / "site"
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = os.environ | {
            "SUIMON_PORT": self.port,
            "PYTHONPATH": str(site),
            "PATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(site),
        ]

    def read(self, page: str) -> int:
        """Do everything; the number of commands run."""
        commands = 0
        for kind, name, body in BLOCK.findall(page):
            if kind == "console":
                for command, output in transcript(body):
                    self.run(command, output)
                    commands += 1
            elif kind == "diff":
                (self.folder / name).write_text(changed((self.folder / name).read_text(), body))
            else:
                assert name, f"a block of {kind} that names no file"
                (self.folder / name).write_text(body)
        return commands

    def run(self, command: str, expected: str) -> None:
        words = shlex.split(command.replace(":8000", f":{self.port}"))
        expected = expected.replace(":8000", f":{self.port}")
        if words[:2] == ["suimon", "serve"]:
            found = self.serve(words)
        else:
            if words[:2] == ["pip", "install"]:
                words = [*self.install, *words[2:]]
            found = self.output(words)
        assert matches(found, expected), f"$ {command}\n{found}\n--- the page says:\n{expected}"

    def output(self, words: list[str]) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, text=True, capture_output=True, timeout=240, check=False
        )
        return done.stdout + (done.stderr if done.returncode else "")

    def serve(self, words: list[str]) -> str:
        """Start it; what it printed up to its ready line."""
        self.stop()
        self.server = subprocess.Popen(
            words, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self.server.stdout is not None
        printed = ""
        for line in self.server.stdout:
            printed += line
            if line.startswith("Suimon is ready"):
                threading.Thread(target=self.server.stdout.read, daemon=True).start()  # a full pipe would stop it
                break
        return printed

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            self.server.wait(60)


def transcript(body: str) -> Iterator[tuple[str, str]]:
    """(command, output) of a console block."""
    for entry in re.split(r"^\$ ", body, flags=re.M)[1:]:
        command, _, output = entry.partition("\n")
        yield command, output


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's requests are made with curl")
def test_everything_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "parrot"
    folder.mkdir()
    reader = Reader(folder)
    try:
        assert reader.read(PAGE.read_text()) >= 13
    finally:
        reader.stop()


def test_the_first_step_is_as_short_as_we_say() -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    plugin = next(body for _, name, body in blocks if name == "parrot.py")
    package = next(body for _, name, body in blocks if name == "pyproject.toml")
    code = [line for line in (plugin + package).splitlines() if line.strip()]
    assert len(code) <= LINES


def test_the_comparison_can_fail() -> None:
    assert matches('{"a":1,"b":2}\n', "{...2}")
    assert not matches('{"a":1,"b":2}', "{...3}")
    assert not matches("", "something")
    assert changed("a\nb\nc\n", " a\n-b\n+d\n c\n") == "a\nd\nc\n"
