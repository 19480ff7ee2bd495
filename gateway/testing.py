"""What the contract asks of every backend, as tests that a plugin's author runs: subclass ``BackendContract``.

A complete test module::

    from my_package import Mine
    from suimon.gateway.testing import BackendContract

    class TestMine(BackendContract):
        def create_backend(self):
            return Mine("mine")

Its tests start one such backend behind a real gateway on a loopback port, ask it directly and over HTTP, and hold it
to what it claims in its ``capabilities``; what it does not claim must be refused, and is not tested further. A backend
that needs fixtures of its own is made by a fixture ``make_backend`` of class or wider scope, which returns the function
that makes one. ``pip install 'suimon[testing]'`` brings what is needed; pytest finds the fixtures by itself.

Knows hookspecs and pytest; refuses to know any backend.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import math
import struct
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from suimon.gateway.checked_answers import Answer, closing, collect
from suimon.gateway.hookspecs import (
    FINISH_REASONS,
    Backend,
    ContextTooLong,
    EmbedRequest,
    GenerateRequest,
    InvalidRequest,
    Load,
    Message,
    SamplingParams,
)
from suimon.gateway.loopback import LoopbackServer

KINDS = ("chat", "completion")
NO_TOKEN = 2**31 - 1  # an id in no vocabulary
QUICK = 5.0  # seconds; the gateway itself waits one for health, a busy test machine may pause
_numbers = count()


@pytest.fixture(scope="class")
def make_backend(request: pytest.FixtureRequest) -> Callable[[], Backend]:
    """Makes a backend that was not started; override it where making one needs other fixtures."""
    create: Callable[[], Backend] = request.cls().create_backend
    return create


@pytest.fixture(scope="class")
def loopback(make_backend: Callable[[], Backend]) -> Iterator[LoopbackServer]:
    """One backend, started, behind a gateway on a loopback port; shared by the class's tests."""
    with LoopbackServer(make_backend()) as running:
        yield running


@pytest.fixture
def backend(loopback: LoopbackServer) -> Backend:
    """The started backend. It lives in the server's event loop: ask it by ``loopback.call``."""
    return loopback.backends[0]


class BackendContract:
    """Subclass it, write ``create_backend``, and set what differs from these."""

    prompt: str = "The capital of France is"
    prompts: tuple[str, ...] = ("One, two, three,", "The river flows", "A poem on rain:", "The sky is blue because")
    max_tokens: int = 8  # of most answers
    deterministic: bool = True  # at temperature 0 one prompt has one answer, whatever runs beside it
    too_long: str | None = None  # a prompt beyond the context; None: made, where max_model_len is known
    num_disconnects: int = 20
    timeout: float = 60.0  # seconds that one answer may take

    def create_backend(self) -> Backend:
        """A backend that was not started."""
        raise pytest.UsageError(f"{type(self).__name__} must define create_backend, or a make_backend fixture")

    # --- Helpers ------------------------------------------------------------------------------------------------------

    def request(self, backend: Backend, kind: str = "", prompt: Any = None, **sampling: Any) -> GenerateRequest:
        """A greedy request; without ``kind`` one that this backend takes. Skips the test if it takes none."""
        can = {"chat": backend.capabilities.chat, "completion": backend.capabilities.completions}
        kind = kind or next((kind for kind in KINDS if can[kind]), "chat")
        if not can[kind]:
            pytest.skip(f"this backend does not claim {kind}s")
        prompt = self.prompt if prompt is None else prompt
        messages = (Message(role="user", content=prompt),)
        return GenerateRequest(
            request_id=f"contract-{next(_numbers)}",
            model=backend.model_id,
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": self.max_tokens} | sampling),
            **({"messages": messages} if kind == "chat" else {"prompt": prompt}),
        )

    def ask(self, loopback: LoopbackServer, request: GenerateRequest) -> Answer:
        """The answer, checked to be well-formed."""
        return loopback.call(collect(loopback.backends[0], request), self.timeout)

    def refused(self, loopback: LoopbackServer, request: GenerateRequest, kind: type[Exception]) -> Exception:
        """The error of this kind that the request ends with."""
        with pytest.raises(kind) as raised:
            self.ask(loopback, request)
        return raised.value

    def needs(self, backend: Backend, name: str) -> None:
        """Skip what the backend says it does not support."""
        can = backend.capabilities
        if not getattr(can, name, True) or name in can.unsupported:
            pytest.skip(f"this backend does not claim {name}")

    def wait_until_idle(self, loopback: LoopbackServer) -> None:
        """Until nothing runs or waits in the backend. Fails after ``timeout`` seconds."""
        backend = loopback.backends[0]

        async def idle() -> Load:
            while (load := backend.load()).running or load.waiting or load.queued_tokens or load.blocks_used:
                await asyncio.sleep(0.01)
            return load

        try:
            loopback.call(idle(), self.timeout)
        except TimeoutError:
            pytest.fail(f"the backend still holds something after every request ended: {backend.load()}")

    # --- Life ---------------------------------------------------------------------------------------------------------

    def test_it_is_named(self, backend: Backend) -> None:
        assert isinstance(backend.model_id, str) and backend.model_id
        assert all(isinstance(line, str) for line in backend.describe())
        assert backend.capabilities.unsupported <= set(SamplingParams.__struct_fields__)

    def test_it_stops_without_having_started(self, make_backend: Callable[[], Backend]) -> None:
        asyncio.run(asyncio.wait_for(make_backend().stop(), self.timeout))

    def test_it_stops_in_the_middle_of_a_start(self, make_backend: Callable[[], Backend]) -> None:
        async def interrupted() -> None:
            backend = make_backend()
            starting = asyncio.create_task(backend.start())
            await asyncio.sleep(0)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await backend.stop()

        asyncio.run(asyncio.wait_for(interrupted(), self.timeout))

    def test_it_stops_twice(self, make_backend: Callable[[], Backend]) -> None:
        async def whole_life() -> None:
            backend = make_backend()
            await backend.start()
            await backend.stop()
            await backend.stop()

        asyncio.run(whole_life())

    def test_health_is_quick(self, loopback: LoopbackServer, backend: Backend) -> None:
        health = loopback.call(backend.health(), QUICK)
        assert health.ready, f"a started backend is ready, not {health.state}: {health.detail}"

    def test_load_is_counted(self, backend: Backend) -> None:
        load = backend.load()
        assert all(getattr(load, field) >= 0 for field in Load.__struct_fields__), load

    # --- Answers ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_answer(self, loopback: LoopbackServer, backend: Backend, kind: str) -> None:
        answer = self.ask(loopback, self.request(backend, kind))
        assert answer.text, "the answer is empty"
        assert answer.usage is not None and 0 < answer.usage.completion_tokens <= self.max_tokens

    @pytest.mark.parametrize("kind", KINDS)
    def test_max_tokens(self, loopback: LoopbackServer, backend: Backend, kind: str) -> None:
        self.needs(backend, "max_tokens")
        answer = self.ask(loopback, self.request(backend, kind, max_tokens=1))
        assert answer.usage is not None and answer.usage.completion_tokens <= 1
        longer = self.ask(loopback, self.request(backend, kind))
        if longer.usage is not None and longer.usage.completion_tokens > 1 and self.deterministic:
            assert answer.finish_reasons == {0: "length"}
            assert longer.text.startswith(answer.text)

    def test_several_choices(self, loopback: LoopbackServer, backend: Backend) -> None:
        self.needs(backend, "n")
        answer = self.ask(loopback, self.request(backend, n=3, temperature=1.0))
        assert set(answer.finish_reasons) == {0, 1, 2}
        assert answer.usage is not None and answer.usage.completion_tokens >= 3

    def test_stop_strings(self, loopback: LoopbackServer, backend: Backend) -> None:
        self.needs(backend, "stop")
        text = self.ask(loopback, self.request(backend)).text
        if not self.deterministic or len(text) < 4:
            pytest.skip("needs a text that is known beforehand")
        stop = text[len(text) // 2 :][:2]
        answer = self.ask(loopback, self.request(backend, stop=(stop,)))
        assert answer.text == text[: text.index(stop)], f"stop={stop!r} in {text!r}"
        assert answer.finish_reasons == {0: "stop"}

    def test_a_seed_repeats_an_answer(self, loopback: LoopbackServer, backend: Backend) -> None:
        self.needs(backend, "seed")
        requests = [self.request(backend, seed=7, temperature=1.0) for _ in range(3)]
        assert len({self.ask(loopback, request).text for request in requests}) == 1

    def test_logprobs(self, loopback: LoopbackServer, backend: Backend) -> None:
        """B80: true numbers beside each token, never invented zeros."""
        self.needs(backend, "logprobs")
        answer = self.ask(loopback, self.request(backend, logprobs=2, temperature=1.0, seed=None))
        for delta in answer.deltas:
            if delta.token_ids:
                assert delta.logprobs is not None and len(delta.logprobs) == len(delta.token_ids)
        entries = [entry for delta in answer.deltas for entry in delta.logprobs or ()]
        assert answer.usage is not None and 0 < len(entries) <= answer.usage.completion_tokens
        for entry in entries:
            numbers = [one.logprob for one in (entry.chosen, *entry.top)]
            assert all(not math.isnan(number) and number <= 1e-6 for number in numbers), entry
            assert math.isfinite(entry.chosen.logprob), entry
            assert [one.logprob for one in entry.top] == sorted((one.logprob for one in entry.top), reverse=True)
        assert any(one.logprob != 0.0 for entry in entries for one in (entry.chosen, *entry.top)), "all are 0.0"

    # --- Many at once, and clients that leave -------------------------------------------------------------------------

    def test_answers_do_not_depend_on_company(self, loopback: LoopbackServer, backend: Backend) -> None:
        """B76: requests side by side get what each gets alone."""
        if not self.deterministic:
            pytest.skip("needs texts that are known beforehand")
        alone = [self.ask(loopback, self.request(backend, prompt=prompt)).text for prompt in self.prompts]

        async def together() -> list[Answer]:
            requests = [self.request(backend, prompt=prompt) for prompt in self.prompts * 2]
            return list(await asyncio.gather(*(collect(backend, request) for request in requests)))

        answers = loopback.call(together(), self.timeout)
        assert [answer.text for answer in answers] == alone * 2

    def test_clients_that_leave_in_mid_stream(self, loopback: LoopbackServer, backend: Backend) -> None:
        expected = self.ask(loopback, self.request(backend)).text

        async def leave(after: int) -> None:
            async with closing(backend.generate(self.request(backend, max_tokens=64))) as deltas:
                for _ in range(after):
                    await anext(deltas, None)

        for number in range(self.num_disconnects):
            loopback.call(leave(after=number % 3), self.timeout)
        self.wait_until_idle(loopback)
        answer = self.ask(loopback, self.request(backend))
        assert not self.deterministic or answer.text == expected

    def test_a_client_that_leaves_before_the_first_token(self, loopback: LoopbackServer, backend: Backend) -> None:
        async def leave() -> None:
            reading = asyncio.create_task(collect(backend, self.request(backend, max_tokens=64)))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        loopback.call(leave(), self.timeout)
        self.wait_until_idle(loopback)
        assert self.ask(loopback, self.request(backend)).text

    # --- Refusals -----------------------------------------------------------------------------------------------------

    def test_a_prompt_beyond_the_context(self, loopback: LoopbackServer, backend: Backend) -> None:
        limit = backend.capabilities.max_model_len
        if self.too_long is None and limit is None:
            pytest.skip("the context's length is not known")
        prompt = self.too_long or "river " * ((limit or 0) + 16)
        error = self.refused(loopback, self.request(backend, prompt=prompt), ContextTooLong)
        assert any(letter.isdigit() for letter in str(error)), f"the message must give the lengths: {error}"
        assert self.ask(loopback, self.request(backend)).text

    def test_a_token_that_does_not_exist(self, loopback: LoopbackServer, backend: Backend) -> None:
        self.needs(backend, "token_prompts")
        self.refused(loopback, self.request(backend, "completion", prompt=(NO_TOKEN,)), InvalidRequest)
        assert self.ask(loopback, self.request(backend)).text

    @pytest.mark.parametrize(
        ("capability", "body"),
        [
            ("logprobs", {"logprobs": True}),
            ("seed", {"seed": 1}),
            ("n", {"n": 2}),
            ("stop", {"stop": ["x"]}),
        ],
    )
    def test_what_is_not_claimed_is_refused(
        self, loopback: LoopbackServer, backend: Backend, capability: str, body: dict[str, Any]
    ) -> None:
        can = backend.capabilities
        self.request(backend, "chat")  # skips the test of a backend that takes none
        if getattr(can, capability, True) and capability not in can.unsupported:
            pytest.skip(f"this backend claims {capability}")
        status, answer = self.post(loopback, "/v1/chat/completions", self.chat_body(backend) | body)
        assert status == 400, answer
        assert answer["error"]["param"] == capability

    # --- Tokens and vectors -------------------------------------------------------------------------------------------

    def test_tokens_become_the_text_again(self, loopback: LoopbackServer, backend: Backend) -> None:
        self.needs(backend, "tokenize")
        request = self.request(backend, "completion")
        ids = loopback.call(backend.tokenize(request, add_special_tokens=False), self.timeout)
        assert ids and all(isinstance(token_id, int) and token_id >= 0 for token_id in ids)
        assert loopback.call(backend.detokenize(ids), self.timeout).strip() == self.prompt
        with pytest.raises(InvalidRequest):
            loopback.call(backend.detokenize([NO_TOKEN]), self.timeout)

    @pytest.mark.parametrize("kind", KINDS)
    def test_tokens_are_counted_as_they_are_read(self, loopback: LoopbackServer, backend: Backend, kind: str) -> None:
        self.needs(backend, "tokenize")
        request = self.request(backend, kind)
        try:
            ids = loopback.call(backend.tokenize(request), self.timeout)
        except InvalidRequest as error:
            pytest.skip(f"this backend does not tokenise {kind}s: {error}")
        answer = self.ask(loopback, request)
        assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)

    def test_a_tokenizer_that_is_not_claimed(self, loopback: LoopbackServer, backend: Backend) -> None:
        if backend.capabilities.tokenize:
            pytest.skip("this backend claims tokenize")
        with pytest.raises(InvalidRequest):
            loopback.call(backend.tokenize(self.request(backend)), self.timeout)

    def test_embeddings(self, loopback: LoopbackServer, backend: Backend) -> None:
        """B79: one flat vector for each input, in order."""
        request = EmbedRequest(request_id="contract-embed", model=backend.model_id, inputs=self.prompts)
        if not backend.capabilities.embeddings:
            with pytest.raises(InvalidRequest):
                loopback.call(backend.embed(request), self.timeout)
            return
        found = loopback.call(backend.embed(request), self.timeout)
        assert len(found.vectors) == len(self.prompts) and found.usage.prompt_tokens >= len(self.prompts)
        assert len({len(vector) for vector in found.vectors}) == 1 and len(found.vectors[0]) > 0
        for prompt, vector in zip(self.prompts, found.vectors, strict=True):
            assert all(isinstance(number, float) and math.isfinite(number) for number in vector) and any(vector)
            alone = EmbedRequest(request_id="contract-embed", model=backend.model_id, inputs=(prompt,))
            assert list(loopback.call(backend.embed(alone), self.timeout).vectors[0]) == pytest.approx(
                list(vector), rel=1e-2, abs=1e-3
            )

    def test_embeddings_over_http(self, loopback: LoopbackServer, backend: Backend) -> None:
        self.needs(backend, "embeddings")
        body = {"model": backend.model_id, "input": list(self.prompts)}
        status, plain = self.post(loopback, "/v1/embeddings", body)
        assert status == 200, plain
        assert [entry["index"] for entry in plain["data"]] == list(range(len(self.prompts)))
        status, packed = self.post(loopback, "/v1/embeddings", body | {"encoding_format": "base64"})
        assert status == 200, packed
        for one, other in zip(plain["data"], packed["data"], strict=True):
            raw = base64.b64decode(other["embedding"])
            assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(one["embedding"], rel=1e-2, abs=1e-3)

    # --- Over HTTP ----------------------------------------------------------------------------------------------------

    def chat_body(self, backend: Backend, **fields: Any) -> dict[str, Any]:
        """A chat as a client sends it."""
        messages = [{"role": "user", "content": self.prompt}]
        return {
            "model": backend.model_id,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self.max_tokens,
        } | fields

    def post(self, loopback: LoopbackServer, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """(status, decoded body) of the gateway's answer."""
        with loopback.client(self.timeout) as client:
            response = client.post(path, json=body)
        return response.status_code, response.json()

    def test_it_is_served_over_http(self, loopback: LoopbackServer, backend: Backend) -> None:
        expected = self.ask(loopback, self.request(backend, "chat"))
        status, body = self.post(loopback, "/v1/chat/completions", self.chat_body(backend))
        assert status == 200, body
        (choice,) = body["choices"]
        assert choice["finish_reason"] in FINISH_REASONS and choice["message"]["role"] == "assistant"
        if self.deterministic:
            assert choice["message"]["content"] == expected.text
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]

    def test_it_is_streamed_over_http(self, loopback: LoopbackServer, backend: Backend) -> None:
        expected = self.ask(loopback, self.request(backend, "chat"))
        body = self.chat_body(backend, stream=True, stream_options={"include_usage": True})
        with (
            loopback.client(self.timeout) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as stream,
        ):
            assert stream.status_code == 200
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        assert text == expected.text if self.deterministic else text
        assert chunks[-1]["usage"]["completion_tokens"] > 0

    def test_a_client_that_hangs_up(self, loopback: LoopbackServer, backend: Backend) -> None:
        self.request(backend, "chat")
        body = self.chat_body(backend, stream=True, max_tokens=64)
        for _ in range(3):
            with (
                loopback.client(self.timeout) as client,
                client.stream("POST", "/v1/chat/completions", json=body) as read,
            ):
                assert next(read.iter_lines()).startswith("data: ")
        self.wait_until_idle(loopback)
        assert self.post(loopback, "/v1/chat/completions", self.chat_body(backend))[0] == 200

    def test_routing_by_prefix(self, backend: Backend) -> None:
        key = backend.prefix_key(self.request(backend))
        assert key is None or (isinstance(key, str) and key == backend.prefix_key(self.request(backend)))

    def test_generate_is_an_async_generator(self, backend: Backend) -> None:
        assert not inspect.iscoroutinefunction(backend.generate), "write `yield` in generate: it is awaited nowhere"
