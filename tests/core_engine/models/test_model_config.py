"""Hugging Face config keys, old and new, to ModelConfig; what cannot be served is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.models import ARCHITECTURES, FALLBACK, model_class
from suimon.core_engine.models.base import DecoderModel
from suimon.core_engine.models.config import ModelConfig


def read(architecture: str, **options: Any) -> ModelConfig:
    sizes = {
        "architectures": [architecture],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    family = model_class(sizes)
    assert issubclass(family, DecoderModel)
    return family.read_config(sizes | options)


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.sliding_window for layer in config.layers]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_row_of_the_table_names_a_class(architecture: str) -> None:
    assert read(architecture).architecture == architecture


def test_head_size_and_key_value_heads_have_their_usual_defaults() -> None:
    config = read("LlamaForCausalLM", num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads, config.attention_scale) == (16, 4, 0.25)
    assert read("LlamaForCausalLM", head_dim=24).head_dim == 24
    assert read("Qwen3ForCausalLM").head_dim == 128


@pytest.mark.parametrize(
    "options",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_old_and_new_rope_keys_mean_the_same(options: dict[str, Any]) -> None:
    (rope,) = read("LlamaForCausalLM", **options).ropes
    assert (rope.kind, rope.theta, rope.factor, rope.rotary_dim) == ("linear", 5e5, 2.0, 16)


def test_partial_rotation() -> None:
    (rope,) = read("LlamaForCausalLM", partial_rotary_factor=0.5).ropes
    assert rope.rotary_dim == 8


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "spiral"])
def test_rope_scaling_that_is_not_served_is_named(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{kind}' is not supported; known: default, linear"):
        read("LlamaForCausalLM", rope_scaling={"rope_type": kind, "factor": 2.0})


def test_gemma3_rotates_its_two_kinds_of_layers_apart() -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    for options in (old, new):
        config = read("Gemma3ForCausalLM", sliding_window_pattern=2, sliding_window=512, **options)
        assert windows(config) == [512, None, 512, None]
        local, everywhere = config.layers[0].rope, config.layers[1].rope
        assert (local.kind, local.theta) == ("default", 1e4)
        assert (everywhere.kind, everywhere.theta, everywhere.factor) == ("linear", 1e6, 8.0)


def test_windows_of_the_families() -> None:
    assert windows(read("LlamaForCausalLM", sliding_window=5)) == [None] * 4
    assert windows(read("MistralForCausalLM")) == [4096] * 4
    assert windows(read("MistralForCausalLM", sliding_window=None)) == [None] * 4
    assert windows(read("Qwen2ForCausalLM", sliding_window=5)) == [None] * 4
    options = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
    assert windows(read("Qwen2ForCausalLM", **options)) == [None, None, None, 5]
    assert windows(read("Gemma2ForCausalLM", sliding_window=5)) == [5, None, 5, None]
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(read("Gemma3ForCausalLM", sliding_window=5, layer_types=kinds)) == [None, 5, None, 5]


def test_layers_of_an_unknown_type_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        read("Qwen3ForCausalLM", layer_types=["chunked_attention"] * 4)


def test_gemma_caps_may_be_switched_off() -> None:
    assert read("Gemma2ForCausalLM").final_soft_cap == 30.0
    assert read("Gemma2ForCausalLM", final_logit_softcapping=None).final_soft_cap is None
    assert read("Gemma3ForCausalLM").attention_soft_cap is None
    assert read("Gemma2ForCausalLM", query_pre_attn_scalar=16).attention_scale == 0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": None}, "vocab_size must be a number, got None"),
        ({"hidden_size": "64"}, "hidden_size must be a number, got '64'"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1, got 0"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read("LlamaForCausalLM", **options)


def test_an_architecture_that_is_not_in_the_table_goes_to_the_fallback() -> None:
    found = model_class({"architectures": ["GPTNeoXForCausalLM"]})
    assert f"{found.__module__}:{found.__name__}" == FALLBACK
