"""The tokenizer of a folder in Hugging Face's layout. Knows which file says what, and which one wins.

tokenizer.json                the tokenizer itself; without it tokenizer.model (SentencePiece BPE) is read
tokenizer_config.json         named special tokens, add_bos_token, further added tokens, chat template
special_tokens_map.json       named special tokens that the config does not name
chat_template.jinja, .json    the chat template; they win over the config's
generation_config.json, config.json     ids that end an answer
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.loader.end_tokens import config_end_tokens, token_ids
from suimon.core_engine.loader.json_file import read_object_if_there
from suimon.core_engine.tokenizer import Tokenizer, frame_with

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend


def load_folder(folder: Path, cache_dir: Path | None) -> Tokenizer:
    """The tokenizer in ``folder``; raises ModelLoadError naming the file that is missing or wrong."""
    config = read_object_if_there(folder / "tokenizer_config.json")
    model_config = read_object_if_there(folder / "config.json")
    backend, digest = _backend(folder, cache_dir)
    special_tokens = _special_tokens(config, read_object_if_there(folder / "special_tokens_map.json"))
    _name_by_id(backend, special_tokens, model_config)
    _add_missing(backend, config, special_tokens)
    if "add_bos_token" in config or "add_eos_token" in config:
        frame_with(
            backend,
            bos=special_tokens.get("bos_token") if config.get("add_bos_token") else None,
            eos=special_tokens.get("eos_token") if config.get("add_eos_token") else None,
        )
    digest.update(json.dumps(config, sort_keys=True).encode())
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=config_end_tokens(read_object_if_there(folder / "generation_config.json"), model_config),
        chat_template=_chat_template(folder, config),
        content_hash=digest.hexdigest(),
    )


def _backend(folder: Path, cache_dir: Path | None) -> tuple[Backend, hashlib._Hash]:
    from suimon.core_engine.spm_model import load_spm_model

    path = folder / "tokenizer.json"
    if path.is_file():
        content = path.read_bytes()
        return _parse(path, content), hashlib.sha256(content)
    path = folder / "tokenizer.model"
    if path.is_file():
        content = path.read_bytes()
        return load_spm_model(content, source=path, cache_dir=cache_dir), hashlib.sha256(content)
    raise ModelLoadError(f"{folder}: has neither tokenizer.json nor tokenizer.model, so its text cannot be read")


def _parse(path: Path, content: bytes) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_buffer(content)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelLoadError(f"{path}: is no tokenizer that the tokenizers library reads: {error}") from error


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens (``..._token``) as text; of several sources the first that names one wins."""
    tokens: dict[str, str] = {}
    for source in sources:
        named = [(name, _token_text(value)) for name, value in source.items() if name.endswith("_token")]
        for name, text in named:
            if text is not None:
                tokens.setdefault(name, text)
    return tokens


def _token_text(value: object) -> str | None:
    """A token is written as its text, or as an object that also says how it is matched."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _name_by_id(backend: Backend, special_tokens: dict[str, str], model_config: Mapping[str, Any]) -> None:
    """Where no tokenizer file names BOS or EOS, the model's own config may give the id."""
    for name in ("bos_token", "eos_token"):
        ids = list(token_ids(model_config.get(name + "_id")))
        text = backend.id_to_token(ids[0]) if ids and name not in special_tokens else None
        if text is not None:
            special_tokens[name] = text


def _add_missing(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Tokens that the config adds to what tokenizer.json has."""
    decoder = config.get("added_tokens_decoder")
    entries = sorted(decoder.items(), key=lambda item: int(item[0])) if isinstance(decoder, dict) else []
    listed = [_added_token(entry) for _, entry in entries if isinstance(entry, dict) and _token_text(entry)]
    known = set(backend.get_added_tokens_decoder().values())
    backend.add_tokens([token for token in listed if token not in known])
    texts = [text for name, text in special_tokens.items() if name in ("bos_token", "eos_token", "pad_token")]
    backend.add_special_tokens([text for text in texts if backend.token_to_id(text) is None])


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    from tokenizers import AddedToken

    flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(str(entry["content"]), **flags)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_object_if_there(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template if isinstance(entry, dict) and "name" in entry}
        template = named.get("default")
    return template if isinstance(template, str) and template else None
