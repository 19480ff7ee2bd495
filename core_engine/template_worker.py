"""The process that renders chat templates. A template is a program from the internet: it runs here, and nowhere else.

Run as ``python -P -m suimon.core_engine.template_worker`` with one socket as standard input and output, which carry
frames of JSON (json_frames.py). The first frame in is the set-up, ``{"template", "variables", "max_chars",
"memory_limit", "cpu_seconds"}``; each further one is a request, ``{"messages", "tools", "add_generation_prompt",
"continue_final_message", "kwargs"}``. The answer to each is one frame, ``{"text"}`` or ``{"error": kind, "message",
"param"}``. Any EOF ends the process, so it never outlives the one that started it.

What holds a hostile template: jinja2's immutable sandbox, a limit on memory and CPU time, no writing of files, an
environment without secrets (the parent's doing), and the parent, which kills this process when it takes too long. This
module imports the standard library and jinja2 only, so that a killed worker is replaced in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from suimon.core_engine.json_frames import encode_frame, read_frame

MAX_ERROR_CHARS = 1000
# Roles that OpenAI's API has; a template may know more.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Variables that a request cannot set beside its own fields.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})

Message = dict[str, Any]


class RequestError(Exception):
    """The messages or options do not suit the template; ``param`` names the culprit."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class RaisedByTemplate(jinja2.TemplateError):
    """The template itself refused the messages, through ``raise_exception``."""


# --- the environment that templates run in; as in transformers, so that a model's template means the same here


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what the model wrote, for training; here its content is simply printed."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own annotation

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` without names that begin with an underscore: Python keeps its own things under those."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplate(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is: jinja2's own filter would write HTML escapes into the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox: no attributes that begin with an underscore, nothing mutable, ranges up to 100,000.

    Operators whose result can be far larger than what they are given are intercepted, which does nothing but keep
    jinja2 from computing them while it compiles: a rendering has a deadline, and loading should not need one.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+"})


def make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment of every template."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols], cache_size=0
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace, dict=_dict
    )
    return environment


# --- one template


class ChatTemplate:
    """A compiled template and what its source says about it.

    ``variables`` hold for every request (``bos_token``, ...). ``options`` are the names that a request may give values
    to. ``roles`` are those that the template compares something with, and those that every template takes.
    ``reads_parts``: it walks over content that is a list. ``reads_null``: it asks whether content is none.
    Raises jinja2.TemplateSyntaxError if the source is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], max_chars: int) -> None:
        environment = make_environment()
        tree = environment.parse(source)
        self._variables = variables
        self._max_chars = max_chars
        read = jinja2.meta.find_undeclared_variables(tree)
        self.options = read - _RESERVED - variables.keys() - environment.globals.keys()
        self.roles = _ROLES | _strings(*tree.find_all(jinja2.nodes.Compare))
        self.has_developer = "developer" in _strings(tree)
        names = _content_names(tree)
        self.reads_parts = any(_is_content(loop.iter, names) for loop in tree.find_all(jinja2.nodes.For))
        tests = (test for test in tree.find_all(jinja2.nodes.Test) if test.name == "none")
        self.reads_null = any(_is_content(test.node, names) for test in tests)
        code = environment.compile(tree)  # the last use of the tree: compiling changes it
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))

    def render(self, request: Mapping[str, Any]) -> str:
        """The prompt of a request frame. Raises RequestError, or what the template raises."""
        self._check_options(request["kwargs"])
        messages = [self._prepare(message) for message in request["messages"]]
        if not request["continue_final_message"]:
            return self._run(messages, request)
        return _cut_at_mark(self._run([*messages[:-1], _mark_end(messages[-1])], request))

    def _run(self, messages: list[Message], request: Mapping[str, Any]) -> str:
        try:
            return self._run_once(messages, request)
        except (jinja2.UndefinedError, TypeError):
            # A template may ask whether content is null in one place and not expect it in another.
            emptied = [{**message, "content": message["content"] or ""} for message in messages]
            if emptied == messages:
                raise
            return self._run_once(emptied, request)

    def _run_once(self, messages: list[Message], request: Mapping[str, Any]) -> str:
        context = {
            **self._variables,
            **request["kwargs"],
            "messages": messages,
            "tools": request["tools"],
            "documents": None,
            "add_generation_prompt": request["add_generation_prompt"],
        }
        return "".join(_limited(self._template.generate(context), self._max_chars))

    def _check_options(self, kwargs: Mapping[str, Any]) -> None:
        unknown = sorted(kwargs.keys() - self.options)
        if unknown:
            known = ", ".join(sorted(self.options)) or "none"
            message = f"{unknown[0][:80]!r} is no option of the model's chat template; its options: {known}"
            raise RequestError(message, "chat_template_kwargs")

    def _prepare(self, message: Message) -> Message:
        """The message as the template can read it; a key whose value is null is as good as missing."""
        role, content = message.get("role"), message.get("content")
        if role == "developer" and not self.has_developer:
            role = "system"
        if role not in self.roles:
            known = ", ".join(sorted(_ROLES))
            raise RequestError(f"{str(role)[:80]!r} is no role that the chat template knows; use one of {known}")
        if content is None:
            content = None if self.reads_null else ""
        elif isinstance(content, list) and not self.reads_parts:
            content = "\n".join(_part_text(part) for part in content)
        kept = {name: value for name, value in message.items() if value is not None}
        if "tool_calls" in kept:
            kept["tool_calls"] = [_parse_arguments(call) for call in kept["tool_calls"]]
        return {**kept, "role": role, "content": content}


def _strings(*nodes: jinja2.nodes.Node) -> frozenset[str]:
    """Every string constant in ``nodes``."""
    constants = (constant.value for node in nodes for constant in node.find_all(jinja2.nodes.Const))
    return frozenset(value for value in constants if isinstance(value, str))


def _parse_arguments(call: Any) -> Any:
    """OpenAI sends a call's arguments as a string of JSON; templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


# The end of a message to be continued is found by a mark behind its text. The mark ends in a space, which shows whether
# the template trims: if so, the spaces at the end of the text are gone too.
_MARK = "\ue000the-answer-goes-on-here\ue001 "


def _mark_end(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, list) and content and isinstance(content[-1], dict) and content[-1].get("text"):
        part = {**content[-1], "text": content[-1]["text"] + _MARK}
        return {**message, "content": [*content[:-1], part]}
    if not isinstance(content, str) or not content:
        raise RequestError("continue_final_message needs a last message with a text to continue")
    return {**message, "content": content + _MARK}


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_MARK.rstrip())
    if end < 0:
        raise RequestError("the model's chat template does not print the last message's text, so it cannot go on")
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


def _content_names(tree: jinja2.nodes.Node) -> frozenset[str]:
    """Variables that hold a message's content: ``content``, and what is set to one."""
    assigned = ((node.target, node.node) for node in tree.find_all(jinja2.nodes.Assign))
    names = (target.name for target, value in assigned if isinstance(target, jinja2.nodes.Name) and _is_content(value))
    return frozenset({"content", *names})


def _is_content(node: jinja2.nodes.Node | None, names: frozenset[str] = frozenset({"content"})) -> bool:
    """Whether an expression is a message's content: ``m.content``, ``m['content'] | f``, ``m.get('content')``."""
    match node:
        case jinja2.nodes.Filter():
            return _is_content(node.node, names)
        case jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Call(node=jinja2.nodes.Getattr(attr="get"), args=[jinja2.nodes.Const(value="content"), *_]):
            return True
        case jinja2.nodes.Name():
            return node.name in names
    return False


def _part_text(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise RequestError("content has a part that is no text; the model's chat template takes text only")
    return text


def _limited(pieces: Iterable[str], max_chars: int) -> Iterator[str]:
    left = max_chars
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise RequestError(f"the messages make a prompt of more than {max_chars} characters")
        yield piece


# --- the process


def answer(template: ChatTemplate, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer frame to a request frame; never raises what a template can raise."""
    try:
        return {"text": template.render(request)}
    except RequestError as error:
        return {"error": "request", "message": str(error)[:MAX_ERROR_CHARS], "param": error.param}
    except RaisedByTemplate as error:
        return {"error": "raised", "message": str(error)[:MAX_ERROR_CHARS], "param": "messages"}
    except Exception as error:  # whatever the program in the template does wrong
        return {"error": "failed", "message": describe(error), "param": "messages"}


def describe(error: Exception) -> str:
    """What went wrong in one line, without addresses of objects."""
    text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:MAX_ERROR_CHARS]


def set_up(setup: Mapping[str, Any]) -> tuple[ChatTemplate | None, dict[str, Any]]:
    """Compile the template; (None, error frame) if that fails."""
    try:
        return ChatTemplate(setup["template"], setup["variables"], setup["max_chars"]), {"text": ""}
    except Exception as error:  # jinja2 raises more than TemplateSyntaxError on odd sources
        line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return None, {"error": "syntax", "message": describe(error) + line}


def limit_process(memory_limit: int) -> None:
    """Bound memory (bytes) for good, forbid files and core dumps."""
    for kind, limit in ((resource.RLIMIT_AS, memory_limit), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        allowed = _allowed(kind, limit)
        resource.setrlimit(kind, (allowed, allowed))


def limit_cpu(seconds: int) -> None:
    """Give the next request its CPU time: the limit counts from the start of the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = int(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (_allowed(resource.RLIMIT_CPU, wanted), hard))


def _allowed(kind: int, limit: int) -> int:
    """``limit``, or what the operator's own hard limit leaves of it."""
    _, hard = resource.getrlimit(kind)
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def main() -> None:
    """Serve requests until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches us too; the parent decides
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer the frames of ``requests``, the set-up first. Raises EOFError when there are no more."""
    setup = read_frame(requests.read)
    limit_process(setup["memory_limit"])
    limit_cpu(setup["cpu_seconds"])
    template, reply = set_up(setup)
    _send(answers, reply)
    while template is not None:
        request = read_frame(requests.read)
        limit_cpu(setup["cpu_seconds"])
        _send(answers, answer(template, request))


def _send(stream: BinaryIO, content: Mapping[str, Any]) -> None:
    stream.write(encode_frame(content))
    stream.flush()


if __name__ == "__main__":
    main()
