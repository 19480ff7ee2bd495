"""Which format a path is, and what is said when it is none."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from suimon.core_engine.assembly import build_engine
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.loader import open_checkpoint
from suimon.core_engine.loader.gguf_checkpoint import GGUFCheckpoint
from suimon.core_engine.prompts import load_text_side


def test_folder_with_one_gguf_is_that_file(demo_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(demo_gguf)
    (tmp_path / "README.md").write_text("a model")
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert checkpoint.path == tmp_path / "model.gguf"


def test_folder_with_several_gguf_files_asks_which(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"several GGUF files; name one of them: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused_and_never_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).symlink_to(tmp_path / "opened.fifo")
    os.mkfifo(tmp_path / "opened.fifo")  # a reader would wait for ever
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedModelError, match=f"{name}: pickled weights are not read"):
            open_checkpoint(path)


def test_folder_with_nothing_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"looked for model\.safetensors\.index\.json .* \.gguf file"):
        open_checkpoint(tmp_path)


def test_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        open_checkpoint(tmp_path / "nothing")


def test_other_file_is_not_taken_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a model, but longer than a header")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "notes.txt")


def test_several_loose_safetensors_files_are_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("one.safetensors", "two.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"not exactly one .* \(one\.safetensors, two\.safetensors\)"):
        open_checkpoint(tmp_path)


def forbid_reading(monkeypatch: pytest.MonkeyPatch, forbidden: Path) -> None:
    """As the file's permissions would, which do not hold for root."""
    real_open, real_list = io.open, os.listdir

    def guarded_open(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | Path) and Path(file) == forbidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real_open(file, *args, **kwargs)

    def guarded_list(path: Any = ".") -> list[str]:
        if Path(path) == forbidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return list(real_list(path))

    monkeypatch.setattr(io, "open", guarded_open)
    monkeypatch.setattr(os, "listdir", guarded_list)


@pytest.mark.parametrize("name", ["", "model.safetensors", "config.json"])
def test_a_file_that_may_not_be_read_is_named_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"x")
    forbid_reading(monkeypatch, tmp_path / name)
    with pytest.raises(ModelLoadError, match=f"{tmp_path / name}: cannot be read: Permission denied"):
        build_engine(EngineConfig(model="m", device="cpu"), str(tmp_path))


def test_a_tokenizer_that_may_not_be_read_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    forbid_reading(monkeypatch, tmp_path / "tokenizer.json")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: cannot be read: Permission denied"):
        load_text_side(str(tmp_path), None)


def test_a_chat_template_that_was_chosen_and_is_none_does_not_load(tmp_path: Path) -> None:
    """A model's own, which its user cannot mend, costs only the chats."""
    broken = {"chat_template": "{% for %}"}
    (tmp_path / "tokenizer.json").write_text(
        '{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}'
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(broken))
    _, renderer = load_text_side(str(tmp_path), None)
    renderer.close()
    with pytest.raises(ModelLoadError, match="chat template cannot be compiled"):
        load_text_side(str(tmp_path), broken["chat_template"])
    _, renderer = load_text_side(str(tmp_path), "{{ messages }}")
    renderer.close()
