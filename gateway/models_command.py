"""``suimon models``: what a server serves - where, in which state and why, as far as the server tells.

Knows the wire: OpenAI's list of models, and the ``suimon`` object in each entry, which other servers do not have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from suimon.gateway import chat

# What a server may say must not move the cursor or add lines: control characters are shown as such.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``suimon models``."""
    chat.add_server_flags(parser)
    parser.add_argument("--json", action="store_true", help="print what the server says, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the models; the exit status. Raises ChatError where no server answers."""
    with chat.connect(arguments.url, arguments.api_key) as client:
        models = chat.list_models(client)
    if arguments.json:
        print(json.dumps(models, indent=2, ensure_ascii=False))
        return 0
    for model in models:
        for line in describe(model):
            print(line.translate(_VISIBLE))
    return 0


def describe(model: Mapping[str, Any]) -> Iterator[str]:
    """One entry of the list for people: the name, and below it what the server adds."""
    ours = model.get("suimon")
    if not isinstance(ours, dict):
        yield str(model["id"])
        return
    yield f"{model['id']}  {ours.get('state')}"
    for name, value in _rows(ours):
        yield f"    {name:9}{value}"


def _rows(ours: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "backend", f"{ours.get('backend') or 'of a plugin'} ({ours.get('reason')})"
    if ours.get("replicas", 1) != 1:
        yield "replicas", f"{ours.get('ready')} of {ours['replicas']} ready"
    for name in ("aliases", "fallback"):
        if ours.get(name):
            yield name, ", ".join(map(str, ours[name]))
    for number, line in enumerate(ours.get("details") or ()):
        yield "" if number else "is", str(line)
