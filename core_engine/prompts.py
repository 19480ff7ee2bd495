"""From what a user wrote to token ids that the engine may be given: rendering, encoding, and every check of lengths.

Blocking, and to be called off the event loop. Knows the tokenizer, the chat template and the model's limits; knows
neither processes nor queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from suimon.core_engine.chat_template import ChatTemplateRenderer, load_chat_template
from suimon.core_engine.context_limit import resolve_max_tokens
from suimon.core_engine.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from suimon.core_engine.loader.unreadable import unreadable_files_named
from suimon.core_engine.request import EngineRequest, Message
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.tokenizer import Tokenizer, check_text, load_tokenizer


class PromptBuilder:
    """``vocab_size`` and ``max_model_len`` (tokens, prompt and output together) are the engine's."""

    def __init__(
        self, tokenizer: Tokenizer, renderer: ChatTemplateRenderer, vocab_size: int, max_model_len: int
    ) -> None:
        self.tokenizer = tokenizer
        self._renderer = renderer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_chars = tokenizer.max_chars_for(max_model_len)

    def build(self, request: EngineRequest) -> tuple[list[int], SamplingParams]:
        """The prompt's token ids, and the sampling parameters with ``max_tokens`` resolved.

        Raises InvalidRequestError for what the model cannot be asked, ContextLengthError for what does not fit.
        """
        request.sampling.check_vocabulary(self._vocab_size)
        token_ids = self.encode(request)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: it must have at least one token", param=_param(request))
        return token_ids, self._within_context(request, len(token_ids))

    def encode(self, request: EngineRequest) -> list[int]:
        """The token ids of the prompt or the rendered messages, of any number."""
        if request.messages is not None:
            return self.tokenizer.encode_chat(self._render(request, request.messages), max_chars=self._max_chars)
        if isinstance(request.prompt, str):
            return self.tokenizer.encode(
                request.prompt, add_special_tokens=request.add_special_tokens, max_chars=self._max_chars
            )
        token_ids = list(request.prompt or ())
        self._check_ids(token_ids, "prompt")
        return token_ids

    def build_inputs(self, inputs: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """The token ids of inputs to embed. Raises InvalidRequestError for one that is empty or has other ids.

        ContextLengthError, with the numbers, for one that is too long: it is not cut.
        """
        return [self._build_input(index, item) for index, item in enumerate(inputs)]

    def _build_input(self, index: int, item: str | Sequence[int]) -> list[int]:
        if isinstance(item, str):
            check_text(item, self._max_chars, "input")
            token_ids = self.tokenizer.encode(item)
        else:
            token_ids = list(item)
            self._check_ids(token_ids, "input")
        if not token_ids:
            raise InvalidRequestError(f"input {index} is empty: it must have at least one token", param="input")
        if len(token_ids) > self._max_model_len:
            message = f"input {index} has {len(token_ids)} tokens, and the model takes up to {self._max_model_len}"
            raise ContextLengthError(message, param="input")
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ``token_ids``. Raises InvalidRequestError for an id outside the vocabulary."""
        self._check_ids(token_ids, "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        """End the template's worker processes; blocks while they render."""
        self._renderer.close()

    def _render(self, request: EngineRequest, messages: Sequence[Message]) -> str:
        return self._renderer.render(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_kwargs=request.chat_template_kwargs,
        )

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise InvalidRequestError(f"token ids must be from 0 to {self._vocab_size - 1}", param=param)

    def _within_context(self, request: EngineRequest, num_prompt_tokens: int) -> SamplingParams:
        sampling = request.sampling
        max_tokens = resolve_max_tokens(
            num_prompt_tokens, sampling.max_tokens, self._max_model_len, param=_param(request)
        )
        return sampling if max_tokens == sampling.max_tokens else replace(sampling, max_tokens=max_tokens)


def _param(request: EngineRequest) -> str:
    return "prompt" if request.messages is None else "messages"


def load_text_side(model_path: str, chat_template: str | None) -> tuple[Tokenizer, ChatTemplateRenderer]:
    """The tokenizer and the template renderer of the model at ``model_path``, the latter's workers starting.

    ``chat_template`` replaces the model's own: Jinja text or the path of a file. Raises ModelLoadError.
    """
    with unreadable_files_named():
        tokenizer = load_tokenizer(model_path)
    template = tokenizer.chat_template if chat_template is None else load_chat_template(chat_template)
    renderer = ChatTemplateRenderer(template, tokenizer.special_tokens)
    renderer.start()
    if chat_template is not None:  # whoever chose it is there to mend it; a model's own costs only the chats
        _check(renderer)
    return tokenizer, renderer


def _check(renderer: ChatTemplateRenderer) -> None:
    try:
        renderer.check()
    except ModelLoadError:
        renderer.close()
        raise
