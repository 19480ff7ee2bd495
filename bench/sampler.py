"""Times Sampler.sample on 16 rows: python bench/sampler.py [--dtype bfloat16] [--threads 1] [--vocab 49152 262144].

Peaked logits resemble a trained model's (most of the mass on few tokens); flat ones (a random model's) are the worst
case of top_p, whose nucleus then holds most of the vocabulary. Prints the median milliseconds of each case.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

from suimon.core_engine.sampler import Sampler, SamplingRow
from suimon.core_engine.sampling_params import SamplingParams

ROWS = 16
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
    "temperature 1": SamplingParams(),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_k 50": SamplingParams(top_k=50),
    "top_k 50, top_p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "all penalties": SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
}


def make_logits(vocab_size: int, *, peaked: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, vocab_size, generator=generator) * 2.0
    if peaked:
        logits -= 2.5 * torch.rand(ROWS, vocab_size, generator=generator).argsort(-1).add(1).log()
    return logits


def make_rows(params: SamplingParams, position: int) -> list[SamplingRow]:
    prompt, output = list(range(1000)), list(range(500, 1500))
    return [
        SamplingRow(
            seq_id=i, params=params, prompt_token_ids=prompt, output_token_ids=output, seed=i, position=position
        )
        for i in range(ROWS)
    ]


def milliseconds(logits: torch.Tensor, params: SamplingParams, repeats: int) -> float:
    sampler = Sampler()
    sampler.sample(logits, make_rows(params, 0))
    return statistics.median(_timings(sampler, logits, params, repeats)) * 1e3


def _timings(sampler: Sampler, logits: torch.Tensor, params: SamplingParams, repeats: int) -> Iterator[float]:
    for position in range(1, repeats + 1):
        rows = make_rows(params, position)
        start = time.perf_counter()
        sampler.sample(logits, rows)
        yield time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 262144])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{ROWS} rows, {options.dtype}, {options.device}, {options.threads} threads: median ms of {options.repeats}")
    for vocab_size in options.vocab:
        for shape in ("peaked", "flat"):
            logits = make_logits(vocab_size, peaked=shape == "peaked")
            logits = logits.to(options.device, getattr(torch, options.dtype))
            for name, params in CASES.items():
                took = milliseconds(logits, params, options.repeats)
                print(f"{vocab_size:7d}  {shape:6s}  {name:20s} {took:8.2f}")


if __name__ == "__main__":
    main()
