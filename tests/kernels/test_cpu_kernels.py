"""The compiled CPU kernels against float64 written from the definitions; whole steps against PyTorch's operations."""

from __future__ import annotations

import math
import random
import re
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from suimon.core_engine.batch import ForwardBatch, ScheduledBatch, ScheduledSequence
from suimon.core_engine.layers.kv_cache import KVCache
from suimon.core_engine.models import model_class
from suimon.core_engine.models.base import DecoderModel
from suimon.kernels import cpu
from suimon.kernels.cpu import build
from suimon.kernels.cpu.attention import paged_attention
from suimon.kernels.cpu.linear import PackedLinear

HAVE_COMPILER = any(shutil.which(name) for name in build.COMPILERS)
needs_compiler = pytest.mark.skipif(not HAVE_COMPILER, reason="no C++ compiler on this machine")
BLOCK_SIZE = 8


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.fixture
def threads() -> Any:
    """Sets the number of threads; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- products ---


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (16, 7), (17, 33), (96, 64), (250, 129)], ids=str)
def test_a_product_is_float64s_but_for_rounding(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0])
    packed, biased = PackedLinear(weight), PackedLinear(weight, bias)
    for rows in [*range(1, 15), 24, 25, 64]:
        x = torch.randn(rows, shape[1])
        exact = x.double() @ weight.double().T
        torch.testing.assert_close(packed(x).double(), exact, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(biased(x).double(), exact + bias.double(), atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_product_does_not_depend_on_its_company_or_on_threads(dtype: torch.dtype, threads: Any) -> None:
    packed, x = PackedLinear(torch.randn(300, 70).to(dtype)), torch.randn(40, 70)
    threads(1)
    alone = torch.cat([packed(row[None]) for row in x])
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(packed(x), alone)
        assert torch.equal(packed(x[3:20]), alone[3:20])


@needs_compiler
def test_two_callers_at_once_do_not_disturb_each_other(threads: Any) -> None:
    threads(2)
    inputs = [torch.randn(3, 200) for _ in range(2)]
    layers = [PackedLinear(torch.randn(2000, 200)), PackedLinear(torch.randn(700, 200))]
    expected = [layer(x) for layer, x in zip(layers, inputs, strict=True)]

    def same(which: int) -> bool:
        return all(torch.equal(layers[which](inputs[which]), expected[which]) for _ in range(200))

    with ThreadPoolExecutor(2) as callers:
        assert list(callers.map(same, (0, 1))) == [True, True]


@needs_compiler
def test_rows_of_a_packed_weight_are_the_weights() -> None:
    weight = torch.randn(37, 9)
    numbers = torch.tensor([0, 15, 16, 36, 0, 31])
    assert torch.equal(PackedLinear(weight).rows(numbers), weight[numbers])


# --- attention ---


class Case:
    """Random sequences over scattered blocks with holes; every slot that nobody may read is NaN."""

    heads, kv_heads = 6, 2

    def __init__(
        self, shares: list[tuple[int, int]], dtype: torch.dtype = torch.float32, *, head_dim: int = 24
    ) -> None:
        """``shares``: (query length, context length) of each sequence."""
        self.head_dim = head_dim
        needed = [-(-context // BLOCK_SIZE) for _, context in shares]
        total = 2 * sum(needed) + 3
        blocks = random.Random(len(shares)).sample(range(total), sum(needed))
        self.shares, self.tables = shares, [[blocks.pop() for _ in range(count)] for count in needed]
        shape = (total, BLOCK_SIZE, self.kv_heads, self.head_dim)
        self.keys, self.values = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
        for table, (_, context) in zip(self.tables, shares, strict=True):
            for position in range(context):
                at = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                self.keys[at] = torch.randn(self.kv_heads, self.head_dim).to(dtype)
                self.values[at] = torch.randn(self.kv_heads, self.head_dim).to(dtype)
        self.query = torch.randn(sum(length for length, _ in shares), self.heads, self.head_dim)

    def forget_before(self, window: int) -> None:
        """Poison what no query's window reaches: those blocks may be another sequence's by now."""
        for table, (length, context) in zip(self.tables, self.shares, strict=True):
            for position in range(max(0, context - length + 1 - window)):
                at = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                self.keys[at] = self.values[at] = math.nan

    def attention(self, rows: slice = slice(None), **options: Any) -> torch.Tensor:
        shares, tables = self.shares, self.tables
        starts = [0]
        for length, _ in shares:
            starts.append(starts[-1] + length)
        widest = max(map(len, tables))
        return paged_attention(
            self.query,
            self.keys,
            self.values,
            torch.tensor([table + [10**6] * (widest - len(table)) for table in tables], dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([context for _, context in shares], dtype=torch.int32),
            scale=0.3,
            **options,
        )[rows]

    def expected(self, window: int | None = None, cap: float | None = None) -> torch.Tensor:
        """One number at a time, in float64."""
        results = []
        for table, (length, context) in zip(self.tables, self.shares, strict=True):
            slots = torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(context)])
            keys, values = self.keys.flatten(0, 1)[slots].double(), self.values.flatten(0, 1)[slots].double()
            for position in range(context - length, context):
                seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
                query = self.query[len(results)].double()
                results.append(torch.stack([self.head(query, keys[seen], values[seen], h, cap) for h in range(6)]))
        return torch.stack(results)

    def head(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, h: int, cap: float | None
    ) -> torch.Tensor:
        scores = 0.3 * keys[:, h // 3] @ query[h]
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        return scores.softmax(0) @ values[:, h // 3]


SHARES = [(1, 1), (1, 65), (20, 20), (5, 70), (1, 200), (17, 129), (1, 64)]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (1, None), (30, None), (64, 2.0), (None, 0.7)])
def test_attention_is_float64s_but_for_rounding(window: int | None, cap: float | None, dtype: torch.dtype) -> None:
    case = Case(SHARES, dtype)
    expected = case.expected(window, cap)
    if window:
        case.forget_before(window)
    found = case.attention(sliding_window=window, soft_cap=cap).double()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@needs_compiler
@pytest.mark.parametrize("head_dim", [1, 32, 64, 80, 128, 256])
def test_attention_over_heads_of_any_size(head_dim: int) -> None:
    case = Case([(1, 70), (9, 9)], head_dim=head_dim)
    torch.testing.assert_close(case.attention().double(), case.expected(), atol=5e-5, rtol=5e-5)


@needs_compiler
def test_a_query_does_not_depend_on_its_company_its_chunk_or_on_threads(threads: Any) -> None:
    whole = Case([(90, 90)])
    threads(1)
    expected = whole.attention()
    for count in (1, 3):
        threads(count)
        for cut in (1, 17, 64, 89):
            query = whole.query
            whole.query, whole.shares = query[cut:].contiguous(), [(90 - cut, 90)]
            assert torch.equal(whole.attention(), expected[cut:])
            whole.query, whole.shares = query, [(90, 90)]


@needs_compiler
def test_scores_of_any_size_leave_numbers() -> None:
    case = Case([(1, 100)])
    case.keys *= 1000.0
    torch.testing.assert_close(case.attention().double(), case.expected(), atol=1e-4, rtol=1e-4)


# --- whole steps ---

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "MistralForCausalLM": {"sliding_window": 9},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"hidden_act": "gelu"},
    "Gemma2ForCausalLM": {"sliding_window": 11, "query_pre_attn_scalar": 12},
    "Gemma3ForCausalLM": {"sliding_window": 11, "query_pre_attn_scalar": 12, "sliding_window_pattern": 2},
}


def random_model(name: str, dtype: torch.dtype) -> DecoderModel:
    config = {**TINY, **FAMILIES[name], "architectures": [name]}
    kind: Any = model_class(config)
    model: DecoderModel = kind(kind.read_config(config))
    torch.manual_seed(8)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3)
    for module in model.modules():
        if type(module).__name__ != "RMSNorm":
            module.to(dtype) if not list(module.children()) else None
    model.finish_loading(dtype, "cpu")
    return model


def run(model: DecoderModel, chunks: list[int]) -> torch.Tensor:
    """Logits of 40 tokens of two sequences, computed in steps of ``chunks`` tokens each."""
    tokens = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(2)).tolist()
    cache = KVCache.allocate(model.kv_shapes, 12, BLOCK_SIZE, model.dtype)
    tables = [[7, 2, 9, 0, 4], [1, 11, 5, 3, 8]]
    for layer in cache:
        layer.key.fill_(math.nan)
        layer.value.fill_(math.nan)
    results, start = [], 0
    for count in chunks:
        scheduled = [
            ScheduledSequence(s, tokens[s][start : start + count], start, tables[s], num_logits=count) for s in (0, 1)
        ]
        batch = ForwardBatch.build(ScheduledBatch(1, scheduled), BLOCK_SIZE)
        results.append(model.logits(model.forward(batch, cache)).float().unflatten(0, (2, count)))
        start += count
    return torch.cat(results, dim=1)


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_in_one_call_is_the_same_step(name: str) -> None:
    expected = run(random_model(name, torch.float32), [40])
    model = random_model(name, torch.float32)
    model.prepare()
    assert model.one_call is not None
    whole = run(model, [40])
    torch.testing.assert_close(whole, expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(run(model, [3, 20, 1, 16]), whole)


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_half_precision_weights_lose_no_more_than_their_rounding(name: str) -> None:
    exact = random_model(name, torch.bfloat16).float()
    exact.finish_loading(torch.float32, "cpu")
    model = random_model(name, torch.bfloat16)
    model.prepare()
    expected, found = run(exact, [40]), run(model, [40])
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", ["forward", "logits"])
def test_a_model_with_a_forward_or_logits_of_its_own_keeps_its_weights(name: str) -> None:
    model = random_model("LlamaForCausalLM", torch.float32)
    model.__class__ = type("Own", (type(model),), {name: lambda *_: None})
    model.prepare()
    assert model.one_call is None


@needs_compiler
def test_packing_gives_up_the_models_own_weights() -> None:
    model = random_model("LlamaForCausalLM", torch.float32)
    model.prepare()
    left = sum(parameter.numel() for parameter in model.parameters())
    assert left < 61 * 40 + 10 * 40 + 3 * 400  # the embedding, which is not tied, norms and biases


# --- building ---


@needs_compiler
def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("SUIMON_CACHE", str(tmp_path / "cache"))
    caplog.set_level("INFO")
    first = build.library_path()
    assert build.library_path() == first
    assert sum("compiling" in record.message for record in caplog.records) == 1
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }')
    assert build.library_path() != first


@needs_compiler
def test_sources_that_do_not_compile_are_named_with_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.cpp").write_text("this is not C++")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("SUIMON_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match=r"do not compile with .*: .*bad\.cpp"):
        build.library_path()
    assert not list((tmp_path / "cache" / "kernels").iterdir())


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"not a library"])
def test_a_damaged_library_is_made_anew(damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cached = build.library_path(), tmp_path / "cached.so"
    cached.write_bytes(damage)

    def library_path() -> Path:
        """As build's, which compiles what is not there; copying is quicker."""
        return cached if cached.exists() else Path(shutil.copy(whole, cached))

    monkeypatch.setattr(import_module("suimon.kernels.cpu.library"), "library_path", library_path)
    cpu.library.cache_clear()
    try:
        assert cpu.library().suimon_version() > 0
    finally:
        cpu.library.cache_clear()
    assert cached.stat().st_size == whole.stat().st_size


@pytest.mark.parametrize("named", ["no-such-compiler", ""])
def test_without_a_compiler_pytorch_serves_after_one_warning(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", named)
    monkeypatch.setenv("PATH", str(tmp_path))
    cpu.library.cache_clear()
    cpu.is_available.cache_clear()
    try:
        model = random_model("LlamaForCausalLM", torch.float32)
        model.prepare()
        assert model.one_call is None
        assert not cpu.is_available()
    finally:
        cpu.library.cache_clear()
        cpu.is_available.cache_clear()
    said = [record.message for record in caplog.records if "CPU kernels" in record.message]
    assert len(said) == 1
    assert "install one" in said[0]


def test_a_compiler_that_does_not_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("SUIMON_CACHE", str(tmp_path))
    with pytest.raises(build.BuildError, match=re.escape(f"{broken} does not run")):
        build.library_path()


def test_a_compiler_that_is_not_a_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(build.BuildError, match=r"CXX is .* not a command"):
        build.library_path()


def test_the_reference_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUIMON_KERNELS", "reference")
    cpu.is_available.cache_clear()
    try:
        assert not cpu.is_available()
    finally:
        cpu.is_available.cache_clear()
