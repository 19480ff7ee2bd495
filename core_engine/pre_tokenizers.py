"""How byte-level BPE tokenizers cut text before merging, by the name that a GGUF file gives (``tokenizer.ggml.pre``).

Knows the patterns, and which names share one; refuses to know vocabularies. A merge never crosses a cut, so a wrong
pattern gives text that looks right and other token ids: a name that is not in the table is refused, never guessed.

The patterns are those of the models' own ``tokenizer.json``, in the Oniguruma syntax that ``tokenizers`` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from suimon.core_engine.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer as Component

# One cut: ("split", pattern) isolates each match; ("digits", individually) isolates digits or runs of them;
# ("punctuation", behaviour); ("bytes", use_regex) maps bytes to printable characters, and with True cuts as GPT-2 did.
Step = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The cuts in their order, and the habits of the tokenizers that use them.

    ``nfc``: text is brought to Unicode NFC first. ``ignore_merges``: a piece that is itself a token is taken whole,
    whatever the merges say. ``add_bos``: what holds when the file does not say whether a prompt begins with BOS.
    """

    steps: tuple[Step, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> Component:
        """The ``tokenizers`` pre-tokenizer."""
        from tokenizers import pre_tokenizers

        components = [_BUILDERS[kind](argument) for kind, argument in self.steps]
        return components[0] if len(components) == 1 else pre_tokenizers.Sequence(components)


def _split(pattern: str) -> Component:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _digits(individually: bool) -> Component:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Digits(individual_digits=individually)


def _punctuation(behaviour: str) -> Component:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Punctuation(behaviour)


def _bytes(use_regex: bool) -> Component:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


_BUILDERS: Mapping[str, Callable[[Any], Component]] = {
    "split": _split,
    "digits": _digits,
    "punctuation": _punctuation,
    "bytes": _bytes,
}

# --- the parts that patterns are made of

_GPT2: Step = ("bytes", True)
_BYTES: Step = ("bytes", False)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_KANA_AND_HAN = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


def _words_and_digits(digits: str, *, contraction: str = _CONTRACTION + "|", newlines: str = r"[\r\n]*") -> Step:
    """Words with one leading symbol, ``digits``, symbols with the line breaks behind them, white space."""
    symbols = rf" ?[^\s\p{{L}}\p{{N}}]+{newlines}"
    return ("split", rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{symbols}|{_SPACES}")


def _cased_words(digits: str, contraction: str) -> Step:
    """As above, and a word is cut where lower case turns into upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}"
    return ("split", rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")


_LLAMA3 = _words_and_digits(r"\p{N}{1,3}")
_QWEN2 = _words_and_digits(r"\p{N}")
_GPT4O = _cased_words(r"\p{N}{1,3}", _CONTRACTION + "?")
_QWEN35: Step = (
    "split",
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK3_WORDS = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3: tuple[Step, ...] = (
    ("split", r"\p{N}{1,3}"),
    ("split", _KANA_AND_HAN),
    ("split", _DEEPSEEK3_WORDS),
    _BYTES,
)
_BLOOM: Step = ("split", r" ?[^(\s|[.,!?…。，、।۔،])]+")

# Every letter that has case, and a few signs (DeepSeek LLM lists them one by one).
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-"
    "ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_HAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM: tuple[Step, ...] = (
    ("split", "[\r\n]"),
    ("split", rf"\s?[{_DEEPSEEK_LETTERS}]+"),
    ("split", r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
    ("split", r"\s+$"),
    ("split", _DEEPSEEK_HAN),
    ("digits", True),
    _BYTES,
)
_DEEPSEEK_CODER: tuple[Step, ...] = (
    ("split", "[\r\n]"),
    ("split", r"\s?\p{L}+"),
    ("split", r"\s?\p{P}+"),
    ("split", _DEEPSEEK_HAN),
    ("digits", True),
    _BYTES,
)
_FALCON: tuple[Step, ...] = (
    ("punctuation", "contiguous"),
    _GPT2,
    ("digits", False),
    ("split", "[0-9][0-9][0-9]"),
)
# What files got whose converter did not know the model.
_DEFAULT: tuple[Step, ...] = (
    ("split", r"[\p{P}\$\+<=>\^~\|]+"),
    _GPT2,
    ("digits", False),
    ("split", "[0-9][0-9][0-9]"),
)

# --- the table: the names that share a pre-tokenizer, and it

_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer(_DEFAULT)),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    ("mpt olmo", PreTokenizer((_GPT2,), nfc=True)),
    (
        "smollm starcoder refact codeshell exaone minerva-7b mellum2",
        PreTokenizer((("digits", True), _GPT2)),
    ),
    ("command-r", PreTokenizer((("digits", True), _GPT2), nfc=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3, _BYTES), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3, _BYTES))),
    ("glm4 glm5", PreTokenizer((_LLAMA3, _BYTES), ignore_merges=True)),
    ("minicpm5", PreTokenizer((("split", r"\p{N}{1,3}"), _words_and_digits(r"\p{N}+"), _BYTES), ignore_merges=True)),
    ("qwen2 deepseek-r1-qwen megrez", PreTokenizer((_QWEN2, _BYTES), nfc=True)),
    ("stablelm2 hunyuan kormo f2llmv2 grok-2 solar-open", PreTokenizer((_QWEN2, _BYTES))),
    ("qwen35", PreTokenizer((_QWEN35, _BYTES), nfc=True)),
    ("deepseek-llm", PreTokenizer(_DEEPSEEK_LLM)),
    ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", PreTokenizer(_DEEPSEEK3)),
    ("falcon", PreTokenizer(_FALCON)),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM, _BYTES))),
    ("viking", PreTokenizer((_BLOOM, ("digits", True), _BYTES))),
    ("tekken", PreTokenizer((_cased_words(r"\p{N}", ""), _BYTES), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((_GPT4O, _BYTES))),
    ("superbpe", PreTokenizer((("split", r"\p{N}+"), ("split", r"(?=(\d{3})+(?!\d))"), _BYTES))),
    (
        "seed-coder",
        PreTokenizer(
            (
                (
                    "split",
                    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
                ),
                _BYTES,
            )
        ),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                (
                    "split",
                    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
                    r"|\s*[\r\n]|\s+(?!\S)|\s+",
                ),
                _BYTES,
            )
        ),
    ),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: entry for names, entry in _FAMILIES for name in names.split()}


def pre_tokenizer(name: str, source: object) -> PreTokenizer:
    """The pre-tokenizer called ``name``; raises UnsupportedModelError naming ``source`` and the known names."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(
            f"{source}: tokenizer.ggml.pre is {name[:80]!r}, a way of cutting text that is not known here, so its "
            f"token ids would be wrong. Known: {known}. The same model as a Hugging Face folder brings its own."
        )
    return PRE_TOKENIZERS[name]
