"""Which tokens end an answer, as far as a model's files tell: ids in its configs, control tokens of a known name.

Knows config keys and tokens' names; refuses to know file formats. Every source counts, because each leaves some out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Control tokens that end a turn or a text, whatever key names them: many files give only one of a model's several.
_MARKERS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<｜end▁of▁sentence｜>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
    }
)


def config_end_tokens(*configs: Mapping[str, Any]) -> frozenset[int]:
    """Every id that any of these configs ends an answer on; a multi-modal model's text config is nested in its own."""
    nested = [config["text_config"] for config in configs if isinstance(config.get("text_config"), Mapping)]
    return frozenset(index for config in (*configs, *nested) for index in token_ids(config.get("eos_token_id")))


def token_ids(value: object) -> Iterator[int]:
    """The ids that a config's value holds: one or a list of them; what can be no id is passed over."""
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            yield item


def marked_end_tokens(control_tokens: Mapping[str, int]) -> list[int]:
    """The ids, in the mapping's order, of those ``control_tokens`` (text -> id) whose name says that they end."""
    # Where a model returns, "end" only ends a message, and its answer has several.
    passed_over = {"<|end|>"} if "<|return|>" in control_tokens else set()
    return [index for text, index in control_tokens.items() if text in _MARKERS - passed_over]
