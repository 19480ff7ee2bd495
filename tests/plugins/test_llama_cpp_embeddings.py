"""Embeddings by llama.cpp, of a tiny BERT of seeded noise; the library's own high-level class is the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suimon.gateway.config import ModelSettings
from suimon.gateway.hookspecs import ContextTooLong, Embeddings, EmbedRequest, GenerateRequest, InvalidRequest
from suimon.plugins.llama_cpp import LlamaCppBackend

llama_cpp = pytest.importorskip("llama_cpp", reason='not installed: pip install "suimon[llama-cpp]"')

PATIENCE = 120.0  # seconds that only a defect takes
WIDTH, INNER, LAYERS, CONTEXT = 32, 64, 2, 48
WORDS = ["the", "water", "gate", "tide", "sea", "river", "field", "drink", "let", "at", "a", "b"]
PIECES = ["s", "ing", "er"]
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{word}" for word in WORDS), *PIECES]


def write_bert(path: Path) -> Path:
    """Two layers of noise and a vocabulary of twenty pieces, as converters write them."""
    import gguf

    noise = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "bert")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 5 + [1] * (len(TOKENS) - 5))
    writer.add_token_type_count(2)
    for name, index in (("pad", 0), ("unk", 1), ("bos", 2), ("sep", 3), ("eos", 3), ("mask", 4)):
        getattr(writer, f"add_{name}_token_id")(index)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (noise.standard_normal(shape) * 0.3).astype(np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(WIDTH, np.float32))

    add("token_embd.weight", len(TOKENS), WIDTH)
    add("position_embd.weight", CONTEXT, WIDTH)
    add("token_types.weight", 2, WIDTH)
    add_norm("token_embd_norm")
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
            add(f"blk.{layer}.{name}.bias", WIDTH)
        add_norm(f"blk.{layer}.attn_output_norm")
        add(f"blk.{layer}.ffn_up.weight", INNER, WIDTH)
        add(f"blk.{layer}.ffn_up.bias", INNER)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, INNER)
        add(f"blk.{layer}.ffn_down.bias", WIDTH)
        add_norm(f"blk.{layer}.layer_output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Running:
    """A started backend and the event loop it lives on."""

    def __init__(self, model: Path) -> None:
        settings = ModelSettings(model=str(model), served_model_name="bert", backend="llama_cpp", num_threads=1)
        self.backend = LlamaCppBackend(settings)
        self.runner = asyncio.Runner()
        self.run(self.backend.start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, PATIENCE))

    def embed(self, *inputs: Any, **options: Any) -> Embeddings:
        return self.run(self.backend.embed(EmbedRequest(request_id="e", model="bert", inputs=inputs, **options)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert") / "tiny-bert.gguf")


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Running]:
    service = Running(model)
    yield service
    service.run(service.backend.stop())
    service.runner.close()


TEXTS = ("the water gate", "Let fields drink", "seas", "rivering unheardof words", "a b a b a b")


def test_vectors_are_the_librarys_own(running: Running, model: Path) -> None:
    """B79: one flat list of floats for each input, in order; the ids are the library's, framed by its markers."""
    oracle = llama_cpp.Llama(str(model), embedding=True, n_ctx=CONTEXT, n_threads=1, verbose=False)
    got = running.embed(*TEXTS)
    expected = [np.array(oracle.embed(text)) for text in TEXTS]
    for vector, other in zip(got.vectors, expected, strict=True):
        assert len(vector) == WIDTH and all(isinstance(value, float) for value in vector)
        # It adds up attention in half precision where it is "flash" (here), in single where not (there).
        np.testing.assert_allclose(vector, other / np.linalg.norm(other), atol=2e-3)
    ids = [oracle.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS]
    asked = [GenerateRequest(request_id="t", model="bert", prompt=text) for text in TEXTS]
    assert [running.run(running.backend.tokenize(request)) for request in asked] == ids
    assert got.usage.prompt_tokens == sum(map(len, ids))
    oracle.close()


def test_texts_and_their_ids_give_the_same_vectors_alone_and_together(running: Running) -> None:
    request = GenerateRequest(request_id="t", model="bert", prompt=TEXTS[0])
    ids = tuple(running.run(running.backend.tokenize(request)))
    together = running.embed(*TEXTS, ids).vectors
    alone = [running.embed(text).vectors[0] for text in (*TEXTS, ids)]
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(together[0], together[-1], atol=1e-6)


def test_parallel_requests_get_their_own_vectors(running: Running) -> None:
    """B76, for embeddings."""
    expected = [running.embed(text).vectors[0] for text in TEXTS]

    async def work() -> list[Embeddings]:
        requests = [EmbedRequest(request_id=str(i), model="bert", inputs=(text,)) for i, text in enumerate(TEXTS * 4)]
        return await asyncio.gather(*(running.backend.embed(request) for request in requests))

    got = [answer.vectors[0] for answer in running.run(work())]
    np.testing.assert_allclose(got, expected * 4, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        (
            (TEXTS[0], "water " * (CONTEXT - 1)),
            ContextTooLong,
            rf"input 1 has {CONTEXT + 1} tokens, .* up to {CONTEXT}",
        ),
        (((5,) * (CONTEXT + 1),), ContextTooLong, rf"input 0 has {CONTEXT + 1} tokens, .* up to {CONTEXT}"),
        (((5, len(TOKENS)),), InvalidRequest, f"token ids must be from 0 to {len(TOKENS) - 1}"),
        ((TEXTS[0], ()), InvalidRequest, "input 1 is empty"),
        (("\ud800",), InvalidRequest, "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_embedded_is_refused_with_the_numbers(
    running: Running, inputs: tuple[Any, ...], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as refused:
        running.embed(*inputs)
    assert refused.value.status == 400 and refused.value.param == "input"  # type: ignore[attr-defined]
    running.embed("the longest that fits:", "water " * (CONTEXT - 2))


def test_the_length_of_the_vectors_cannot_be_chosen(running: Running) -> None:
    with pytest.raises(InvalidRequest, match="one length") as refused:
        running.embed("a", dimensions=8)
    assert refused.value.param == "dimensions"


def test_it_says_that_it_writes_no_text(running: Running) -> None:
    capabilities = running.backend.capabilities
    assert (capabilities.chat, capabilities.completions, capabilities.embeddings) == (False, False, True)
    assert capabilities.max_model_len == CONTEXT

    async def work() -> None:
        async for _ in running.backend.generate(GenerateRequest(request_id="g", model="bert", prompt="the sea")):
            raise AssertionError("a token")

    with pytest.raises(InvalidRequest, match="writes no text"):
        running.run(work())


def test_a_reader_that_leaves_is_forgotten(running: Running) -> None:
    async def work() -> None:
        request = EmbedRequest(request_id="e", model="bert", inputs=("water " * (CONTEXT - 2),) * 200)
        task = asyncio.create_task(running.backend.embed(request))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert running.backend.client._embeddings._calls == {}

    running.run(work())
    assert len(running.embed("a").vectors) == 1
