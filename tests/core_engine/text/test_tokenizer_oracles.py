"""Token ids of real vocabularies against independent sources: whole files, hard text, nothing small.

The oracles: texts with their ids that llama.cpp ships beside its vocabularies (made with Hugging Face's tokenizers),
the Hugging Face tokenizers of Gemma 3, Llama 3 and Qwen 3, and for the demo model a byte-level BPE written out below.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from suimon.core_engine.loader.gguf import read_header
from suimon.core_engine.tokenizer import Tokenizer, load_tokenizer

HARD_TEXTS = (
    "Hello world",
    "  leading",
    " trailing  ",
    "\n\n\n a\n \n\tb\r\nc\r\r\n",
    "tabs\t\t\tx",
    "it's I'll WE'VE don't 'S 'Ll a'b",
    "12345678 3.14 1,000,000 ٣٤٥ ½ ²  7",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ✅",
    "日本語のテスト。中文测试，韩国어 한국어",
    "Здравствуй мир, مرحبا بالعالم, नमस्ते दुनिया, ไทยแลนด์, ភាសាខ្មែរ",
    "e\u0301 cafe\u0301 Å \u212b ﬁ ｱ \u0301first",
    "def f(x):\n    return x**2  # comment\n\n\nclass A:\n\tpass",
    "\x00\x01\x02\x7f\x80\x9f\ufeff\u200b\u200d x\u00a0y\u2003z\u3000w",
    "a" * 500,
    "=" * 300,
    " " * 200,
    "\n" * 100,
    "<|im_start|>user\n hi<|im_end|>",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n",
    "<|begin_of_text|><|start_header_id|>x<|end_header_id|>\n\nhi<|eot_id|>",
    "<s>hi</s> <unk> <0x0A> <0x41>",
    "▁a ▁▁ b",
    "A" * 33 + "ñ",
    "ÀÈÌ straße İstanbul ǅ 😀𐍈𝕳",
    "<h1>title</h1>   <table>\n\n\n\n<td>",
    "",
    " ",
    "\t",
)
# The control characters, the scripts, the spaces and the signs that cuts depend on.
ALPHABET = "ab Z09\n\t \r'.é漢🙂<|>▁_-\u0301½Ж"


def random_texts(count: int) -> Iterator[str]:
    chosen = random.Random(1)
    for _ in range(count):
        yield "".join(chosen.choices(ALPHABET, k=chosen.randint(1, 60)))


# --- llama.cpp's vocabularies

VOCABULARIES = (
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
# Its ids of these are for text that is not brought to NFC, which the model's Hugging Face tokenizer does.
NOT_NORMALISED = ("qwen35",)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_those_that_come_with_the_vocabulary(llama_cpp_models: Path, name: str) -> None:
    path = llama_cpp_models / f"ggml-vocab-{name}.gguf"
    tokenizer = load_tokenizer(path)
    cases = list(zip(texts_of(path), ids_of(path), strict=True))
    if name in NOT_NORMALISED:
        cases = [case for case in cases if unicodedata.is_normalized("NFC", case[0])]
    assert len(cases) >= 46
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def texts_of(path: Path) -> list[str]:
    with path.with_suffix(".gguf.inp").open(encoding="utf-8", newline="") as file:
        return file.read().removesuffix("\n").removesuffix("\n__ggml_vocab_test__").split("\n__ggml_vocab_test__\n")


def ids_of(path: Path) -> list[list[int]]:
    lines = path.with_suffix(".gguf.out").read_text().removesuffix("\n").split("\n")
    return [[int(index) for index in line.split()] for line in lines]


# --- Hugging Face's tokenizers


def assert_equal(ours: Tokenizer, theirs: Tokenizer, texts: list[str]) -> None:
    """The same ids and text; and the tokens' bytes are that text."""
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        decoded = theirs.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == decoded
        assert b"".join(map(ours.token_bytes, ids)).decode("utf-8", "replace") == decoded


@pytest.mark.parametrize(("name", "family"), [("llama-bpe", "llama3"), ("qwen2", "qwen3")])
def test_a_byte_level_vocabulary_equals_the_hugging_face_tokenizer(
    llama_cpp_models: Path, npm_tokenizer: Callable[[str], Path], name: str, family: str
) -> None:
    ours = load_tokenizer(llama_cpp_models / f"ggml-vocab-{name}.gguf")
    theirs = load_tokenizer(npm_tokenizer(family))
    markers = [] if family == "llama3" else ["<think>", "<tool_call>", "</think>"]  # newer than the GGUF
    texts = [*HARD_TEXTS, *random_texts(500)]
    assert_equal(ours, theirs, [text for text in texts if not any(marker in text for marker in markers)])


def test_gemma_equals_the_hugging_face_tokenizer(gemma_gguf: Path, npm_tokenizer: Callable[[str], Path]) -> None:
    """Its 514,906 merges are not in the file: they are derived from the scores."""
    ours, theirs = load_tokenizer(gemma_gguf), load_tokenizer(npm_tokenizer("gemma3"))
    assert_equal(ours, theirs, [*HARD_TEXTS, *random_texts(500)])
    assert ours.encode("hi") == theirs.encode("hi") == [2, 2202]
    assert ours.encode_chat("<bos>hi") == [2, 2202]


# --- the demo model


class PlainBPE:
    """Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) with SmolLM's cuts, as plainly as it can be said."""

    def __init__(self, path: Path) -> None:
        import regex

        metadata = read_header(path).metadata
        self.ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        control = [
            token for token, kind in zip(self.ids, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3
        ]
        self.markers = regex.compile("(" + "|".join(map(regex.escape, sorted(control, key=len, reverse=True))) + ")")
        self.digit = regex.compile(r"(\p{N})")
        self.word = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = iter(range(256, 512))
        self.chars = [chr(byte if byte in printable else next(others)) for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        ids = []
        for stretch in self.markers.split(text):
            if stretch in self.ids and self.markers.fullmatch(stretch):
                ids.append(self.ids[stretch])
                continue
            words = [word for part in self.digit.split(stretch) for word in self.word.findall(part)]
            ids += [self.ids[piece] for word in words for piece in self.merge(word)]
        return ids

    def merge(self, word: str) -> list[str]:
        pieces = [self.chars[byte] for byte in word.encode()]
        while True:
            ranked = [(self.ranks[pair], at) for at, pair in enumerate(pairwise(pieces)) if pair in self.ranks]
            if not ranked:
                return pieces
            _, at = min(ranked)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_the_demo_models_ids_are_those_of_plain_bpe(demo_gguf: Path) -> None:
    tokenizer, oracle = load_tokenizer(demo_gguf), PlainBPE(demo_gguf)
    for text in [*HARD_TEXTS, *random_texts(500)]:
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_the_demo_models_markers_are_single_ids(demo_gguf: Path) -> None:
    tokenizer = load_tokenizer(demo_gguf)
    assert tokenizer.encode_chat("<|im_start|>user\n hi<|im_end|>") == [1, 4093, 198, 15876, 2]
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    assert (tokenizer.add_bos, tokenizer.vocab_size) == (False, 49152)
    assert {2} <= tokenizer.eos_token_ids <= tokenizer.special_token_ids
    assert tokenizer.chat_template is not None
