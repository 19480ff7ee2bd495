"""BackendContract finds what it is there to find: each backend below breaks a rule, and the test of it fails.

The tests of the contract on backends that keep it are in tests/plugins/test_contract.py and contrib/.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BROKEN = """
import asyncio
import re

from suimon.gateway.hookspecs import *
from suimon.gateway.hookspecs import Backend
from suimon.gateway.testing import BackendContract


class Good(Backend):
    model_id = "words"
    capabilities = Capabilities(unsupported=frozenset({"n", "stop"}))

    def __init__(self):
        self.running = 0

    async def generate(self, request):
        words = re.findall(r"\\\\S+\\\\s*", request.last_user_text())
        said = words[: request.sampling.max_tokens]
        self.running += 1
        try:
            for word in said:
                await asyncio.sleep(0)
                yield Delta(text=word)
            usage = Usage(prompt_tokens=len(words), completion_tokens=len(said))
            yield Delta(finish_reason="stop" if said == words else "length", usage=usage)
        finally:
            self.running -= 1

    def load(self):
        return Load(running=self.running)


class Contract(BackendContract):
    backend_class = Good
    timeout = 10.0

    def create_backend(self):
        return self.backend_class()


class TestGood(Contract):
    pass


class TestEndless(Contract):  # test_an_answer[chat]
    class backend_class(Good):
        async def generate(self, request):
            yield Delta(text="x", usage=Usage(prompt_tokens=1, completion_tokens=1))


class TestNoUsage(Contract):  # test_an_answer[chat]
    class backend_class(Good):
        async def generate(self, request):
            yield Delta(text="x", finish_reason="stop")


class TestTalkative(Contract):  # test_max_tokens[chat]
    class backend_class(Good):
        async def generate(self, request):
            yield Delta(text="x y", finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=2))


class TestForgetful(Contract):  # test_clients_that_leave_in_mid_stream
    timeout = 1.0

    class backend_class(Good):
        async def generate(self, request):
            self.running += 1
            async for delta in super().generate(request):
                yield delta
            self.running -= 1


class TestZeros(Contract):  # test_logprobs
    class backend_class(Good):
        capabilities = Capabilities(logprobs=True, unsupported=frozenset({"n", "stop"}))

        async def generate(self, request):
            async for delta in super().generate(request):
                entry = TokenLogprobs(TokenLogprob(delta.text, 0.0))
                yield Delta(text=delta.text, logprobs=(entry,)) if delta.text else delta


class TestMixedUp(Contract):  # test_answers_do_not_depend_on_company
    class backend_class(Good):
        async def generate(self, request):
            self.last = request
            await asyncio.sleep(0)
            async for delta in super().generate(self.last):
                yield delta


class TestDeafToStops(Contract):  # test_stop_strings
    class backend_class(Good):
        capabilities = Capabilities(unsupported=frozenset({"n"}))


class TestDeafToCounts(Contract):  # test_several_choices
    class backend_class(Good):
        capabilities = Capabilities(unsupported=frozenset({"stop"}))


class TestTruncates(Contract):  # test_a_prompt_beyond_the_context
    class backend_class(Good):
        capabilities = Capabilities(max_model_len=9, unsupported=frozenset({"n", "stop"}))


class TestNested(Contract):  # test_embeddings
    class backend_class(Good):
        capabilities = Capabilities(embeddings=True, unsupported=frozenset({"n", "stop"}))

        async def embed(self, request):
            vectors = tuple([[0.5, 0.5]] for _ in request.inputs)
            return Embeddings(vectors=vectors, usage=Usage(prompt_tokens=9))


class TestUnstoppable(Contract):  # test_it_stops_without_having_started
    class backend_class(Good):
        async def start(self):
            self.started = True

        async def stop(self):
            assert self.started
"""


def test_each_broken_rule_is_found(tmp_path: Path) -> None:
    module = tmp_path / "test_broken.py"
    module.write_text(BROKEN.replace("\\\\", "\\"))
    expected = dict(re.findall(r"^class (Test\w+)\(Contract\):  # (\S+)$", BROKEN, re.M))
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "--tb=no", str(module)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    failed: dict[str, set[str]] = {}
    for kind, name in re.findall(r"^FAILED \S*::(\w+)::(\S+)", done.stdout, re.M):
        failed.setdefault(kind, set()).add(name)
    assert len(expected) == 11, expected
    assert set(failed) == set(expected), done.stdout
    assert {kind: name for kind, name in expected.items() if name not in failed[kind]} == {}, done.stdout
