"""Who may import whom, and what may be written nowhere. The rules are docs/architecture.md, section 1."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "core_engine", "kernels", "plugins")

# What both sides of the process boundary share: one waiting order, one estimate of when to come back.
SHARED = ("suimon.core_engine.request_queue", "suimon.core_engine.drain_rate")
# package -> prefixes of suimon.* that it may import.
ALLOWED = {
    "kernels": ("suimon.kernels",),
    "core_engine": ("suimon.core_engine", "suimon.kernels"),
    "gateway": ("suimon.gateway", *SHARED),
    "plugins": ("suimon.plugins", "suimon.core_engine", "suimon.kernels", "suimon.gateway.hookspecs"),
}
# Third-party packages that core_engine may import only inside functions: the engine runs without them.
LAZY_IN_ENGINE = {"gguf", "llguidance", "tokenizers", "transformers", "huggingface_hub", "jinja2"}
MSGSPEC_IN_ENGINE = {"messages.py"}
GGUF_MODULES = [path.name for path in (ROOT / "core_engine" / "loader").glob("gguf*.py")]
DANGEROUS_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml"}
DANGEROUS_CALLS = {"eval", "exec", "torch.load", "compile"}


def sources(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if ".venv" not in path.parts)


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Dotted names a file imports; what is under ``if TYPE_CHECKING`` does not run and does not count."""
    body = ast.parse(path.read_text()).body
    nodes = _run_at_import(body) if top_level_only else _run_ever(body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the module in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The statements outside functions."""
    for node in body:
        if _is_for_type_checkers(node):
            continue
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "handlers", "finalbody"):
                yield from _run_at_import(getattr(node, name, []))


def _run_ever(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if not _is_for_type_checkers(node):
            yield from ast.walk(node)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_the_design_allows(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imports(path)
        if name.startswith("suimon.") and not name.startswith(ALLOWED[package])
    ]
    assert wrong == []


@pytest.mark.parametrize("module", SHARED)
def test_what_the_gateway_shares_with_the_engine_needs_nothing_of_ours(module: str) -> None:
    path = ROOT / module.removeprefix("suimon.").replace(".", "/")
    assert [n for n in imports(path.with_suffix(".py")) if n.startswith("suimon")] == []


def test_the_engine_starts_without_optional_packages() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name} at import time"
        for path in sources("core_engine")
        if path.name != "template_worker.py"  # a process of its own, whose job is jinja2
        for name in imports(path, top_level_only=True)
        if name.split(".")[0] in LAZY_IN_ENGINE
    ]
    assert wrong == []


def test_only_the_process_boundary_of_the_engine_knows_msgspec() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources("core_engine")
        if path.name not in MSGSPEC_IN_ENGINE and any(n.split(".")[0] == "msgspec" for n in imports(path))
    ]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_that_can_run_foreign_code(package: str) -> None:
    wrong = []
    for path in sources(package):
        wrong += [f"{path}: {n}" for n in imports(path) if n.split(".")[0] in DANGEROUS_MODULES]
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        wrong += [f"{path}:{c.lineno}: {ast.unparse(c.func)}" for c in calls if ast.unparse(c.func) in DANGEROUS_CALLS]
        wrong += [f"{path}:{k.lineno}: shell=True" for k in _true_keywords(path, "shell")]
    assert wrong == []


def _true_keywords(path: Path, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == name and ast.unparse(node.value) == "True":
            yield node.value


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in sources(package)
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


@pytest.mark.parametrize(
    "folder", ["gateway", "gateway/openai", "core_engine", "core_engine/loader", "kernels", "plugins"]
)
def test_the_architecture_page_names_every_module(folder: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page[page.index("## 2. ") : page.index("## 3. ")].replace("gguf*.py", " ".join(GGUF_MODULES))
    modules = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if not re.search(rf"\b{re.escape(name)}", tree)} == set()


def test_every_folder_with_modules_is_packaged() -> None:
    declared = set(re.findall(r'^    "(suimon\.[a-z_.]+)",$', (ROOT / "pyproject.toml").read_text(), re.M))
    found = {
        "suimon." + ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert declared == found


def test_test_files_have_unique_names() -> None:
    """importlib mode keeps them apart, but a failure report that shows only the name would not."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
