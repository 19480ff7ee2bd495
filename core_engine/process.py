"""The engine process: receives messages, steps the engine, sends what each step gave.

Started by its client with one end of a socket pair and nothing else; the first frame says what to be. It knows messages
and the engine's few calls, and refuses to know models, text and HTTP. What it promises its client:

* A frame that is no message is logged and dropped; a stream that is out of step, or closed, ends the process cleanly.
* It sends without ever waiting for the reader. A reader that has stopped reading pauses the steps, not the listening.
* A request that cannot be added fails alone, a batch that cannot be computed fails its requests (the engine sees to
  that); whatever else goes wrong ends the process with EngineFailed, for then nobody knows what state the engine is in.
* With nothing to do it sleeps in the kernel. It ends when its client does.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from suimon.core_engine.embedding_queue import EmbeddingQueue
from suimon.core_engine.errors import EngineError
from suimon.core_engine.framing import FramingError
from suimon.core_engine.heartbeat import LOADING, READY, STEPPING, HeartbeatThread
from suimon.core_engine.inbox import ClientGoneError, Inbox
from suimon.core_engine.messages import (
    AbortRequest,
    AddRequest,
    Configure,
    EmbedRequest,
    EndTokens,
    EngineFailed,
    EngineReady,
    Heartbeat,
    SequenceOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
    to_frame,
)
from suimon.core_engine.outbox import Outbox
from suimon.core_engine.process_log import set_up_logging
from suimon.core_engine.public_text import clean, public_text

if TYPE_CHECKING:
    from suimon.core_engine.assembly import BuiltEngine
    from suimon.core_engine.engine import Engine
    from suimon.core_engine.outputs import EngineOutput

logger = logging.getLogger("suimon.core_engine.process")

EXIT_FAILED, EXIT_OUT_OF_STEP = 1, 65
STARTING_INTERVAL = 0.5  # seconds between heartbeats until the configuration says otherwise


class EngineLoop:
    """Messages in, steps, outputs out, until told to end."""

    def __init__(self, engine: Engine, inbox: Inbox, outbox: Outbox, heartbeat: HeartbeatThread) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._heartbeat = heartbeat
        self._embeddings = EmbeddingQueue(engine.embed)

    def run(self) -> None:
        """Return on Shutdown; raise as ``Inbox.receive`` does, and what a failed step raised."""
        while True:
            may_step = self._has_work and not self._outbox.is_congested
            messages = self._inbox.receive(wait=not may_step)
            if any(isinstance(message, Shutdown) for message in messages):
                return
            outputs = [output for message in messages for output in self._handle(message)]
            if self._has_work and not self._outbox.is_congested:
                outputs += self._step()
            elif not messages:
                continue
            self._outbox.put(to_frame(StepOutputs(outputs, self._engine.stats())))

    @property
    def _has_work(self) -> bool:
        return self._engine.has_work or bool(self._embeddings)

    def _handle(self, message: ToEngine) -> list[SequenceOutput]:
        match message:
            case AddRequest():
                return self._add(message)
            case EmbedRequest():
                self._embeddings.add(message)
            case AbortRequest():
                self._engine.abort(message.request_id, message.index)
                self._embeddings.abort(message.request_id)
            case EndTokens():
                self._engine.add_end_tokens(message.token_ids)
            case _:
                logger.warning("ignored a %s in mid-service", type(message).__name__)
        return []

    def _add(self, message: AddRequest) -> list[SequenceOutput]:
        try:
            self._engine.add_request(
                message.request_id,
                message.prompt_token_ids,
                message.sampling,
                tenant=message.tenant,
                priority=message.priority,
                weight=message.weight,
                arrival=message.arrival or None,
                deadline=message.deadline,
                adapter=message.adapter,
                cache_salt=message.cache_salt,
                trace_context=message.trace_context,
            )
        except Exception as error:
            # Whatever is wrong with one request is that request's failure.
            if not isinstance(error, EngineError):
                logger.exception("could not add request %s", message.request_id)
            return [_refusal(message.request_id, error)]
        return []

    def _step(self) -> list[SequenceOutput]:
        with self._heartbeat.during(STEPPING):
            outputs = self._engine.step()
            if self._embeddings:
                self._outbox.put(to_frame(self._embeddings.step()))
        return [_sequence_output(output) for output in outputs]


def _sequence_output(output: EngineOutput) -> SequenceOutput:
    return SequenceOutput(
        output.request_id,
        output.index,
        list(output.token_ids),
        output.finish_reason,
        output.stop_reason,
        output.num_cached_tokens,
        None if output.logprobs is None else list(output.logprobs),
        None if output.error is None else clean(output.error),
        "",
        output.timing,
    )


def _refusal(request_id: str, error: Exception) -> SequenceOutput:
    """The one output that ends a whole request with an error."""
    return SequenceOutput(
        request_id, 0, [], finish_reason="error", error=public_text(error), error_kind=type(error).__name__
    )


# --- the process ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the client at ``--fd`` until it is done; the exit status."""
    parser = argparse.ArgumentParser(prog="suimon engine")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    sock = socket.socket(fileno=parser.parse_args(arguments).fd)
    sock.set_inheritable(False)
    _prepare_process()
    outbox = Outbox(sock)
    heartbeat = HeartbeatThread(lambda *status: outbox.put(to_frame(Heartbeat(*status))), STARTING_INTERVAL)
    heartbeat.start()
    try:
        _serve(Inbox(sock, outbox), outbox, heartbeat)
    except (ClientGoneError, ConnectionError):
        logger.info("the client is gone; so is this engine")
    except FramingError as error:
        logger.error("the client's stream is out of step: %s", error)
        return EXIT_OUT_OF_STEP
    except Exception as error:
        logger.critical("the engine failed: %s", error, exc_info=not isinstance(error, EngineError))
        _report(outbox, sock, error)
        return EXIT_FAILED
    return 0


def _serve(inbox: Inbox, outbox: Outbox, heartbeat: HeartbeatThread) -> None:
    # Importing torch takes about as long as the client needs to find the model: do both at once.
    from suimon.core_engine.assembly import build_engine

    first = _first_message(inbox)
    if not isinstance(first, Configure):
        return
    set_up_logging(first.config.served_model_name or first.config.model)
    heartbeat.interval = first.config.heartbeat_interval
    heartbeat.enter(LOADING)
    built = build_engine(first.config, first.model_path)
    try:
        heartbeat.enter(READY)
        outbox.put(to_frame(_ready_message(built)))
        EngineLoop(built.engine, inbox, outbox, heartbeat).run()
    finally:
        built.engine.close()


def _ready_message(built: BuiltEngine) -> EngineReady:
    capabilities = built.engine.executor.capabilities
    limits = built.engine.scheduler.config
    return EngineReady(
        vocab_size=capabilities.vocab_size,
        max_model_len=built.engine.context_limit,
        num_blocks=capabilities.num_blocks,
        block_size=capabilities.block_size,
        max_num_seqs=limits.max_num_seqs,
        generates=capabilities.generates,
        embeds=capabilities.embeds,
        eos_token_ids=sorted(built.engine.scheduler.eos_token_ids),
        plan=list(built.plan),
    )


def _first_message(inbox: Inbox) -> ToEngine:
    """Configure or Shutdown, whichever comes first; anything else has no meaning yet."""
    while True:
        messages = inbox.receive(wait=True)
        for position, message in enumerate(messages):
            if isinstance(message, Configure | Shutdown):
                inbox.put_back(messages[position + 1 :])
                return message


def _report(outbox: Outbox, sock: socket.socket, error: Exception) -> None:
    """Last words; if the client reads them at all, it does so within a second."""
    with suppress(OSError):
        outbox.put(to_frame(EngineFailed(public_text(error), type(error).__name__)))
        if not outbox.is_empty:
            sock.settimeout(1.0)
            sock.sendall(outbox.take())


def _prepare_process() -> None:
    os.dup2(2, 1)  # whatever a library prints is a log line; standard output belongs to the gateway
    set_up_logging("starting")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's business
    signal.signal(signal.SIGTERM, _terminate)
    _die_with_parent()


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(0)  # from wherever the main thread is, through the clean-up of what it holds


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent ends; the closed socket says the same, but not to a thread in C code."""
    pr_set_pdeathsig = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # nothing is left to save, and tearing down an interpreter with torch in it takes its time
