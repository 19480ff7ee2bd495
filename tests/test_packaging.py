"""The wheel that users install holds every module and data file, and its modules import without the source tree."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "core_engine", "kernels", "plugins")

IMPORT_ALL = """
import importlib, json, pathlib, sys
site = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(site))
for path in sorted((site / "suimon").rglob("*.py")):
    name = ".".join(path.relative_to(site).with_suffix("").parts).removesuffix(".__init__")
    if name.endswith("__main__"):
        continue
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to(site), (name, module.__file__)
    print(name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # Built from a copy: setuptools leaves build/ and egg-info beside what it builds.
    tree = tmp_path_factory.mktemp("tree")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(tree)]
    subprocess.run(command, check=True, capture_output=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_holds_every_source_and_data_file(wheel: zipfile.ZipFile) -> None:
    packed = set(wheel.namelist())
    missing = [
        f"suimon/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".md", ".cpp", ".h"} or path.name == "py.typed"
        if f"suimon/{path.relative_to(ROOT)}" not in packed
    ]
    assert missing == []


def test_every_module_of_the_wheel_imports(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    # -I and no site-packages .pth of the editable install: only what the wheel brought can answer.
    script = (
        f"import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n{IMPORT_ALL}"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "suimon.gateway.hookspecs" in done.stdout and "suimon.core_engine.engine" in done.stdout
