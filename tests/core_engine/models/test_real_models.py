"""The two real models in float32 against transformers with the same dequantised weights, whole and in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from suimon.core_engine.batch import ScheduledBatch, ScheduledSequence
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.loader import open_checkpoint
from suimon.core_engine.loader.checkpoint import Checkpoint
from suimon.core_engine.model_runner import ModelRunner

pytestmark = pytest.mark.slow

LENGTH = 560  # past Gemma's window of 512
BLOCKS = list(range(40, 0, -1))


def transformers_model(checkpoint: Checkpoint) -> Any:
    """transformers' model of the checkpoint's config, its weights put in by name."""
    import transformers

    options = {k: v for k, v in checkpoint.config.items() if k not in ("model_type", "architectures", "dtype")}
    config = transformers.AutoConfig.for_model(checkpoint.config["model_type"], **options)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = getattr(transformers, checkpoint.config["architectures"][0])(config)
    model.to_empty(device="cpu").float().eval()
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.tensor_names}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return rebuild_constants(model)


def rebuild_constants(model: Any) -> Any:
    """What transformers computes at construction and ``to_empty`` has wiped: rotary frequencies, embedding scale."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if hasattr(model.model.embed_tokens, "embed_scale"):
        model.model.embed_tokens.embed_scale = torch.tensor(model.config.hidden_size**0.5)
    return model


@pytest.mark.parametrize("fixture", ["demo_gguf", "gemma_gguf"])
def test_logits(fixture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(fixture)
    checkpoint = open_checkpoint(path)
    ids = torch.randint(5, checkpoint.config["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        hidden = (oracle := transformers_model(checkpoint)).model(ids[None]).last_hidden_state[0]
        compared = [*range(0, LENGTH, 40), *range(LENGTH - 8, LENGTH)]
        expected = oracle.lm_head(hidden[compared])
    del oracle, hidden
    config = EngineConfig(model=fixture, dtype="float32", device="cpu", num_blocks=48, num_threads=1)
    runner = ModelRunner.load(config, checkpoint)

    def run(start: int, end: int, logits: int) -> torch.Tensor:
        share = ScheduledSequence(0, ids[start:end].tolist(), start, BLOCKS[: -(-end // 16)], logits)
        return runner.forward(ScheduledBatch(0, [share]))

    whole = run(0, LENGTH, LENGTH)[compared]
    torch.testing.assert_close(whole, expected, atol=5e-3, rtol=1e-4)
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))
    for start, end in ((0, 200), (200, 201), (201, 500), (500, LENGTH - 8)):
        run(start, end, 0)
    pieces = torch.cat([run(position, position + 1, 1) for position in range(LENGTH - 8, LENGTH)])
    torch.testing.assert_close(pieces, expected[-8:], atol=5e-3, rtol=1e-4)
