"""What the pages say is so: tests they name exist, their links lead somewhere, their flags and examples are accepted.

That the example in the plugin contract runs is in tests/gateway/test_hookspecs.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
PAGES += [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "plugins" / "README.md",
    *sorted(ROOT.glob("contrib/**/README.md")),
]
WITH_TESTS = [ROOT / "docs" / "known-bugs.md", ROOT / "SECURITY.md"]
NOT_BUILT = "not built yet: refused by name"

by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def table_rows(page: Path, label: str) -> list[list[str]]:
    """Cells of the rows whose first one is a label of this form."""
    lines = [line.strip("|").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [row for row in cells if re.fullmatch(label, row[0])]


def named_tests(text: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", text)


def exists(node_id: str) -> bool:
    path, _, name = node_id.partition("::")
    if not (ROOT / path).is_file():
        return False
    body = ast.parse((ROOT / path).read_text()).body
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in body)


@pytest.mark.parametrize("page", WITH_TESTS, ids=lambda page: page.name)
def test_every_named_test_exists(page: Path) -> None:
    named = named_tests(page.read_text())
    assert len(named) > 30
    assert [node_id for node_id in named if not exists(node_id)] == []


@pytest.mark.parametrize(
    ("page", "label", "at_least"),
    [(WITH_TESTS[0], r"B\d\d", 50), (WITH_TESTS[1], r"\d+", 20), (WITH_TESTS[1], r"R\d+", 6)],
    ids=["bugs", "classes", "promises"],
)
def test_every_row_names_a_test_and_stands_once(page: Path, label: str, at_least: int) -> None:
    rows = table_rows(page, label)
    assert len(rows) >= at_least
    assert [row[0] for row in rows if len(row) != 4 or not named_tests(row[3])] == []
    labels = [row[0] for row in rows]
    assert sorted(labels) == sorted(set(labels))


def test_labels_in_tests_are_in_the_table() -> None:
    listed = {row[0] for row in table_rows(WITH_TESTS[0], r"B\d\d")} | {
        row[0] for row in table_rows(WITH_TESTS[1], r"R\d+")
    }
    used = {
        (label, path.name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for label in re.findall(r"\b(?:B\d\d|R\d\d?)\b", path.read_text())
        if path != Path(__file__)
    }
    assert {(label, name) for label, name in used if label not in listed} == set()


@by_name
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Every flag that a command of ``suimon`` knows."""
    commands = ("serve", "chat", "models", "plugins", "check-config")
    helps = [[sys.executable, "-m", "suimon.gateway.cli", command, "--help"] for command in commands]
    texts = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in helps]
    return set(re.findall(r"--[a-z][a-z-]*", "".join(texts)))


@by_name
def test_flags_exist(page: Path, flags: set[str]) -> None:
    """Those in code that does not run another program with flags of its own."""
    text = re.sub(r"^.*\b(pip|pytest|mypy|ruff|docker|npm)\b.*$", "", page.read_text(), flags=re.M)
    named = {flag for code in re.findall(r"`[^`]+`", text) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code)}
    assert named - flags - {"--version"} == set()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_configuration_in_the_readme_is_accepted(tmp_path: Path) -> None:
    found = blocks(ROOT / "README.md", "toml")
    assert found
    for number, block in enumerate(found):
        tomllib.loads(block)
        (tmp_path / f"{number}.toml").write_text(block)
        command = [
            sys.executable,
            "-m",
            "suimon.gateway.cli",
            "check-config",
            "--config",
            str(tmp_path / f"{number}.toml"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@by_name
def test_python_in_the_pages_is_python_and_imports_what_is_there(page: Path) -> None:
    import importlib

    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)
