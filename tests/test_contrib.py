"""A downstream user's path: wheels of Suimon and of contrib's example, in a fresh environment, used there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(path.parent for path in ROOT.glob("contrib/*/pyproject.toml"))


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, text=True, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of(folder: Path, into: Path) -> Path:
    """What git knows of a folder: building leaves files beside what it builds."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=folder).split("\0")
    for name in filter(None, names):
        if (folder / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, into / name)
    return into


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with both wheels, and with links to everything else that is installed here but ours."""
    work = tmp_path_factory.mktemp("downstream")
    for number, folder in enumerate((ROOT, ROOT / "contrib" / "example_backend")):
        source = copy_of(folder, work / f"source{number}")
        build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", work / "wheels")
        run(sys.executable, *build, source, cwd=work)
    home = work / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=work)
    here = Path(sysconfig.get_path("purelib"))
    site = home / here.relative_to(sys.prefix)
    for entry in here.iterdir():
        if not entry.name.startswith(("suimon", "__editable__", "__pycache__")):
            (site / entry.name).symlink_to(entry)
    wheels = sorted((work / "wheels").glob("*.whl"))
    assert [wheel.name.split("-")[0] for wheel in wheels] == ["suimon", "suimon_example"]
    pip = ("-m", "pip", "--python", home / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index")
    run(sys.executable, *pip, *wheels, cwd=work)
    return home


def test_the_plugin_is_found(environment: Path, tmp_path: Path) -> None:
    listed = json.loads(run(environment / "bin" / "suimon", "plugins", cwd=tmp_path))
    assert listed == [
        {
            "name": "suimon_example.backend",
            "version": "0.1.0",
            "distribution": "suimon-example",
            "hooks": ["register_backends"],
        }
    ]


def test_its_tests_pass_there(environment: Path, tmp_path: Path) -> None:
    """Which find the contract's fixtures by themselves, and test the installed code."""
    tests = copy_of(ROOT / "contrib" / "example_backend" / "tests", tmp_path / "tests")
    python = environment / "bin" / "python"
    where = "import suimon.gateway.hookspecs as a, suimon_example as b; print(a.__file__, b.__file__)"
    assert all(Path(path).is_relative_to(environment) for path in run(python, "-c", where, cwd=tmp_path).split())
    said = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, cwd=tmp_path)
    assert " passed" in said and "failed" not in said


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_folder_is_a_distribution_with_an_entry_point_and_tests(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"].startswith("suimon-") and "suimon" in project["dependencies"]
    (module,) = project["entry-points"]["suimon"].values()
    assert (folder / "src" / Path(*module.split("."))).with_suffix(".py").is_file()
    assert any("BackendContract" in path.read_text() for path in folder.glob("tests/test_*.py"))
    assert f"[{folder.name}]({folder.name})" in (ROOT / "contrib" / "README.md").read_text()
