"""A checkpoint fills exactly its model, or loading fails and says what is wrong with which file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.loader import open_checkpoint
from suimon.core_engine.models import load_model
from suimon.core_engine.models.base import Model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
LAYER = "model.layers.0."


def weights() -> dict[str, torch.Tensor]:
    """The tensors of CONFIG's model as a checkpoint names them, head included."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "model.embed_tokens.weight": (31, 8),
        "lm_head.weight": (31, 8),
        "model.norm.weight": (8,),
        LAYER + "input_layernorm.weight": (8,),
        LAYER + "post_attention_layernorm.weight": (8,),
        LAYER + "self_attn.q_proj.weight": (8, 8),
        LAYER + "self_attn.k_proj.weight": (4, 8),
        LAYER + "self_attn.v_proj.weight": (4, 8),
        LAYER + "self_attn.o_proj.weight": (8, 8),
        LAYER + "mlp.gate_proj.weight": (12, 8),
        LAYER + "mlp.up_proj.weight": (12, 8),
        LAYER + "mlp.down_proj.weight": (8, 12),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


Load = Callable[..., Model]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a checkpoint and load it: ``without`` drops tensors, ``extra`` adds or replaces, options change CONFIG."""

    def write_and_load(*, without: tuple[str, ...] = (), extra: dict[str, torch.Tensor] | None = None, **options: Any):
        tensors = {name: tensor for name, tensor in (weights() | (extra or {})).items() if name not in without}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | options))
        return load_model(open_checkpoint(tmp_path), torch.bfloat16)

    return write_and_load


def test_every_parameter_is_filled_and_merged_ones_in_order(load: Load) -> None:
    model, stored = load(without=("lm_head.weight",)), weights()
    layer = model.get_submodule("layers.0")
    qkv = torch.cat([stored[f"{LAYER}self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(layer.self_attn.qkv_proj.weight, qkv.bfloat16())
    gate_up = torch.cat([stored[f"{LAYER}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(layer.mlp.gate_up_proj.weight, gate_up.bfloat16())
    assert torch.equal(model.norm.weight, stored["model.norm.weight"]) and model.norm.weight.dtype == torch.float32
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())


def test_a_tied_head_in_the_file_is_not_used(load: Load) -> None:
    model = load()
    assert torch.equal(model.lm_head.weight, weights()["model.embed_tokens.weight"].bfloat16())
    assert model.lm_head.weight is model.embed_tokens.weight


def test_an_untied_head_is_used(load: Load) -> None:
    assert torch.equal(load(tie_word_embeddings=False).lm_head.weight, weights()["lm_head.weight"].bfloat16())


def test_an_untied_head_that_is_missing_is_an_error(load: Load) -> None:
    with pytest.raises(ModelLoadError, match=r"missing lm_head\.weight; unused none"):
        load(without=("lm_head.weight",), tie_word_embeddings=False)


def test_missing_and_unused_tensors_are_both_named(load: Load, tmp_path: Path) -> None:
    stray = {LAYER + "self_attn.sinks": torch.zeros(2), LAYER + "self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    with pytest.raises(ModelLoadError) as caught:
        load(without=(LAYER + "mlp.up_proj.weight",), extra=stray)
    message = str(caught.value)
    assert str(tmp_path) in message and "LlamaForCausalLM" in message
    assert f"missing {LAYER}mlp.up_proj.weight; unused {LAYER}self_attn.sinks." in message


def test_long_lists_are_cut_short(load: Load) -> None:
    with pytest.raises(ModelLoadError, match=r"and \d+ more") as caught:
        load(num_hidden_layers=400)
    assert len(str(caught.value)) < 2000


def test_a_wrong_shape_names_tensor_and_shapes(load: Load) -> None:
    name = LAYER + "self_attn.k_proj.weight"
    with pytest.raises(ModelLoadError, match=r"k_proj\.weight has shape \(8, 8\), its config says \(4, 8\)"):
        load(extra={name: torch.zeros(8, 8)})


@pytest.mark.parametrize("nested", [False, True])
def test_quantized_checkpoints_are_refused_by_method(load: Load, nested: bool) -> None:
    quantization = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    with pytest.raises(UnsupportedModelError, match="awq"):
        load(**({"text_config": quantization} if nested else quantization))


def test_a_config_without_architecture_is_an_error(load: Load) -> None:
    with pytest.raises(ModelLoadError, match="architectures"):
        load(architectures=[])


def test_image_and_text_gemma_serves_its_text_half(tmp_path: Path) -> None:
    """The decoder is found at its old and its new place; the vision tower stays in the file."""
    transformers = pytest.importorskip("transformers")
    sizes = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
    text = transformers.Gemma3TextConfig(**sizes, head_dim=8, initializer_range=0.3)
    oracle = transformers.Gemma3ForCausalLM(text).eval()
    prompt = torch.tensor([[5, 9, 30, 2]])
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text.to_dict(),
    }
    for prefix in ("language_model.model.", "model.language_model."):
        tensors = {name.replace("model.", prefix, 1): tensor.clone() for name, tensor in oracle.state_dict().items()}
        del tensors["lm_head.weight"]
        tensors["vision_tower.patch.weight"] = torch.zeros(2)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = load_model(open_checkpoint(tmp_path), torch.float32)
        embedded = model.embed(prompt[0])
        torch.testing.assert_close(embedded, oracle.model.embed_tokens(prompt)[0].detach())
        assert model.config.vocab_size == 31
