"""Times ``suimon serve`` from outside: start to first token, then tokens per second at several numbers of streams.

    python bench/serve.py [--streams 1 16] [--tokens 128] [--rounds 3] [-- OPTIONS OF suimon serve]

Starts the server itself, on a free port of this machine, and stops it. Each round asks every stream for the same number
of tokens (``ignore_eos``); the table has the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

PROMPT = "Write down everything you know about the sea, its tides and those who live from it. " * 6


@dataclass(frozen=True)
class Answer:
    """When the request was sent and when each of its tokens came, in seconds."""

    sent: float
    tokens: tuple[float, ...]

    @property
    def time_to_first_token(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]


@contextmanager
def server(options: list[str]) -> Iterator[tuple[str, float]]:
    """(URL, seconds from the start to the ready line) of a server that is stopped afterwards."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "suimon.gateway.cli", "serve", "--port", "0", "--no-access-log", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")
            found = re.search(r"is ready: (http://\S+)/v1", line)
            if found:
                yield found[1], time.perf_counter() - began
                return
        raise SystemExit("the server ended without a ready line")
    finally:
        process.terminate()
        process.wait(60)


def ask(http: httpx.Client, model: str, prompt: str, tokens: int) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    sent, came = time.perf_counter(), []
    with http.stream("POST", "/v1/completions", json=body | {"temperature": 0, "logprobs": 0}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                logprobs = json.loads(line[6:])["choices"][0]["logprobs"]
                came += [time.perf_counter()] * len(logprobs["tokens"] if logprobs else ())
    return Answer(sent, tuple(came))


def round_of(http: httpx.Client, model: str, streams: int, tokens: int, salt: str) -> tuple[float, list[Answer]]:
    """Tokens per second over the round, and its answers. The salt keeps prompts of rounds from sharing a prefix."""
    prompts = [f"{salt} {number}. {PROMPT}" for number in range(streams)]
    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        answers = list(pool.map(lambda prompt: ask(http, model, prompt, tokens), prompts))
    seconds = time.perf_counter() - began
    return sum(len(answer.tokens) for answer in answers) / seconds, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("options", nargs="*", help="of suimon serve, after --")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with server(arguments.options) as (url, ready), httpx.Client(base_url=url, timeout=600) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        first = ask(http, model, "Hello", 1)
        print(f"\nready after {ready:.2f} s, first token {first.tokens[0] - began:.2f} s after the start\n")
        print("streams   tok/s   TTFT s   ITL ms")
        for streams in arguments.streams:
            rounds = [
                round_of(http, model, streams, arguments.tokens, f"{streams}/{n}") for n in range(arguments.rounds)
            ]
            speed = statistics.median(speed for speed, _ in rounds)
            answers = [answer for _, answers in rounds for answer in answers]
            ttft = statistics.median(answer.time_to_first_token for answer in answers)
            gap = statistics.median(gap for answer in answers for gap in answer.gaps)
            print(f"{streams:7d} {speed:7.1f} {ttft:8.2f} {1000 * gap:8.1f}")


if __name__ == "__main__":
    main()
