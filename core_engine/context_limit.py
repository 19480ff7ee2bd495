"""How many tokens a request may generate: one rule, for whoever builds its prompt and for the engine itself."""

from __future__ import annotations

from suimon.core_engine.errors import ContextLengthError


def resolve_max_tokens(
    num_prompt_tokens: int, max_tokens: int | None, limit: int, *, origin: str = "", param: str = "messages"
) -> int:
    """What is left of ``limit``, the most tokens a sequence can have, if ``max_tokens`` is None; else ``max_tokens``.

    ``origin`` says where the limit comes from if not from the model. Raises ContextLengthError, with the three numbers
    and naming ``param``, if the request can never fit.
    """
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt_tokens + wanted <= limit:
        return limit - num_prompt_tokens if max_tokens is None else max_tokens
    raise ContextLengthError(
        f"the maximum context length is {limit} tokens{origin}, but {num_prompt_tokens} prompt tokens plus max_tokens "
        f"{wanted} make {num_prompt_tokens + wanted}: shorten the prompt or lower max_tokens",
        param=param,
    )
