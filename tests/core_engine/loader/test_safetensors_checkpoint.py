"""Safetensors folders as transformers writes them, and what happens when one is not whole or not honest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.loader import open_checkpoint
from suimon.core_engine.loader.end_tokens import config_end_tokens
from suimon.core_engine.loader.safetensors import SafetensorsCheckpoint

INDEX = "model.safetensors.index.json"


def make_llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return make_llama()


@pytest.fixture
def single(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(shards(tmp_path / "sharded")) >= 3
    return tmp_path / "sharded"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_json(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**value, **changes}))


def assert_holds(path: Path, model: LlamaForCausalLM) -> None:
    checkpoint, expected = open_checkpoint(path), model.state_dict()
    assert checkpoint.tensor_names == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(checkpoint.tensor(name, torch.float32), tensor, rtol=0, atol=0)
        assert checkpoint.tensor(name, torch.bfloat16).dtype == torch.bfloat16


def test_single_file(single: Path, model: LlamaForCausalLM) -> None:
    assert_holds(single, model)
    assert_holds(single / "model.safetensors", model)
    checkpoint = open_checkpoint(single)
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]


def test_sharded(sharded: Path, model: LlamaForCausalLM) -> None:
    assert_holds(sharded, model)
    assert_holds(shards(sharded)[1], model)


def test_missing_shard_is_named(sharded: Path) -> None:
    lost = shards(sharded)[1]
    lost.unlink()
    with pytest.raises(ModelLoadError, match=f"{lost.name}: this file of the model is missing"):
        open_checkpoint(sharded)


def test_the_index_decides_file_by_file(sharded: Path, model: LlamaForCausalLM) -> None:
    strangers = {name: torch.full_like(tensor, 7.0) for name, tensor in model.state_dict().items()}
    save_file(strangers, sharded / "model.safetensors")
    save_file({**strangers, "extra": torch.zeros(1)}, sharded / "consolidated.safetensors")
    assert_holds(sharded, model)


def test_the_index_decides_tensor_by_tensor(sharded: Path, model: LlamaForCausalLM) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    first = shards(sharded)[0]
    stale = {
        name: torch.full_like(model.state_dict()[name], 7.0) for name, file in weight_map.items() if file != first.name
    }
    save_file({**load_file(first), **stale, "unlisted": torch.zeros(1)}, first)
    assert_holds(sharded, model)


def test_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    first = shards(sharded)[0]
    tensors = load_file(first)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors or {"other": torch.zeros(1)}, first)
    with pytest.raises(ModelLoadError, match=f"{first.name}: has no tensor '{name}'"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "sub/x.safetensors", "model.bin", 7]
)
def test_index_may_only_name_files_beside_it(sharded: Path, file: object) -> None:
    (sharded.parent / "secret.safetensors").write_bytes(shards(sharded)[0].read_bytes())
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit_json(sharded / INDEX, weight_map={**weight_map, "model.norm.weight": file})
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' is given to"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "{", "[" * 200_000, b"\xff\xfe\x00"], ids=repr
)
def test_index_that_is_none_is_an_error(sharded: Path, text: str | bytes) -> None:
    (sharded / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelLoadError, match=INDEX):
        open_checkpoint(sharded)


@pytest.mark.parametrize("keep", [0, 5, 100, 3000])
def test_truncated_file_is_named(single: Path, keep: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: not a sound safetensors file"):
        open_checkpoint(single)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_present", [True, False])
def test_head_is_there_when_the_file_has_it(tied: bool, head_present: bool, tmp_path: Path) -> None:
    # What to make of it is the model's business: the checkpoint neither drops a head nor invents one.
    model = make_llama(tied=tied)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    head = torch.randn(64, 32)
    save_file({**tensors, **({"lm_head.weight": head} if head_present else {})}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in checkpoint.tensor_names) is head_present
    if head_present:
        assert torch.equal(checkpoint.tensor("lm_head.weight", torch.float32), head)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([5, 6], 2, {5, 6, 2}),
        (2, 2, {2}),
        (None, [3, 4], {3, 4}),
        ([5, 6], None, {5, 6}),
        (None, None, set()),
        ([True, -1, "7", 8], 2.0, {8}),
    ],
)
def test_every_end_token_of_both_configs_counts(single: Path, generation: Any, config: Any, expected: set[int]) -> None:
    (single / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    edit_json(single / "config.json", eos_token_id=config)
    checkpoint = open_checkpoint(single)
    assert config_end_tokens(checkpoint.generation_config, checkpoint.config) == expected


def test_generation_config_may_be_missing(single: Path) -> None:
    (single / "generation_config.json").unlink()
    assert open_checkpoint(single).generation_config == {}


def test_quantized_tensor_is_refused_by_name(single: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, 32, dtype=torch.int8)
    save_file(tensors, single / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' is stored as torch\.int8"
    ):
        open_checkpoint(single).tensor("model.layers.0.mlp.up_proj.weight", torch.float32)


def test_tensors_survive_the_file(single: Path, model: LlamaForCausalLM) -> None:
    tensor = open_checkpoint(single).tensor("model.norm.weight", torch.float32)
    file = single / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(tensor, model.state_dict()["model.norm.weight"])


def test_content_hash_follows_weights_and_config(single: Path) -> None:
    before = open_checkpoint(single).content_hash
    assert open_checkpoint(single).content_hash == before
    edit_json(single / "config.json", rms_norm_eps=0.5)
    other_config = open_checkpoint(single).content_hash
    tensors = load_file(single / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, single / "model.safetensors")
    assert len({before, other_config, open_checkpoint(single).content_hash}) == 3


def test_config_is_needed(single: Path) -> None:
    (single / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read"):
        open_checkpoint(single)
