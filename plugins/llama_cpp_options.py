"""Options of a model that llama.cpp serves, read from its ``[models.options]`` table and checked.

Knows names, types and ranges; refuses to know the library, so that the gateway can check a configuration without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

INSTALL_HINT = 'pip install "suimon[llama-cpp]"'
Threads = Annotated[int, Meta(ge=1, le=1024)]
Count = Annotated[int, Meta(ge=1)]
CacheType = Literal["f16", "f32", "bf16", "q8_0"]


class LlamaCppOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the library is told. None leaves the choice to us, and ``describe`` says what it became."""

    n_gpu_layers: Annotated[int, Meta(ge=-1)] | None = None  # -1: all; default: all if the library has a GPU
    main_gpu: Annotated[int, Meta(ge=0)] = 0  # the GPU that holds what is not split
    n_threads: Threads | None = None  # where each sequence computes one token; default: num_threads, or all cores
    n_threads_batch: Threads | None = None  # where there are more tokens than sequences; default: n_threads
    n_ubatch: Count = 512  # tokens the library computes at once
    type_k: CacheType = "f16"  # KV cache; q8_0 takes half the memory
    type_v: CacheType = "f16"
    flash_attention: Literal["auto", "on", "off"] = "auto"
    kv_unified: bool | None = None  # one pool of KV for all; default: if there is no room for a whole context for each
    use_mmap: bool = True  # map the weights instead of reading them
    use_mlock: bool = False  # keep them from being swapped out
    max_kept_tokens: Annotated[int, Meta(ge=0)] | None = None  # of ended sequences, for reuse; default: see docs
    embedding: bool | None = None  # serve embeddings instead of text; default: if the file says that it is made for it
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"  # tokens to one vector; auto: as the file says


class OptionError(ValueError):
    """An option is not known or has a value of a wrong kind; ``option`` is its name."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"options.{option}: {problem}")
        self.option = option


def read_options(given: Mapping[str, Any]) -> LlamaCppOptions:
    """Check ``given``. Raises OptionError naming the option, what is wrong with it and what there is."""
    known = [field.name for field in msgspec.structs.fields(LlamaCppOptions)]
    for name in given:
        if name not in known:
            raise OptionError(name, f"is not known; the options of llama_cpp are {', '.join(known)}")
    try:
        options = msgspec.convert(dict(given), LlamaCppOptions)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$.")
        raise OptionError(path.rstrip("`") or "?", said.replace("`", "")) from None
    if options.type_v == "q8_0" and options.flash_attention == "off":
        raise OptionError("type_v", "q8_0 needs flash_attention, which is off")
    return options
