"""The tokenizers' own rules: special tokens, BOS, ends, bytes, limits, caches and damaged files. Small vocabularies."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suimon.core_engine.errors import ContextLengthError, InvalidRequestError, ModelLoadError, UnsupportedModelError
from suimon.core_engine.gguf_tokenizer import tokenizer_from_metadata
from suimon.core_engine.pre_tokenizers import PRE_TOKENIZERS
from suimon.core_engine.spm_model import load_spm_model
from suimon.core_engine.spm_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, ranked_merges
from suimon.core_engine.tokenizer import Tokenizer, load_tokenizer

CHAT = "<|im_start|>user\n hi<|im_end|>"


def byte_characters() -> list[str]:
    """GPT-2's 256 printable characters in the order of the bytes they stand for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """A GGUF header's tokenizer: every byte, two merges, two chat markers."""
    tokens = [*byte_characters(), "hi", "Ġhi", "<|im_start|>", "<|im_end|>", "<tool>", "[PAD261]"]
    types = [NORMAL] * 258 + [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED]
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": np.array(types, dtype=np.int32),
        "merges": ["h i", "Ġ hi"],
        "bos_token_id": 258,
        "eos_token_id": 259,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary with all bytes; ▁ab is preferred to bc, and ab to ▁a."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "c", "▁a", "ab", "bc", "▁ab"]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -4.0, -1.0]
    metadata = {
        "model": "llama",
        "tokens": pieces,
        "scores": np.array(scores, dtype=np.float32),
        "token_type": np.array([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 8], dtype=np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}


def from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_metadata(metadata, source="model.gguf")


# --- byte-level BPE


def test_a_marker_is_one_id_and_the_rest_is_bytes() -> None:
    tokenizer = from_metadata(bpe_metadata())
    assert tokenizer.encode(CHAT) == [258, *map(ord, "user"), byte_characters().index("Ċ"), 257, 259]
    assert tokenizer.encode("a<tool>") == [ord("a"), 260]
    assert tokenizer.decode(tokenizer.encode(CHAT), skip_special_tokens=False) == CHAT
    assert tokenizer.decode(tokenizer.encode(CHAT + "<tool>")) == "user\n hi<tool>"
    assert tokenizer.special_token_ids == {258, 259}


def test_a_token_that_a_converter_made_up_is_never_matched() -> None:
    tokenizer = from_metadata(bpe_metadata())
    assert 261 not in tokenizer.encode("[PAD261]")
    assert tokenizer.decode(tokenizer.encode("[PAD261]")) == "[PAD261]"
    assert tokenizer.vocab_size == 262


@pytest.mark.parametrize("text", ["naïve 日本 👩‍👩‍👧‍👦\r\n\t \x00\x7f", "<|im_start|>ok", "", " " * 300])
def test_token_bytes_joined_are_the_text(text: str) -> None:
    tokenizer = from_metadata(bpe_metadata())
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [257]),
        ({"add_bos_token": True}, [258, 257]),
        ({"add_bos_token": True, "add_eos_token": True}, [258, 257, 259]),
        ({"pre": "llama-bpe"}, [258, 257]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [257]),
    ],
)
def test_bos_and_eos_are_added_as_the_metadata_says(flags: dict[str, Any], expected: list[int]) -> None:
    tokenizer = from_metadata(bpe_metadata(**flags))
    assert tokenizer.encode(" hi") == expected
    assert tokenizer.encode(" hi", add_special_tokens=False) == [257]
    assert tokenizer.encode_batch([" hi", " hi"]) == [expected, expected]
    assert (tokenizer.add_bos, tokenizer.add_eos) == (expected[0] == 258, expected[-1] == 259)


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_rendered_chat_has_one_bos_where_the_model_wants_one(add_bos: bool) -> None:
    tokenizer = from_metadata(bpe_metadata(add_bos_token=add_bos))
    assert tokenizer.encode_chat("<|im_start|> hi") == [258, 257]  # the template printed it
    assert tokenizer.encode_chat(" hi") == ([258, 257] if add_bos else [257])


def test_every_id_that_ends_an_answer_is_known() -> None:
    tokenizer = from_metadata(bpe_metadata(eos_token_id=257, eot_token_id=256, eom_token_id=255))
    assert tokenizer.eos_token_id == 257
    assert tokenizer.eos_token_ids == {257, 256, 255, 259}  # the last by its name <|im_end|>


def test_an_id_outside_the_vocabulary_in_the_metadata_is_ignored() -> None:
    tokenizer = from_metadata(bpe_metadata(eos_token_id=9999, bos_token_id=9999, add_bos_token=True))
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.add_bos) == (None, None, False)
    assert tokenizer.encode(" hi") == [257]


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"model\.gguf.*'nobody-knows'.*llama-bpe.*smollm"):
        from_metadata(bpe_metadata(pre="nobody-knows"))


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'t5'; bert, gemma4, gpt2, llama"):
        from_metadata(bpe_metadata(model="t5"))


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_cuts_without_losing_or_changing_a_byte(name: str) -> None:
    text = "It's 1234567, naïve\n\n  x\t\r\n'LL 日本語123カナ <b>!!</b>  "
    tokenizer = from_metadata(bpe_metadata(pre=name, merges=[]))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(("pre", "composed"), [("qwen2", True), ("llama-bpe", False)])
def test_only_the_families_that_normalise_do(pre: str, composed: bool) -> None:
    tokenizer = from_metadata(bpe_metadata(pre=pre))
    text = "cafe\u0301"
    expected = unicodedata.normalize("NFC", text) if composed else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("superbpe", ["1", "234", "567"]),
        ("llama-bpe", ["123", "456", "7"]),
        ("falcon", ["123", "456", "7"]),
        ("gpt-2", ["1234567"]),
        ("smollm", list("1234567")),
    ],
)
def test_digits_are_grouped_as_each_family_does(pre: str, pieces: list[str]) -> None:
    cuts = PRE_TOKENIZERS[pre].build().pre_tokenize_str("1234567")
    assert [piece for piece, _ in cuts] == pieces


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": ["a", "a"], "token_type": None, "merges": []}, "twice"),
        ({"tokens": ["a\udc80"], "token_type": None, "merges": []}, "not UTF-8"),
        ({"token_type": np.zeros(3, dtype=np.int32)}, "3 entries for 262 tokens"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["h i", "hi"]}, "not two tokens"),
        ({"merges": ["q zzz"]}, "do not fit together"),
        ({"add_bos_token": "yes"}, "is no bool"),
        ({"eos_token_id": "2"}, "is no number"),
    ],
)
def test_damaged_metadata_is_an_error_that_names_file_and_field(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"model\.gguf.*{problem}"):
        from_metadata(bpe_metadata(**changes))


# --- SentencePiece


def test_pieces_are_joined_in_order_of_their_scores() -> None:
    tokenizer = from_metadata(spm_metadata())
    pieces = [tokenizer.token_text(index) for index in tokenizer.encode("abc bc", add_special_tokens=False)]
    assert pieces == ["▁ab", "c", "▁", "bc"]


def test_what_the_vocabulary_lacks_falls_back_to_bytes() -> None:
    tokenizer = from_metadata(spm_metadata())
    ids = tokenizer.encode("aé\n", add_special_tokens=False)
    assert [tokenizer.token_text(index) for index in ids] == ["▁a", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert [tokenizer.token_bytes(index) for index in ids] == [b" a", b"\xc3", b"\xa9", b"\n"]
    assert tokenizer.decode(ids) == "aé\n"


def test_spm_prompts_begin_with_bos_unless_the_metadata_says_otherwise() -> None:
    assert from_metadata(spm_metadata()).encode("ab") == [1, 266]
    assert from_metadata(spm_metadata(add_bos_token=False)).encode("ab") == [266]


def test_without_the_space_prefix_text_begins_as_it_is() -> None:
    tokenizer = from_metadata(spm_metadata(add_space_prefix=False))
    ids = tokenizer.encode("ab ab", add_special_tokens=False)
    assert [tokenizer.token_text(index) for index in ids] == ["ab", "▁ab"]
    assert tokenizer.decode(ids) == "ab ab"


def test_merges_are_ranked_by_score_then_longer_left_part() -> None:
    pieces = ["a", "b", "ab", "aab", "aa", "ba"]
    merges = ranked_merges(pieces, [-9.0, -9.0, -2.0, -1.0, -3.0, -3.0], None)
    pairs = [(pieces[left], pieces[right]) for left, right in merges.tolist()]
    assert pairs == [("aa", "b"), ("a", "ab"), ("a", "b"), ("a", "a"), ("b", "a")]


def large_vocabulary() -> tuple[list[str], list[float]]:
    letters = [chr(0x4E00 + index) for index in range(150)]
    pieces = [*letters, *(left + right for left in letters for right in letters)]
    return pieces, [-float(index) for index in range(len(pieces))]


@pytest.mark.parametrize("damage", [None, b"", b"short", b"x" * 4096])
def test_ranked_merges_are_cached_and_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: bytes | None) -> None:
    pieces, scores = large_vocabulary()
    first = ranked_merges(pieces, scores, tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    if damage is not None:
        file.write_bytes(damage)
    assert np.array_equal(ranked_merges(pieces, scores, tmp_path), first)
    assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]


def test_the_cache_is_read(tmp_path: Path) -> None:
    """A well-formed file of the right name with other merges is what comes back: so it was not computed again."""
    import hashlib

    pieces, scores = large_vocabulary()
    ranked_merges(pieces, scores, tmp_path)
    (file,) = tmp_path.iterdir()
    payload = np.array([[0, 1]], dtype="<i4").tobytes()
    file.write_bytes(hashlib.sha256(payload).digest() + payload)
    assert ranked_merges(pieces, scores, tmp_path).tolist() == [[0, 1]]


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    pieces, scores = large_vocabulary()
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert np.array_equal(ranked_merges(pieces, scores, blocked / "x"), ranked_merges(pieces, scores, None))


@pytest.fixture(scope="module")
def train_spm() -> Callable[..., bytes]:
    """Trains a SentencePiece BPE model on text of several scripts; its own library is the oracle."""
    import sentencepiece

    corpus = [
        "the quick brown fox jumps over the lazy dog and the other dogs",
        "Übung macht den Meister, naïve Straße straße",
        "съешь ещё этих мягких французских булок",
        "def f(x): return x + 1  # code code code",
        "aaaa bbbb aabb abab 1234 12 123",
    ]

    def train(**options: Any) -> bytes:
        model = io.BytesIO()
        defaults = {
            "model_type": "bpe",
            "vocab_size": 420,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "user_defined_symbols": ["<tool>"],
            "minloglevel": 2,
        }
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus * 20), model_writer=model, **(defaults | options)
        )
        return model.getvalue()

    return train


SPM_TEXTS = (
    "the quick fox",
    "  two  spaces  ",
    "日本 🙂 naïve",
    "a\n\tb\r c \n",
    "x<tool>y",
    "ﬁ Ｆｕｌｌ e\u0301 \u00a0 end",
    "aaaaaaaabbbbbbb" * 9,
    "",
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True, "user_defined_symbols": []},
    ],
)
def test_a_sentencepiece_model_gives_the_ids_of_its_own_library(
    train_spm: Callable[..., bytes], options: dict[str, Any]
) -> None:
    import sentencepiece

    model = train_spm(**options)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    backend = load_spm_model(model, source="tokenizer.model")
    for text in SPM_TEXTS:
        if "user_defined_symbols" in options or "<tool>" not in text:
            assert backend.encode(text, add_special_tokens=False).ids == oracle.encode(text), text


def test_a_folder_with_only_a_sentencepiece_model(tmp_path: Path, train_spm: Callable[..., bytes]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train_spm())
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the dog")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == "the dog"


def test_a_unigram_model_and_a_damaged_one_are_refused(train_spm: Callable[..., bytes]) -> None:
    unigram = train_spm(model_type="unigram", vocab_size=330)
    with pytest.raises(UnsupportedModelError, match="not BPE"):
        load_spm_model(unigram, source="tokenizer.model")
    model = train_spm()
    for damaged in (b"", b"\xff" * 40, model[:-7], model[: len(model) // 2], b"\x0a\x7fabc"):
        with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
            load_spm_model(damaged, source="tokenizer.model")


# --- Hugging Face folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in Hugging Face's layout, with a tokenizer.json that would truncate and pad."""
    backend = from_metadata(bpe_metadata()).backend
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    write_json(
        tmp_path / "tokenizer_config.json",
        bos_token={"content": "<|im_start|>", "lstrip": False},
        eos_token="<|im_end|>",
        chat_template="from the config",
    )
    return tmp_path


def write_json(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content))


def test_a_folder_is_read_and_nothing_is_cut_or_padded(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(CHAT) == from_metadata(bpe_metadata()).encode(CHAT)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (258, 259)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_template == "from the config"
    assert tokenizer.add_bos is False


def test_all_sources_of_ends_are_united(folder: Path) -> None:
    write_json(folder / "generation_config.json", eos_token_id=[257, 256])
    write_json(folder / "config.json", eos_token_id=255, text_config={"eos_token_id": 254})
    assert load_tokenizer(folder).eos_token_ids == {259, 257, 256, 255, 254}


def test_the_config_decides_about_bos(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for add_bos, add_eos in [(True, False), (True, True), (False, False)]:
        write_json(folder / "tokenizer_config.json", **config, add_bos_token=add_bos, add_eos_token=add_eos)
        expected = [258] * add_bos + [257] + [259] * add_eos
        assert load_tokenizer(folder).encode(" hi") == expected


def test_tokens_that_only_the_config_has_are_added(folder: Path) -> None:
    entry = {"content": "<new>", "lstrip": False, "rstrip": True, "normalized": False, "special": True}
    write_json(folder / "tokenizer_config.json", added_tokens_decoder={"262": entry}, eos_token="<end>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<new>  hi<end>") == [262, 256, 263]
    assert tokenizer.eos_token_ids == {263}
    assert tokenizer.vocab_size == 264


def test_names_missing_from_the_tokenizer_come_from_the_models_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    write_json(folder / "special_tokens_map.json", eos_token="<|im_end|>")
    write_json(folder / "config.json", bos_token_id=258, eos_token_id=257)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (258, 259, {259, 257})


def test_the_chat_template_that_wins(folder: Path) -> None:
    write_json(folder / "chat_template.json", chat_template="from chat_template.json")
    assert load_tokenizer(folder).chat_template == "from chat_template.json"
    (folder / "chat_template.jinja").write_text("from chat_template.jinja")
    assert load_tokenizer(folder).chat_template == "from chat_template.jinja"


def test_of_several_named_templates_the_default_is_taken(folder: Path) -> None:
    templates = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    write_json(folder / "tokenizer_config.json", chat_template=templates)
    assert load_tokenizer(folder).chat_template == "d"


def test_the_content_hash_tells_tokenizers_apart(folder: Path) -> None:
    first = load_tokenizer(folder).content_hash
    assert load_tokenizer(folder).content_hash == first
    write_json(folder / "tokenizer_config.json", add_bos_token=True, bos_token="<|im_start|>")
    assert load_tokenizer(folder).content_hash != first
    hashes = {from_metadata(bpe_metadata(**change)).content_hash for change in ({}, {"pre": "gpt-2"}, {"merges": []})}
    assert len(hashes) == 3


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"model": 1}'])
def test_a_damaged_file_is_an_error_that_names_it(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    if name != "tokenizer.json" and content == '{"model": 1}':
        assert load_tokenizer(folder).encode("hi") == [256]
    else:
        with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
            load_tokenizer(folder)


def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)


# --- limits and threads


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    tokenizer = from_metadata(bpe_metadata())
    limit = tokenizer.max_chars_for(16)
    assert limit == 3 * len("<|im_start|>") * 16
    assert len(tokenizer.encode("x" * limit, max_chars=limit)) == limit
    for encode in (tokenizer.encode, tokenizer.encode_chat):
        with pytest.raises(ContextLengthError, match=rf"{limit + 1} characters.*at most {limit}"):
            encode("x" * (limit + 1), max_chars=limit)


def test_no_text_within_the_context_is_refused() -> None:
    """The longest tokens there are, as many as fit."""
    tokenizer = from_metadata(bpe_metadata())
    text = "<|im_start|>" * 16
    assert len(tokenizer.encode(text, max_chars=tokenizer.max_chars_for(16))) == 16


def test_text_that_is_no_unicode_is_the_requests_fault() -> None:
    tokenizer = from_metadata(bpe_metadata())
    with pytest.raises(InvalidRequestError, match="surrogate pair at character 2") as caught:
        tokenizer.encode("ab\ud800")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("index", [-1, 2**32, 10**12])
def test_a_number_that_is_no_id_is_the_requests_fault(index: int) -> None:
    tokenizer = from_metadata(bpe_metadata())
    for call in (lambda: tokenizer.decode([1, index]), lambda: tokenizer.token_bytes(index)):
        with pytest.raises(InvalidRequestError, match=f"{index} is no token id"):
            call()


def test_an_id_of_the_embeddings_padding_gives_no_text() -> None:
    tokenizer = from_metadata(bpe_metadata())
    assert tokenizer.decode([256, 5000]) == "hi"
    assert (tokenizer.token_text(5000), tokenizer.token_bytes(5000)) == ("", b"")


def test_many_threads_get_the_ids_of_one() -> None:
    tokenizer = from_metadata(spm_metadata())
    texts = [f"ab c{index} " * (index % 7 + 1) for index in range(200)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected


@pytest.mark.parametrize("work", ["encode", "encode_chat", "decode"])
def test_long_work_leaves_the_interpreter_to_others(work: str) -> None:
    """An event loop lives in the same process."""
    tokenizer = from_metadata(spm_metadata())
    given = [5] * 2_000_000 if work == "decode" else "ab c " * 100_000
    turns, done = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    other = threading.Thread(target=take_turns)
    other.start()
    before = turns
    getattr(tokenizer, work)(given)
    taken = turns - before
    done.set()
    other.join()
    assert taken >= 5  # with the lock held, at most one on the way in and one on the way out


def test_loading_a_gguf_imports_neither_torch_nor_transformers(demo_gguf: Path) -> None:
    code = (
        "import sys; from suimon.core_engine.tokenizer import load_tokenizer; "
        f"load_tokenizer({str(demo_gguf)!r}).encode('hi'); "
        "print(sorted({'torch', 'transformers', 'jinja2', 'gguf'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
