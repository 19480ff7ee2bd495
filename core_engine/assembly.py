"""Puts an engine together: the executor that a configuration names, and the engine loop around it.

The one place that both doors share: the engine process and the offline LLM. An executor of somebody else's is made as
``Class(config, model_path)``; it is a StepExecutor, and may have the attributes ``eos_token_ids`` (ints), ``plan``
(lines for people) and ``model_version`` (enters the keys of the prefix cache).
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from suimon.core_engine.batch import ScheduledBatch, ScheduledSequence
from suimon.core_engine.config import NATIVE_EXECUTOR, EngineConfig
from suimon.core_engine.engine import Engine
from suimon.core_engine.errors import InvalidRequestError
from suimon.core_engine.executor import ForwardExecutor
from suimon.core_engine.loader.end_tokens import config_end_tokens
from suimon.core_engine.loader.unreadable import unreadable_files_named

UNLIMITED = sys.maxsize  # whoever feeds the engine has its own limit, which counts what runs as well as what waits


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and for people what ``auto`` became, one line each."""

    engine: Engine
    plan: tuple[str, ...]


def build_engine(config: EngineConfig, model_path: str) -> BuiltEngine:
    """Load the model and make the engine. Raises ModelLoadError, and InvalidRequestError for an unusable option."""
    config = replace(config, max_num_queued_requests=UNLIMITED)
    if config.executor == NATIVE_EXECUTOR:
        with unreadable_files_named():
            return _build_native(config, model_path)
    executor = load_class(config.executor)(config, Path(model_path))
    ends, version = getattr(executor, "eos_token_ids", ()), getattr(executor, "model_version", "")
    return BuiltEngine(Engine(executor, config, ends, model_version=version), tuple(getattr(executor, "plan", ())))


def _build_native(config: EngineConfig, model_path: str) -> BuiltEngine:
    from suimon.core_engine.loader import open_checkpoint
    from suimon.core_engine.model_runner import ModelRunner

    checkpoint = open_checkpoint(Path(model_path))
    runner = ModelRunner.load(config, checkpoint)
    resolved = replace(config, max_num_batched_tokens=runner.plan.max_num_batched_tokens)
    _warm_up(runner)
    ends = config_end_tokens(checkpoint.generation_config, checkpoint.config)
    engine = Engine(runner, resolved, ends, model_version=checkpoint.content_hash)
    return BuiltEngine(engine, tuple(runner.plan.describe().splitlines()))


def _warm_up(executor: ForwardExecutor) -> None:
    """Put one token through the model: what compiles or maps memory at first use does so while loading, not serving.

    It is written to a slot of a block that nobody holds, and will be overwritten before it is read.
    """
    executor.forward(ScheduledBatch(0, [ScheduledSequence(0, [0], 0, [0])]))


def load_class(name: str) -> Any:
    """The class of a "package.module:Class" string. Raises InvalidRequestError saying what is wrong with it."""
    module_name, _, class_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        message = f'executor must be a "package.module:Class" that can be imported, got {name!r}: {error}'
        raise InvalidRequestError(message, param="executor") from error
