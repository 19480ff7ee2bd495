"""The engine process, a real one, spoken to over its socket: what it answers, survives, and ends from."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from suimon.core_engine.config import EngineConfig
from suimon.core_engine.framing import MAX_FRAME_BYTES, FrameReader
from suimon.core_engine.heartbeat import EXIT_ORPHANED
from suimon.core_engine.messages import (
    AbortRequest,
    AddRequest,
    Configure,
    EndTokens,
    EngineFailed,
    EngineReady,
    FromEngine,
    Heartbeat,
    SequenceOutput,
    Shutdown,
    StepOutputs,
    decode_from_engine,
    to_frame,
)
from suimon.core_engine.sampling_params import SamplingParams

HERE = Path(__file__).parent
DEADLINE = 60.0  # far beyond anything expected: only a hang reaches it


class Conversation:
    """The client's end of the socket, without any of the client's own code above the frames."""

    def __init__(self, folder: Path, **behaviour: object) -> None:
        (folder / "behaviour.json").write_text(json.dumps(behaviour))
        self.folder = folder
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(DEADLINE)
        self.frames = FrameReader()
        self.received: list[FromEngine] = []
        self.passed_over: list[FromEngine] = []
        self.log = (folder / "log").open("w+")  # a pipe that nobody reads would block its writer
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "suimon.core_engine.process", f"--fd={theirs.fileno()}"],
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
            stderr=self.log,
            start_new_session=True,
        )
        theirs.close()

    def say(self, *messages: object) -> None:
        self.sock.sendall(b"".join(to_frame(message) for message in messages))

    def hear(self, wanted: Callable[[FromEngine], bool]) -> FromEngine:
        """The next message that is wanted; heartbeats and others are passed over."""
        until = time.monotonic() + DEADLINE
        while time.monotonic() < until:
            while self.received:
                message = self.received.pop(0)
                if wanted(message):
                    return message
                self.passed_over.append(message)
            data = self.sock.recv(1 << 20)
            assert data, f"the engine hung up: {self.last_words()}"
            self.received += [decode_from_engine(payload) for payload in self.frames.feed(data)]
        raise AssertionError("nothing of the kind was said")

    def outputs_of(self, request_id: str) -> list[SequenceOutput]:
        """All of one request's outputs, to the last."""
        found: list[SequenceOutput] = []
        while not (found and found[-1].finish_reason):
            message = self.hear(lambda m: isinstance(m, StepOutputs))
            found += [output for output in message.outputs if output.request_id == request_id]
        return found

    def configure(self, **options: object) -> EngineReady:
        config = EngineConfig(model="counting", executor="counting_executor:CountingExecutor", **options)
        self.say(Configure(config=config, model_path=str(self.folder)))
        return self.hear(lambda m: isinstance(m, EngineReady | EngineFailed))

    def last_words(self) -> str:
        """Its log, once it has ended."""
        self.process.wait(DEADLINE)
        self.log.seek(0)
        return self.log.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.sock.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Conversation]]:
    running: list[Conversation] = []

    def make(**behaviour: object) -> Conversation:
        running.append(Conversation(tmp_path_factory.mktemp("model"), **behaviour))
        return running[-1]

    yield make
    for conversation in running:
        conversation.close()


@pytest.fixture(scope="module")
def engine(start: Callable[..., Conversation]) -> Conversation:
    """One engine, context 64, for the tests that it is to survive."""
    conversation = start()
    ready = conversation.configure(max_model_len=64, num_blocks=32)
    assert isinstance(ready, EngineReady)
    assert (ready.vocab_size, ready.max_model_len, ready.num_blocks, ready.block_size) == (300, 64, 32, 16)
    assert (ready.eos_token_ids, ready.plan) == ([299], ["counts"])
    return conversation


def add(
    request_id: str, prompt: list[int], max_tokens: int = 4, adapter: str | None = None, **sampling: object
) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)
    return AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params, adapter=adapter)


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_answers_with_stamps_on_the_clock_that_all_processes_share(engine: Conversation) -> None:
    before = time.monotonic()
    engine.say(add("a", [5, 6, 7]))
    outputs = engine.outputs_of("a")
    assert (tokens(outputs), outputs[-1].finish_reason) == ([8, 9, 10, 11], "length")
    timing = outputs[-1].timing
    stamps = [before, timing.arrival, timing.first_scheduled, timing.first_token, timing.finished, time.monotonic()]
    assert stamps == sorted(stamps)


def test_one_message_a_step_for_all_requests_with_statistics(engine: Conversation) -> None:
    engine.say(*[add(str(i), [i + 1], max_tokens=3) for i in range(8)])
    messages: list[StepOutputs] = []
    while sum(len(output.token_ids) for message in messages for output in message.outputs) < 24:
        messages.append(engine.hear(lambda m: isinstance(m, StepOutputs)))
    assert len(messages) <= 3 + 8  # three steps; the burst may arrive in pieces
    assert max(len(message.outputs) for message in messages) > 1
    assert messages[-1].stats.used_blocks == messages[-1].stats.leaked_blocks == 0


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (add("x", []), "InvalidRequestError", "empty"),
        (add("x", [300]), "InvalidRequestError", "299"),
        (add("x", [1] * 64), "ContextLengthError", "64 prompt tokens"),
        (add("x", [1], stop_token_ids=(10**6,)), "InvalidRequestError", "stop_token_ids"),
        (add("x", [1], logit_bias={10**6: 1.0}), "InvalidRequestError", "logit_bias"),
        (add("x", [1], adapter="none such"), "InvalidRequestError", "none such"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_wrong_request_is_refused_alone(engine: Conversation, wrong, kind, words) -> None:
    engine.say(add("good", [1]), wrong, add("last", [2]))
    heard: dict[str, list[SequenceOutput]] = {"good": [], "x": [], "last": []}
    while not all(outputs and outputs[-1].finish_reason for outputs in heard.values()):
        for output in engine.hear(lambda m: isinstance(m, StepOutputs)).outputs:
            heard[output.request_id].append(output)
    (refusal,) = heard["x"]
    assert (refusal.finish_reason, refusal.error_kind) == ("error", kind)
    assert words in refusal.error
    assert (tokens(heard["good"]), tokens(heard["last"])) == ([2, 3, 4, 5], [3, 4, 5, 6])


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(engine: Conversation) -> None:
    engine.say(add("twin", [1], max_tokens=40), add("twin", [9]))
    outputs: list[SequenceOutput] = []
    while sum(output.finish_reason is not None for output in outputs) < 2:
        outputs += engine.hear(lambda m: isinstance(m, StepOutputs)).outputs
    assert [output.error_kind for output in outputs if output.error] == ["InvalidRequestError"]
    assert tokens(outputs) == list(range(2, 42))


def test_aborts_of_what_is_not_there_are_harmless(engine: Conversation) -> None:
    engine.say(AbortRequest("nobody"), AbortRequest("nobody", 5), add("b", [1]), AbortRequest("b", 7))
    assert tokens(engine.outputs_of("b")) == [2, 3, 4, 5]


def test_further_end_tokens_end_answers(engine: Conversation) -> None:
    engine.say(EndTokens([200]), add("e", [198], max_tokens=9))
    outputs = engine.outputs_of("e")
    assert (tokens(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason) == ([199, 200], "stop", None)


def test_a_hundred_thousand_hostile_frames_do_it_no_harm(engine: Conversation) -> None:
    """R11: whatever a frame holds, the frames around it are served."""
    chance = random.Random(7)
    real = to_frame(add("fuzz", [1]))[4:]
    pid = engine.process.pid
    for number in range(250):
        batch = []
        for _ in range(400):
            payload = bytearray(real if chance.random() < 0.5 else chance.randbytes(chance.randrange(80)))
            for _ in range(chance.randrange(1, 4)):
                payload[chance.randrange(len(payload) + 1) :] = chance.randbytes(chance.randrange(9))
            batch.append(struct.pack("<I", len(payload)) + payload)
        engine.sock.sendall(b"".join(batch) + to_frame(add(f"between {number}", [number])))
        assert tokens(engine.outputs_of(f"between {number}"))[0] == number + 1
    assert psutil.pid_exists(pid) and engine.process.poll() is None


def test_an_idle_engine_sleeps(engine: Conversation) -> None:
    engine.say(add("before", [1]))
    engine.outputs_of("before")
    process = psutil.Process(engine.process.pid)
    before = process.cpu_times()
    time.sleep(1.0)  # of which a busy loop would use most
    after = process.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.2


def test_ctrl_c_is_not_its_business(engine: Conversation) -> None:
    engine.process.send_signal(signal.SIGINT)
    engine.say(add("c", [1]))
    assert tokens(engine.outputs_of("c")) == [2, 3, 4, 5]


def test_nobody_reads_what_it_sends(start) -> None:
    """A full socket stops neither its ears nor its end."""
    engine = start()
    engine.configure()
    engine.say(*[add(str(i), [i], max_tokens=4000, logprobs=20) for i in range(64)])
    while not is_full(engine.sock):
        time.sleep(0.01)
    engine.say(*[AbortRequest(str(i)) for i in range(64)], Shutdown())
    assert engine.process.wait(DEADLINE) == 0


def is_full(sock: socket.socket) -> bool:
    """Whether the socket holds about as much unread as a sender may put into it."""
    unread = bytearray(4)
    fcntl.ioctl(sock, termios.FIONREAD, unread)
    return struct.unpack("i", unread)[0] > sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4


def test_heartbeats_come_while_it_loads_and_while_a_step_runs(start) -> None:
    engine = start(load_seconds=1.0, step_seconds=1.0)
    engine.configure(heartbeat_interval=0.05)
    loading = [m for m in engine.passed_over if isinstance(m, Heartbeat) and m.state == "loading"]
    assert len(loading) > 3
    engine.say(add("slow", [1], max_tokens=1))
    beats = [engine.hear(lambda m: isinstance(m, Heartbeat) and m.state == "stepping") for _ in range(4)]
    assert len({beat.since for beat in beats}) == 1  # all in the same step
    engine.process.terminate()
    assert engine.process.wait(DEADLINE) == 0  # SIGTERM, in the midst of a step


def test_a_stream_out_of_step_ends_it_cleanly(start) -> None:
    engine = start()
    engine.sock.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1) + b"never sent whole")
    assert "out of step" in engine.last_words()
    assert engine.process.returncode == 65


def test_it_ends_when_its_client_hangs_up(start) -> None:
    engine = start()
    engine.hear(lambda m: isinstance(m, Heartbeat))
    engine.sock.close()
    assert engine.process.wait(DEADLINE) in (0, EXIT_ORPHANED)


def test_a_model_that_does_not_load_is_told_without_paths_and_logged_with_them(start) -> None:
    engine = start(fail_load="/srv/models/x.gguf: is no GGUF file")
    failed = engine.configure()
    assert failed == EngineFailed("x.gguf: is no GGUF file", "ModelLoadError")
    assert "/srv/models/x.gguf" in engine.last_words()
    assert engine.process.returncode == 1
