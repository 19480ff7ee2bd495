"""``suimon chat``: a conversation in the terminal with any OpenAI-compatible server.

Knows the wire (chat completions as server-sent events) and the terminal; knows nothing of this project's server. On a
terminal it holds a conversation; with piped input it answers that one prompt and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
HISTORY = "~/.cache/suimon/chat_history"
HELP = "/exit leaves, /clear forgets the conversation, /system TEXT sets the instructions, Ctrl-C stops an answer"

# A model's words must not move the cursor or set colours: control characters but tab and line feed are dropped.
_INERT = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class ChatError(Exception):
    """The server cannot be reached or refused; the message is one line for the user."""


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Which server, and the key it asks for."""
    url = os.environ.get("SUIMON_URL", DEFAULT_URL)
    parser.add_argument("--url", default=url, help="server (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("SUIMON_API_KEY"), help="API key (or SUIMON_API_KEY)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``suimon chat``."""
    add_server_flags(parser)
    parser.add_argument("--model", help="model name (default: the first that the server lists)")
    parser.add_argument("--system", help="instructions to begin with")
    # At the API's own default of 1 a small model wanders off, and without an end in sight it never comes back.
    parser.add_argument(
        "--temperature", type=float, default=0.6, help="0: always the same answer (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest answer (default: %(default)s)")


class Conversation:
    """The messages so far, and the server that answers them."""

    def __init__(self, client: httpx.Client, model: str, *, system: str | None = None, **sampling: Any) -> None:
        self._client = client
        self._model = model
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self.messages: list[dict[str, str]] = []
        self.clear(system)

    def clear(self, system: str | None = None) -> None:
        """Forget everything but the instructions, which ``system`` replaces."""
        kept = [message for message in self.messages if message["role"] == "system"]
        self.messages = [{"role": "system", "content": system}] if system else kept

    def ask(self, prompt: str) -> Iterator[str]:
        """The answer, piece by piece; of one stopped early, what was said stays. Raises ChatError."""
        self.messages.append({"role": "user", "content": prompt})
        said: list[str] = []
        try:
            for piece in self._stream():
                said.append(piece)
                yield piece
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        import httpx

        body = {"model": self._model, "messages": self.messages, "stream": True, **self._sampling}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatError(_error_text(response.read(), response.status_code))
                yield from _contents(_lines(response.iter_bytes()))
        except httpx.TransportError as error:
            raise ChatError(f"the connection was lost: {error}") from None
        except httpx.DecodingError as error:
            raise ChatError(f"the server's answer cannot be decoded: {error}") from None


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Lines ended by a line feed only: JSON may hold the other characters that Python takes for line ends."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace")
    yield rest.decode("utf-8", "replace")


def _contents(lines: Iterator[str]) -> Iterator[str]:
    """The text in the events; a stream that stops without its [DONE] was cut off."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        content = _content(data)
        if content:
            yield content
    raise ChatError("the server ended the answer before it was complete")


def _content(data: str) -> str:
    """An event's text. Raises ChatError for an error, and for what is no event of such a server."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise ChatError(_error_text(data.encode(), 200))
        return "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices", ()))
    except (ValueError, TypeError, AttributeError):
        raise ChatError("the server sent what is no event of an OpenAI-compatible server") from None


def _error_text(body: bytes, status: int) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return f"the server answered with status {status}"


def connect(url: str, api_key: str | None) -> httpx.Client:
    """A client for the server at ``url``, with or without its ``/v1``."""
    import httpx

    if api_key and not api_key.isprintable():
        raise ChatError("--api-key: holds a character that no key has, perhaps a line end")
    headers = {b"authorization": f"Bearer {api_key}".encode()} if api_key else {}
    timeout = httpx.Timeout(10.0, read=None)  # a model may think for a while
    base = url.rstrip("/").removesuffix("/v1")
    try:
        return httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False)
    except httpx.InvalidURL as error:
        raise ChatError(f"--url {url}: {error}") from None


def list_models(client: httpx.Client) -> list[dict[str, Any]]:
    """The server's entries of its models, at least one, each with an ``id``.

    Raises ChatError with the remedy when nothing answers.
    """
    import httpx

    try:
        response = client.get("/v1/models")
    except httpx.UnsupportedProtocol:
        raise ChatError(f"--url {client.base_url}: must begin with http:// or https://") from None
    except httpx.TransportError as error:
        raise ChatError(
            f"no server answers at {client.base_url} ({type(error).__name__}): start one with `suimon serve`, or name "
            "another with --url"
        ) from None
    if response.status_code != 200:
        raise ChatError(_error_text(response.content, response.status_code))
    try:
        models = [{**model, "id": str(model["id"])} for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise ChatError(f"what answers at {client.base_url} is not an OpenAI-compatible server") from None
    if not models:
        raise ChatError("the server lists no models yet")
    return models


def run(arguments: argparse.Namespace) -> int:
    """Talk until the user leaves; the exit status. Raises ChatError where there is nobody to talk to."""
    with connect(arguments.url, arguments.api_key) as client:
        model = arguments.model or list_models(client)[0]["id"]
        conversation = Conversation(
            client,
            model,
            system=arguments.system,
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
        )
        if not sys.stdin.isatty():
            _print_answer(conversation, sys.stdin.read().strip(), sys.stdout)
            return 0
        print(f"{model} at {client.base_url}. {HELP}.")
        with _line_editing():
            _converse(conversation)
    return 0


def _converse(conversation: Conversation) -> None:
    for line in _prompts():
        if line.startswith("/"):
            if not _command(conversation, line):
                return
            continue
        try:
            _print_answer(conversation, line, sys.stdout)
        except KeyboardInterrupt:
            print(" (stopped)")
        except ChatError as error:
            print(f"error: {error}", file=sys.stderr)


def _prompts() -> Iterator[str]:
    """What the user types, until the end of input or a second Ctrl-C in a row."""
    interrupted = False
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if interrupted:
                return
            interrupted = True
            continue
        interrupted = False
        if line:
            yield line


def _command(conversation: Conversation, line: str) -> bool:
    """Carry out a slash command; False to leave."""
    word, _, rest = line.partition(" ")
    if word in ("/exit", "/quit"):
        return False
    if word == "/clear":
        conversation.clear()
    elif word == "/system" and rest.strip():
        conversation.clear(rest.strip())
    else:
        print(HELP)
    return True


def _print_answer(conversation: Conversation, prompt: str, out: TextIO) -> None:
    if not prompt:
        raise ChatError("there is no prompt on standard input")
    with contextlib.closing(conversation.ask(prompt)) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            out.write(piece.translate(_INERT))
            out.flush()
    out.write("\n")


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Arrow keys and a history that survives, where Python was built with readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    history = Path(os.path.expanduser(HISTORY))  # which, unlike Path's own, has an answer where there is no home
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)
