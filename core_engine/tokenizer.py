"""Text to token ids and back. Knows vocabularies, special tokens and when a prompt begins with BOS; no chat messages.

``load_tokenizer`` reads a Hugging Face folder (here) or a GGUF file (gguf_tokenizer.py); both become one ``Tokenizer``
over the ``tokenizers`` library. transformers is never imported: it would cost seconds of every start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from suimon.core_engine.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_ID_LIMIT = 1 << 32  # ids are unsigned 32-bit numbers in the tokenizers library
MANY_IDS = 4096  # take milliseconds to decode, and are decoded without the interpreter's lock


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads; long work releases the GIL.

    ``backend`` is the ``tokenizers.Tokenizer`` underneath, whose post-processor adds BOS and EOS.
    ``special_tokens`` are the named ones as text (``bos_token``, ``eos_token``, ...), which chat templates read.
    ``eos_token_ids`` are all ids that end an answer, from every source that names one.
    ``content_hash`` is a sha256 hex digest that changes when the ids of some text do.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int],
        chat_template: str | None,
        content_hash: str,
        max_token_chars: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.content_hash = content_hash
        self.bos_token_id = self._named("bos_token")
        self.eos_token_id = self._named("eos_token")
        named_eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = frozenset((*eos_token_ids, *named_eos))
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), *(index + 1 for index in added), 0)
        self._added_ids = frozenset(added)
        self._max_token_chars = max_token_chars
        framed = backend.encode("", add_special_tokens=True).ids
        self.add_bos = self.bos_token_id is not None and framed[:1] == [self.bos_token_id]
        self.add_eos = self.eos_token_id is not None and framed[1 if self.add_bos else 0 :] == [self.eos_token_id]

    def _named(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_chars: int | None = None) -> list[int]:
        """Token ids of ``text``; special markers written in it become their ids, as the Hugging Face tokenizer does.

        Raises ContextLengthError for more than ``max_chars`` characters, before any work is done on them, and
        InvalidRequestError for text that cannot be UTF-8.
        """
        check_text(text, max_chars, "prompt")
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: only batches are encoded without the interpreter's lock, which the event loop needs meanwhile.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, max_chars: int | None = None
    ) -> list[list[int]]:
        """``encode`` of each text."""
        for text in texts:
            check_text(text, max_chars, "prompt")
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_chat(self, text: str, *, max_chars: int | None = None) -> list[int]:
        """Token ids of a rendered chat template: exactly one BOS where the model wants one.

        The template writes its own special tokens, so none are added; only where it did not begin with BOS and the
        tokenizer begins every prompt with it, BOS is put in front.
        """
        check_text(text, max_chars, "messages")
        ids = self._encode(text, add_special_tokens=False)
        if self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD. Ids that the vocabulary lacks give nothing."""
        if ids:
            check_id(min(ids))
            check_id(max(ids))
        if len(ids) <= MANY_IDS:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]  # as in _encode

    def token_text(self, index: int) -> str:
        """The token as it stands in the vocabulary (``Ġthe``, ``▁the``, ``<0x0A>``), "" if there is none."""
        check_id(index)
        return self.backend.id_to_token(index) or ""

    def token_bytes(self, index: int) -> bytes:
        """What the token adds to the text, as bytes: often no complete UTF-8 by itself."""
        text = self.token_text(index)
        if self._kind == "bytes":
            return _printable_to_bytes(text)
        if self._kind == "pieces":
            return _piece_to_bytes(text, index in self._added_ids)
        return text.encode()

    @cached_property
    def _kind(self) -> str:
        """How the vocabulary writes bytes: "bytes" (GPT-2's printable characters), "pieces" (SentencePiece), "text"."""
        decoder = self.backend.decoder
        state = decoder.__getstate__().decode() if decoder is not None else ""
        if '"ByteLevel"' in state:
            return "bytes"
        return "pieces" if '"ByteFallback"' in state or '"Metaspace"' in state or "▁" in state else "text"

    @cached_property
    def _longest_token(self) -> int:
        return self._max_token_chars or max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    def max_chars_for(self, max_model_len: int) -> int:
        """The most characters that ``max_model_len`` tokens can hold: no token stands for more than the longest one.

        A longer text is refused before the work of encoding it. (Characters that Unicode normalisation would join
        are counted apart, and room is left for three of them to become one.)
        """
        return 3 * self._longest_token * max_model_len


def check_text(text: str, max_chars: int | None, param: str) -> None:
    """Raise ContextLengthError if ``text`` is longer than ``max_chars``, InvalidRequestError if it is not Unicode."""
    if max_chars is not None and len(text) > max_chars:
        message = f"the {param} has {len(text)} characters, and the model's context holds at most {max_chars}"
        raise ContextLengthError(message, param=param)
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        message = f"the {param} has half of a surrogate pair at character {error.start}, which is no Unicode text"
        raise InvalidRequestError(message, param=param) from error


def check_id(index: int) -> None:
    """Raise InvalidRequestError for a number that can be no token id of any vocabulary."""
    if not 0 <= index < _ID_LIMIT:
        raise InvalidRequestError(f"{index} is no token id", param="tokens")


# GPT-2 writes each byte as one printable character: itself where it is printable, else the next code point from 256 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + offset): byte for offset, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}


def _printable_to_bytes(text: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in text])
    except KeyError:
        return text.encode()  # an added token, written as it is


def _piece_to_bytes(piece: str, added: bool) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") and not added:
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def frame_with(backend: Backend, *, bos: str | None, eos: str | None) -> None:
    """Let ``backend`` put the token ``bos`` before and ``eos`` behind every text (None: nothing)."""
    from tokenizers import processors

    tokens = [token for token in (bos, eos) if token is not None]
    pieces = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(tokens)]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)


def load_tokenizer(path: str | os.PathLike[str], *, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of the model at ``path``: a folder in Hugging Face's layout, or a GGUF file.

    ``cache_dir`` (default: the user's cache folder) keeps what is slow to compute; it may be unwritable.
    Raises ModelLoadError, or UnsupportedModelError for a kind of tokenizer that is not known here, naming the file.
    """
    from suimon.core_engine.loader.cache import default_cache_dir

    path, cache_dir = Path(path), cache_dir or default_cache_dir() / "tokenizers"
    if path.is_dir():
        from suimon.core_engine.tokenizer_folder import load_folder

        return load_folder(path, cache_dir)
    from suimon.core_engine.gguf_tokenizer import load_gguf_tokenizer

    return load_gguf_tokenizer(path, cache_dir)
