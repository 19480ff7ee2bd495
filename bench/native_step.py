"""Times steps of the native engine on a model of SmolLM2-135M's shape with random weights: no download, no sampling.

    python bench/native_step.py [--dtypes float32 bfloat16] [--rows 1 4 16 32] [--prefill 128 512] [--threads N]

Prints the fastest and the median step, since other programs only ever make a step slower. SUIMON_KERNELS=reference
times PyTorch's operations instead of the compiled kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from suimon.core_engine import machine
from suimon.core_engine.batch import ForwardBatch, ScheduledBatch, ScheduledSequence
from suimon.core_engine.layers.kv_cache import KVCache
from suimon.core_engine.models.llama import LlamaModel
from suimon.kernels import cpu

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 100000.0,
}
BLOCK_SIZE = 16


def random_model(dtype: torch.dtype) -> LlamaModel:
    with torch.device("meta"):
        model = LlamaModel(LlamaModel.read_config(SMOLLM2_135M))
    model = model.to(dtype).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.04)
    for module in model.modules():
        if type(module).__name__ == "RMSNorm":
            module.weight = torch.nn.Parameter(torch.ones_like(module.weight, dtype=torch.float32), requires_grad=False)
    model.finish_loading(dtype, "cpu")
    model.prepare()
    return model


def sequences(count: int, tokens: int, start: int) -> list[ScheduledSequence]:
    """``count`` sequences of ``tokens`` new tokens after ``start`` old ones, in scattered blocks."""
    each = -(-(start + tokens) // BLOCK_SIZE)
    blocks = torch.randperm(count * each).tolist()
    tables = [blocks[each * s : each * s + each] for s in range(count)]
    ids = torch.randint(0, SMOLLM2_135M["vocab_size"], (count, tokens)).tolist()
    return [ScheduledSequence(s, ids[s], start, tables[s]) for s in range(count)]


def step_time(model: LlamaModel, batch: ScheduledBatch, repeats: int) -> tuple[float, float]:
    """The fastest and the median step in milliseconds: batch build, forward and logits."""
    blocks = max(max(sequence.block_table) for sequence in batch.sequences) + 1
    cache = KVCache.allocate(model.kv_shapes, blocks, BLOCK_SIZE, model.dtype)
    for layer in cache:
        layer.key.normal_()
        layer.value.normal_()

    def step() -> None:
        inputs = ForwardBatch.build(batch, BLOCK_SIZE)
        model.logits(model.forward(inputs, cache)[inputs.logits_indices])

    return timed(step, repeats)


def timed(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    times = sorted(times[1:])
    return times[0], times[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--prefill", nargs="*", type=int, default=[128, 512])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--threads", type=int, default=machine.usable_cores())
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    print(
        f"{options.threads} threads, kernels: {'cpu' if cpu.is_available() else 'reference'}, torch {torch.__version__}"
    )
    print(f"{'dtype':10} {'step':>16} {'fastest ms':>11} {'median ms':>10} {'tok/s':>7}")
    for name in options.dtypes:
        model = random_model(getattr(torch, name))
        cases = [(f"decode {rows}", sequences(rows, 1, options.context - 1)) for rows in options.rows]
        cases += [(f"prefill {tokens}", sequences(1, tokens, 0)) for tokens in options.prefill]
        for title, scheduled in cases:
            batch = ScheduledBatch(0, scheduled)
            best, median = step_time(model, batch, options.repeats)
            rate = batch.num_tokens / best * 1000
            print(f"{name:10} {title:>16} {best:11.1f} {median:10.1f} {rate:7.0f}", flush=True)


if __name__ == "__main__":
    main()
