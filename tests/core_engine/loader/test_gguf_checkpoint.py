"""GGUFCheckpoint against transformers: a model written as llama.cpp's converter would must come back as it was.

The oracle for names is the gguf package's table; for the config, that transformers computes the same logits from it.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.loader import open_checkpoint
from suimon.core_engine.loader.gguf import read_header
from suimon.core_engine.loader.gguf_checkpoint import GGUFCheckpoint
from suimon.core_engine.loader.gguf_config import translate_config, translate_generation_config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.01 * i for i in range(16)],
    "long_factor": [2.0 + 0.1 * i for i in range(16)],
    "original_max_position_embeddings": 256,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
PERIOD_3 = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

# case -> (GGUF architecture, transformers model type, config)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", "llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131_072}),
    "llama yarn": ("llama", "llama", {"rope_parameters": YARN}),
    "llama linear": ("llama", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "mistral": ("llama", "mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", "qwen2", {"head_dim": 16}),
    "qwen3": ("qwen3", "qwen3", {}),
    "gemma": ("gemma", "gemma", {}),
    "gemma2": ("gemma2", "gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 20.0}),
    "gemma3": ("gemma3", "gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 32, "num_hidden_layers": 7}),
    "gemma3 linear": (
        "gemma3",
        "gemma3_text",
        {"sliding_window": 8, "query_pre_attn_scalar": 32, "rope_parameters": GEMMA3_ROPE},
    ),
    "gemma3 pattern": (
        "gemma3",
        "gemma3_text",
        {"sliding_window": 8, "query_pre_attn_scalar": 32, "layer_types": PERIOD_3},
    ),
    "phi3": ("phi3", "phi3", {"head_dim": 16, "sliding_window": 8}),
    "phi3 partial rotary": (
        "phi3",
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3 longrope": ("phi3", "phi3", {"num_attention_heads": 2, "rope_parameters": LONG_ROPE}),
}


def make_model(model_type: str, config: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    options = {**SIZES, **config}
    options.setdefault("tie_word_embeddings", model_type.startswith("gemma"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options)).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases begin as ones or zeros: nothing could tell them apart
            torch.nn.init.uniform_(parameter.data, 0.1, 0.5)
    return model


def llama3_factors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """The loop of Meta's reference code, as factors of wavelength."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (low / wavelength * rope["low_freq_factor"] - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What a converter does to q and k of a Llama, so that rotation pairs are neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array(llama3_factors(rope, config.head_dim), np.float32))
    if kind == "longrope":
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


def write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "layer_types", None) == PERIOD_3:
        writer.add_sliding_window_pattern(3)
    write_rope(writer, config)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def write_tensors(writer: gguf.GGUFWriter, architecture: str, model: PreTrainedModel) -> None:
    config = model.config
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        module = name.split(".")[-2]
        if architecture == "llama" and module in heads:
            values = permute(values, heads[module])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, values)


def write_gguf(path: Path, architecture: str, model: PreTrainedModel) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, model.config)
    write_tensors(writer, architecture, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rebuilt(checkpoint: GGUFCheckpoint) -> PreTrainedModel:
    """A transformers model from nothing but the checkpoint's config and tensors."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config)).float().eval()
    tensors = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.tensor_names}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if checkpoint.config["tie_word_embeddings"] else set())
    model.tie_weights()
    return model


@pytest.mark.parametrize("case", CASES)
def test_model_comes_back_as_it_was(case: str, tmp_path: Path) -> None:
    architecture, model_type, config = CASES[case]
    model = make_model(model_type, config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", architecture, model))
    assert isinstance(checkpoint, GGUFCheckpoint)

    expected = model.state_dict()
    tied = model.config.tie_word_embeddings
    assert checkpoint.tensor_names == expected.keys() - ({"lm_head.weight"} if tied else set())
    for name in checkpoint.tensor_names:
        torch.testing.assert_close(checkpoint.tensor(name, torch.float32), expected[name], rtol=0, atol=1e-7)

    assert checkpoint.config["architectures"] == [type(model).__name__]
    assert checkpoint.config["rms_norm_eps"] == model.config.rms_norm_eps
    tokens = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(rebuilt(checkpoint)(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_llama3_scaling_is_recognised_and_other_tables_are_handed_over(tmp_path: Path) -> None:
    model = make_model("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131_072})
    path = write_gguf(tmp_path / "llama3.gguf", "llama", model)
    assert open_checkpoint(path).config["rope_parameters"] == LLAMA3

    factors = np.array(llama3_factors(LLAMA3, 32), np.float32)
    other = factors * np.linspace(1.0, 1.5, 16, dtype=np.float32)
    path.write_bytes(path.read_bytes().replace(factors.tobytes(), other.tobytes()))
    rope = open_checkpoint(path).config["rope_parameters"]
    assert rope["rope_type"] == "gguf_factors"
    assert rope["factors"] == other.tolist()


def test_every_end_token_is_in_the_generation_config(tmp_path: Path) -> None:
    path = tmp_path / "ends.gguf"
    model = make_model("llama", {})
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer, model.config)
    writer.add_eot_token_id(4)
    # id 6 reads like an end, but is an ordinary token: what users write must not end their answer
    writer.add_token_list(["<pad>", "<s>", "</s>", "a", "<|eot_id|>", "<|im_end|>", "<|end|>"])
    writer.add_token_types([3, 3, 3, 1, 3, 3, 1])
    write_tensors(writer, "llama", model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    generation = open_checkpoint(path).generation_config
    assert generation == {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [2, 4, 5]}


def test_demo_model_is_what_its_makers_published(demo_gguf: Path) -> None:
    checkpoint = open_checkpoint(demo_gguf)
    published = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }
    assert {key: checkpoint.config[key] for key in published} == published
    assert len(checkpoint.tensor_names) == 30 * 9 + 2
    assert checkpoint.content_hash == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_gemma_is_what_its_makers_published(gemma_gguf: Path) -> None:
    config = open_checkpoint(gemma_gguf).config
    published = {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    assert {key: config[key] for key in published} == published
    assert [index for index, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]


def patched(path: Path, tmp_path: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert content.count(old) == 1
    target = tmp_path / "patched.gguf"
    target.write_bytes(content.replace(old, new))
    return target


@pytest.fixture(scope="module")
def llama_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", "llama", make_model("llama", {}))


def test_unknown_architecture_is_refused_with_the_list(llama_gguf: Path, tmp_path: Path) -> None:
    key = b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0"
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not read; these are: llama, qwen2"):
        open_checkpoint(patched(llama_gguf, tmp_path, key + b"llama", key + b"mamba"))


def test_rows_that_are_no_heads_are_an_error(llama_gguf: Path, tmp_path: Path) -> None:
    key = b"llama.attention.head_count\x04\0\0\0"
    checkpoint = open_checkpoint(patched(llama_gguf, tmp_path, key + b"\x04", key + b"\x05"))
    with pytest.raises(ModelLoadError, match=r"'blk\.0\.attn_q\.weight' of \(128, 64\) does not divide into 5 heads"):
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weight", torch.float32)


def test_missing_key_is_named(llama_gguf: Path, tmp_path: Path) -> None:
    path = patched(llama_gguf, tmp_path, b"llama.embedding_length", b"llama.embedding_lengtX")
    with pytest.raises(ModelLoadError, match=r"patched\.gguf: metadata llama\.embedding_length is missing"):
        open_checkpoint(path)


def test_layer_count_beyond_the_tensors_is_refused(llama_gguf: Path, tmp_path: Path) -> None:
    key = b"llama.block_count\x04\0\0\0"
    path = patched(llama_gguf, tmp_path, key + b"\x04\0\0\0", key + b"\xff\xff\xff\xff")
    with pytest.raises(ModelLoadError, match="block_count is 4294967295"):
        open_checkpoint(path)


def test_unknown_tensor_keeps_its_name_for_the_model_to_refuse(llama_gguf: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(patched(llama_gguf, tmp_path, b"blk.2.ffn_up.weight", b"blk.2.ffn_uq.weight"))
    assert "blk.2.ffn_uq.weight" in checkpoint.tensor_names
    assert "model.layers.2.mlp.up_proj.weight" not in checkpoint.tensor_names


def test_tensor_that_is_not_there_is_an_error(llama_gguf: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tensor for 'model\.nothing'"):
        open_checkpoint(llama_gguf).tensor("model.nothing", torch.float32)


def test_content_hash_follows_the_content(llama_gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(llama_gguf.read_bytes())
    assert open_checkpoint(copy).content_hash == open_checkpoint(llama_gguf).content_hash
    with copy.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert open_checkpoint(copy).content_hash != open_checkpoint(llama_gguf).content_hash


WRONG_VALUES: dict[str, Any] = {
    "negative": -1,
    "zero": 0,
    "huge": 2**62,
    "not a number": math.nan,
    "text": "many",
    "flag": True,
    "numbers": np.array([1, 2], np.int32),
    "strings": ["a", "b"],
}


@pytest.mark.parametrize("value", WRONG_VALUES.values(), ids=WRONG_VALUES)
@pytest.mark.parametrize("case", ["gemma3", "llama yarn"])
def test_wrong_metadata_is_an_error_or_taken_as_it_is(case: str, value: Any, tmp_path: Path) -> None:
    architecture, model_type, config = CASES[case]
    header = read_header(write_gguf(tmp_path / "model.gguf", architecture, make_model(model_type, config)))
    optional = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.token_type", "tokenizer.ggml.tokens", "split.count")
    optional += (f"{architecture}.attention.sliding_window_pattern", f"{architecture}.rope.freq_base_swa")
    for key in (*header.metadata, *optional):
        damaged = replace(header, metadata={**header.metadata, key: value})
        with contextlib.suppress(ModelLoadError):
            assert translate_config(damaged, {})["num_hidden_layers"] <= len(header.tensors)
            assert all(type(token) is int for token in translate_generation_config(damaged)["eos_token_id"])
