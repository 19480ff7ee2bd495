"""Streaming text against decoding the whole list at once, and stop strings against str.find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from suimon.core_engine.detokenizer import DetokenizedDelta, IncrementalDetokenizer
from suimon.core_engine.gguf_tokenizer import load_gguf_tokenizer
from suimon.core_engine.sampling_params import SamplingParams

WORDS = ["the", "cat", "sat", "it", "am", "é", "中文", "🙂", "a", "b", "\n", " ", "  ", "stop"]


class Decoder:
    """A tokenizers.Tokenizer with the two methods that the detokenizer reads."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, index: int) -> str:
        return self.backend.id_to_token(index) or ""

    def ids(self, *tokens: str) -> list[int]:
        return [self.backend.token_to_id(token) for token in tokens]


def make_decoder(tokens: Iterable[str], decoder: decoders.Decoder, *, byte_fallback: bool = False) -> Decoder:
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(["<unk>", *tokens]))}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=byte_fallback, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.decoder = decoder
    return Decoder(backend)


def make_byte_level() -> Decoder:
    """Every byte, words with and without a leading space, and tokens that cut characters in the middle."""
    letters = {bytes([byte]): character for byte, character in enumerate(byte_alphabet())}
    pieces = [word.encode() for word in WORDS] + [(" " + word).encode() for word in WORDS]
    pieces += ["🙂".encode()[:2], "🙂".encode()[2:], " 中".encode()[:2], "文a".encode()[1:], b"x" + "é".encode()[:1]]
    tokens = [*letters.values(), *("".join(letters[bytes([b])] for b in piece) for piece in pieces)]
    return make_decoder(tokens, decoders.ByteLevel())


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: itself where it is printable, else the next code point from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(256, 512))
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]


def make_llama() -> Decoder:
    """SentencePiece with byte fallback, as Llama 2's: one leading space of the whole text is dropped."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + [w.replace(" ", "▁") for w in WORDS] + ["▁"]
    tokens += ["▁" + word for word in WORDS if " " not in word]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return make_decoder(tokens, decoders.Sequence(steps), byte_fallback=True)


def make_gemma() -> Decoder:
    """The same without dropping anything."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + [w.replace(" ", "▁") for w in WORDS] + ["▁", "▁the"]
    return make_decoder(
        tokens, decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    )


def make_metaspace() -> Decoder:
    return make_decoder(["▁" + word for word in WORDS] + ["▁", "ing", "s"], decoders.Metaspace())


DECODERS = {
    "byte level": make_byte_level(),
    "llama": make_llama(),
    "gemma": make_gemma(),
    "metaspace": make_metaspace(),
}
LLAMA, BYTES = DECODERS["llama"], DECODERS["byte level"]


def stream(
    decoder: Decoder, ids: Sequence[int], sizes: Sequence[int] = (1,), prompt: Sequence[int] = (), **params: object
) -> list[DetokenizedDelta]:
    """Append ``ids`` in chunks of ``sizes`` (repeated), the last one as finished; stops at a stop string."""
    detokenizer = IncrementalDetokenizer(decoder, SamplingParams(**params), prompt)
    deltas, start, turn = [], 0, 0
    while start < len(ids) or not deltas:
        end = start + sizes[turn % len(sizes)]
        deltas.append(detokenizer.append(ids[start:end], finished=end >= len(ids)))
        start, turn = end, turn + 1
        if deltas[-1].stop is not None:
            break
    return deltas


def text_of(deltas: Sequence[DetokenizedDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def token_lists(decoder: Decoder, max_size: int = 30) -> st.SearchStrategy[list[int]]:
    """Ids of words and special tokens as often as of bytes."""
    size = decoder.backend.get_vocab_size()
    return st.lists(st.one_of(st.integers(0, size - 1), st.integers(min(257, size // 2), size - 1)), max_size=max_size)


# Joined deltas are the whole


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3), skip=st.booleans())
def test_joined_deltas_are_the_decoded_whole(name: str, data: st.DataObject, sizes: list[int], skip: bool) -> None:
    decoder = DECODERS[name]
    ids = data.draw(token_lists(decoder))
    deltas = stream(decoder, ids, sizes, skip_special_tokens=skip)
    assert text_of(deltas) == decoder.decode(ids, skip_special_tokens=skip)
    assert sum(delta.token_count for delta in deltas) == len(ids)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_output_continues_its_prompt(name: str, data: st.DataObject) -> None:
    """Given a prompt that ends in a word, the text is what decoding prompt and output together adds."""
    decoder = DECODERS[name]
    prompt = [*data.draw(token_lists(decoder)), *decoder.ids("Ġcat" if name == "byte level" else "▁cat")]
    prompt = prompt if None not in prompt else [*prompt[:-1], *decoder.ids("▁the")]
    ids = data.draw(token_lists(decoder))
    assert text_of(stream(decoder, ids, prompt=prompt)) == decoder.decode(prompt + ids)[len(decoder.decode(prompt)) :]


@pytest.mark.parametrize("model", ["demo_gguf", "gemma_gguf"])
def test_joined_deltas_are_the_decoded_whole_with_real_vocabularies(model: str, request: pytest.FixtureRequest) -> None:
    """Random ids, and ids of single bytes: nonsense that a model with random weights would say."""
    tokenizer = load_gguf_tokenizer(request.getfixturevalue(model))
    pieces = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    random = Random(0)
    for _ in range(150):
        ids = random.choices(range(tokenizer.vocab_size), k=20)
        for _ in range(random.randrange(4)):
            place = random.randrange(20)
            ids[place:place] = random.choices(pieces, k=random.randrange(8))
        assert text_of(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_real_text_streams_with_little_delay(demo_gguf: Path) -> None:
    tokenizer = load_gguf_tokenizer(demo_gguf)
    text = "Zażółć gęślą jaźń. 水門は川の水を通す。 🙂👩‍👩‍👧 naïve — “quotes”\n\n\tcode(); ನಮಸ್ಕಾರ"
    deltas = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert text_of(deltas) == text
    assert max(map(len, "".join("x" if delta.text else "." for delta in deltas).split("x"))) <= 3


def test_sentencepiece_words_keep_their_spaces() -> None:
    """B19; and the first word its own, if it continues a prompt."""
    ids = LLAMA.ids("▁the", "▁cat", "▁sat")
    assert [delta.text for delta in stream(LLAMA, ids)] == ["the", " cat", " sat"]
    assert text_of(stream(LLAMA, ids, prompt=LLAMA.ids("<s>"))) == "the cat sat"
    assert text_of(stream(LLAMA, ids, prompt=LLAMA.ids("<s>", "▁it"))) == " the cat sat"


def test_decoding_each_token_alone_would_differ() -> None:
    """The property above is not vacuous: these lists are why a window is needed."""
    for decoder, ids in (
        (LLAMA, LLAMA.ids("▁the", "▁cat")),
        (LLAMA, LLAMA.ids("<0xE4>", "<0xB8>", "<0xAD>")),
        (LLAMA, LLAMA.ids("<0x41>", "<0xFF>")),
        (LLAMA, LLAMA.ids("<0x41>", "</s>", "<0xFF>")),
        (BYTES, BYTES.ids(*(byte_alphabet()[byte] for byte in "é".encode()))),
    ):
        assert "".join(decoder.decode([token_id]) for token_id in ids) != decoder.decode(ids)
        assert text_of(stream(decoder, ids)) == decoder.decode(ids)


@pytest.mark.parametrize("decoder", [BYTES, LLAMA], ids=["byte level", "llama"])
def test_a_character_appears_once_it_is_whole(decoder: Decoder) -> None:
    letters = byte_alphabet()
    spelled = [letters[b] if decoder is BYTES else f"<0x{b:02X}>" for b in "🙂".encode()]
    deltas = stream(decoder, [*decoder.ids("a", *spelled, "b")])
    assert [delta.text for delta in deltas if delta.text] in (["a", "🙂", "b"], ["a", "🙂b"])
    cut = stream(decoder, decoder.ids("a", *spelled[:3]))
    assert [delta.text for delta in cut[:-1]] == ["a", "", ""]
    assert cut[-1].text == decoder.decode(decoder.ids(*spelled[:3])) and "\ufffd" in cut[-1].text


@pytest.mark.parametrize("bad", range(26, 36))
def test_text_after_a_long_run_of_wrong_bytes(bad: int) -> None:
    """Wherever the run is let go, the character behind it stays whole."""
    letters = byte_alphabet()
    ids = BYTES.ids(*[letters[0xFF]] * bad, *(letters[byte] for byte in "🙂中".encode()), "a")
    assert text_of(stream(BYTES, ids)) == BYTES.decode(ids) == "\ufffd" * bad + "🙂中a"


def test_a_prompt_that_ends_in_wrong_bytes_does_not_spoil_the_output() -> None:
    spelled = LLAMA.ids(*(f"<0x{byte:02X}>" for byte in "中".encode()))
    assert text_of(stream(LLAMA, [*spelled, *LLAMA.ids("a")], prompt=LLAMA.ids("▁the", "<0xFF>"))) == "中a"


def test_long_runs_of_byte_pieces_are_streamed() -> None:
    """Text written in bytes alone does not wait for its end; nor does what is no text at all."""
    spelled = LLAMA.ids(*(f"<0x{b:02X}>" for b in ("မြန်မာ" * 20).encode()))
    deltas = stream(LLAMA, spelled)
    assert text_of(deltas) == "မြန်မာ" * 20
    quiet = max(len(run) for run in "".join("x" if delta.text else "." for delta in deltas).split("x"))
    assert quiet <= 33
    garbage = LLAMA.ids(*["<0xFF>"] * 200)
    assert text_of(stream(LLAMA, garbage)) == "\ufffd" * 200
    assert any(delta.text for delta in stream(LLAMA, garbage)[:40])


class Counting(Decoder):
    """Counts the tokens that are decoded."""

    decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("token", ["▁the", "▁", "<0x41>", "<0xFF>", "<s>", "\n"])
@pytest.mark.parametrize("first", ["▁cat", "<0xFF>", "<s>"])
def test_work_per_token_is_bounded(first: str, token: str) -> None:
    """Ten times the tokens are about ten times the work, whatever the tokens."""
    costs = []
    for repeats in (200, 2000):
        counting = Counting(LLAMA.backend)
        ids = LLAMA.ids(first, *[token] * repeats)
        stream(counting, ids, stop=["zz"])
        costs.append(counting.decoded)
    assert costs[1] < 12 * costs[0]


# Stop strings


@pytest.mark.parametrize(
    ("tokens", "stop", "text"),
    [
        ([" ipsum", " dolor", " sit"], ["lo"], " ipsum do"),
        ([" sit", " amet"], ["it am"], " s"),
        (["ab", "cd"], ["abcd", "bc"], "a"),
        (["ab", "cd"], ["cd", "abcd"], ""),
        (["a", "b", "c"], ["abx", "c"], "ab"),
        (["no", "thing"], ["nothing at all"], "nothing"),
        (["aa", "ab"], ["aab"], "a"),
        (["end"], ["end"], ""),
    ],
)
def test_stop_strings_cut_at_the_character(tokens: list[str], stop: list[str], text: str) -> None:
    """B03; the stop string completed first wins, of those the one that began first."""
    decoder = make_decoder(tokens, decoders.Fuse())
    deltas = stream(decoder, decoder.ids(*tokens), stop=tuple(stop))
    assert text_of(deltas) == text
    kept = text_of(stream(decoder, decoder.ids(*tokens), stop=tuple(stop), include_stop_str_in_output=True))
    assert kept == text + (deltas[-1].stop or "")


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab", "é"]), max_size=12),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_stop_strings_do_not_depend_on_how_text_is_cut(pieces: list[str], stops: list[str], sizes: list[int]) -> None:
    decoder = make_decoder(["a", "b", "ab", "ba", "aab", "é"], decoders.Fuse())
    whole = "".join(pieces)
    hits = [(whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole]
    deltas = stream(decoder, decoder.ids(*pieces), sizes, stop=tuple(stops))
    if not hits:
        assert text_of(deltas) == whole and deltas[-1].stop is None
        return
    end, start, stop = min(hits)
    assert (text_of(deltas), deltas[-1].stop) == (whole[:start], stop)
    lengths = [len("".join(pieces[: count + 1])) for count in range(len(pieces))]
    assert sum(delta.token_count for delta in deltas) == 1 + next(
        i for i, length in enumerate(lengths) if length >= end
    )


@settings(max_examples=80, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=12),
    stop=st.text("ab", min_size=1, max_size=4),
)
def test_no_more_is_held_back_than_could_begin_a_stop_string(pieces: list[str], stop: str) -> None:
    decoder = make_decoder(["a", "b", "ab"], decoders.Fuse())
    detokenizer = IncrementalDetokenizer(decoder, SamplingParams(stop=(stop,)))
    whole = released = ""
    for piece in pieces:
        whole += piece
        delta = detokenizer.append(decoder.ids(piece), finished=False)
        released += delta.text
        if delta.stop:
            break
        assert stop not in whole and whole.startswith(released)
        held = [n for n in range(len(stop)) if whole.endswith(stop[:n])]
        assert whole[len(released) :] == stop[: max(held)]


def test_tokens_after_a_stop_string_are_dropped() -> None:
    ids = LLAMA.ids("▁the", "▁cat", "▁sat", "▁it")
    detokenizer = IncrementalDetokenizer(LLAMA, SamplingParams(stop=("t s",)))
    assert detokenizer.append(ids, finished=True) == DetokenizedDelta("the ca", 3, "t s")
    assert detokenizer.append(ids, finished=True) == DetokenizedDelta("", 0, "t s")


def test_a_stop_string_in_byte_pieces_stops_at_once() -> None:
    """The newline of a Llama 2 is a byte piece, which waits for its neighbour; a stop string does not."""
    deltas = stream(LLAMA, LLAMA.ids("▁the", "<0x0A>", "<0x0A>", "▁cat"), stop=("\n\n",))
    assert [delta.text for delta in deltas] == ["the", "", ""] and deltas[-1].stop == "\n\n"


def test_stop_strings_wait_for_min_tokens() -> None:
    """B37: they do not apply to the first min_tokens tokens, nor across their end."""
    ids = LLAMA.ids(*["▁the", "\n"] * 8)
    deltas = stream(LLAMA, ids, stop=("\n",), min_tokens=10)
    assert sum(delta.token_count for delta in deltas) == 12
    assert text_of(deltas) == LLAMA.decode(ids[:11])
    assert text_of(stream(LLAMA, ids, stop=("\n the",), min_tokens=2)) == LLAMA.decode(ids[:3])


def test_the_stop_token_that_ended_it_is_counted_but_not_shown() -> None:
    ids = LLAMA.ids("▁the", "stop")
    params = {"stop_token_ids": tuple(LLAMA.ids("stop"))}
    deltas = stream(LLAMA, ids, **params)
    assert text_of(deltas) == "the" and sum(delta.token_count for delta in deltas) == 2
    assert text_of(stream(LLAMA, ids, include_stop_str_in_output=True, **params)) == "thestop"
    assert text_of(stream(LLAMA, LLAMA.ids("stop", "▁the"), **params)) == "stop the"


def test_special_tokens_are_hidden_or_shown() -> None:
    ids = LLAMA.ids("▁the", "</s>", "<tool>", "▁cat")
    assert text_of(stream(LLAMA, ids)) == "the<tool> cat"
    assert text_of(stream(LLAMA, ids, skip_special_tokens=False)) == "the</s><tool> cat"


def test_finishing_without_tokens_releases_what_is_held() -> None:
    detokenizer = IncrementalDetokenizer(LLAMA, SamplingParams(stop=("cats",)))
    assert detokenizer.append(LLAMA.ids("▁the", "▁cat"), finished=False).text == "the "
    assert detokenizer.append([], finished=True) == DetokenizedDelta("cat", 0)


def test_a_tokenizer_may_know_decode_alone() -> None:
    class Plain:
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            return "".join(map(chr, ids))

    detokenizer = IncrementalDetokenizer(Plain(), SamplingParams())
    assert detokenizer.append([104, 105], finished=True) == DetokenizedDelta("hi", 2)
