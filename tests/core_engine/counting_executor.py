"""An executor without a model, for tests of processes: the token after t is t + 1, so every answer is known beforehand.

Loaded in the engine process by EngineConfig.executor = "counting_executor:CountingExecutor"; how it misbehaves is read
from ``behaviour.json`` in the model's folder, which a test may rewrite between two engines.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from suimon.core_engine.batch import ScheduledBatch
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.executor import ExecutorCapabilities, ExecutorDeadError, ForwardExecutor

VOCAB_SIZE = 300
EOS = 299
POISON = 290  # a prompt with this token kills the process that computes it
ENDLESS = 291  # one with this token is computed for longer than anybody waits
FAILING = 292  # one with this token makes the executor raise
BREAKING = 293  # one with this token makes it say that it cannot go on


TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def write_model(folder: Path, **behaviour: object) -> Path:
    """What the executor and its client read: ``behaviour``, and a tokenizer for which "5 6" is the tokens 5 and 6."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {str(number): number for number in range(EOS)} | {"<end>": EOS}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "behaviour.json").write_text(json.dumps(behaviour))
    return folder


class CountingExecutor(ForwardExecutor):
    eos_token_ids = (EOS,)
    plan = ("counts",)

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        super().__init__()
        self._behaviour = json.loads((model_path / "behaviour.json").read_text())
        self._capabilities = ExecutorCapabilities(
            vocab_size=VOCAB_SIZE,
            max_model_len=config.max_model_len or 4096,
            num_blocks=config.num_blocks or 512,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs or 64,
            embeds=self._behaviour.get("embeds", False),
        )
        time.sleep(self._behaviour.get("load_seconds", 0.0))
        if message := self._behaviour.get("fail_load"):
            raise ModelLoadError(message)
        if self._behaviour.get("die_loading"):
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return self._capabilities

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        time.sleep(self._behaviour.get("step_seconds", 0.0))
        tokens = [t for s in batch.sequences for t in s.token_ids[len(s.token_ids) - s.num_logits :]]
        self._misbehave({t for s in batch.sequences if s.start == 0 for t in s.token_ids})
        logits = torch.zeros(len(tokens), VOCAB_SIZE)
        following = torch.tensor([(t + 1) % EOS for t in tokens], dtype=torch.int64)
        return logits.scatter_(1, following[:, None], 20.0)

    def embed(self, token_ids: Sequence[int]) -> list[float]:
        time.sleep(self._behaviour.get("embed_seconds", 0.0))
        self._misbehave(set(token_ids))
        return [float(token_ids[0]), len(token_ids) / 8]

    def _misbehave(self, prompt_tokens: set[int]) -> None:
        if POISON in prompt_tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if ENDLESS in prompt_tokens:
            time.sleep(600)
        if FAILING in prompt_tokens:
            raise RuntimeError("no luck at 0x7f0011223344 in /usr/lib/secret/module.py")
        if BREAKING in prompt_tokens:
            raise ExecutorDeadError("broken beyond repair")
