"""Chat templates: what they print, what they refuse, and that a hostile one costs its request and nothing else.

The oracle for what is printed is transformers' own rendering of the same template.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from suimon.core_engine.chat_template import ChatTemplateRenderer, load_chat_template
from suimon.core_engine.errors import EngineUnavailableError, InvalidRequestError, ModelLoadError
from suimon.core_engine.json_frames import encode_frame, read_frame
from suimon.core_engine.template_worker import ChatTemplate, answer
from suimon.core_engine.tokenizer import load_tokenizer

USER = {"role": "user", "content": " Hi there! \n"}
ASSISTANT = {"role": "assistant", "content": "Hello <b>"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "add", "content": "42"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds <i>",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
PARTS = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT_CHATML = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('Unexpected message role ' + m.role) }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)

Renderers = Callable[..., ChatTemplateRenderer]


@pytest.fixture
def renderer() -> Iterator[Renderers]:
    """Makes renderers of a template, which are closed at the end of the test."""
    made: list[ChatTemplateRenderer] = []

    def make(template: str | None, **options: Any) -> ChatTemplateRenderer:
        made.append(ChatTemplateRenderer(template, {"bos_token": "<s>"}, **({"workers": 1} | options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def render_here(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """Rendered by the worker's code in this process."""
    reply = answer(compiled(template), request_frame(messages, **options))
    return reply.get("text", f"{reply.get('error')}: {reply.get('message')}")


@lru_cache(maxsize=1)
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}, 1 << 20)


def request_frame(messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    frame = {
        "messages": messages,
        "tools": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "kwargs": {},
    }
    return frame | options


# --- what is printed


def test_messages_become_the_prompt(renderer: Renderers) -> None:
    text = renderer(CHATML).render([SYSTEM, USER])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi there! \n<|im_end|>\n<|im_start|>assistant\n"
    )
    text = renderer("{{ bos_token }}" + CHATML).render([USER], add_generation_prompt=False)
    assert text == "<s><|im_start|>user\n Hi there! \n<|im_end|>\n"


def test_the_demo_models_template(renderer: Renderers, demo_gguf: Path) -> None:
    template = load_tokenizer(demo_gguf).chat_template
    text = renderer(template).render([{"role": "user", "content": "What is the capital of France?"}])
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


CASES: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [USER, ASSISTANT, USER]},
    "two users": {"messages": [USER, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": [TOOL]},
    "result": {"messages": [USER, CALL, RESULT], "tools": [TOOL]},
    "continued": {"messages": [USER, ASSISTANT], "add_generation_prompt": False, "continue_final_message": True},
    "trailing space": {
        "messages": [USER, {"role": "assistant", "content": "goes on "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}


def rendered_by_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """None where transformers raises: it has other rules for what a request may not ask."""
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{name: value for name, value in message.items() if value is not None} for message in messages]
    for message in conversation:
        if "tool_calls" in message:  # transformers wants arguments as an object
            message["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
            message["tool_calls"][0]["id"] = "call12345"
    options = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"} | options
    try:
        texts, _ = render_jinja_template([conversation], chat_template=template, **options)
    except Exception:  # whatever the template does
        return None
    return str(texts[0])


def test_templates_of_real_models_print_what_they_print_in_transformers(llama_cpp_models: Path) -> None:
    paths = sorted((llama_cpp_models / "templates").glob("*.jinja"))
    compared = 0
    for path in paths:
        template = path.read_text(encoding="utf-8")
        for name, case in CASES.items():
            theirs = rendered_by_transformers(template, **case)
            ours = render_here(template, **case)
            if theirs is None:
                continue
            if name == "result" and path.name == "llama-cpp-rwkv-world.jinja":
                assert "42" not in theirs + ours  # prints no calls; it asks for null, which we keep and they drop
                continue
            assert ours == theirs, (path.name, name)
            compared += 1
    assert len(paths) >= 60 and compared >= 400


# --- what OpenAI's clients send (known-bugs B21, B22, B23)


def test_what_the_template_raises_reaches_the_client(renderer: Renderers) -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate user/assistant") as caught:
        renderer(ALTERNATING).render([USER, USER])
    assert caught.value.param == "messages"


def test_no_messages_are_refused(renderer: Renderers) -> None:
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        renderer(CHATML).render([])


def test_a_developer_is_a_system_where_the_template_knows_none() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert render_here(STRICT_CHATML, [developer, USER]) == render_here(STRICT_CHATML, [SYSTEM, USER])
    knows = "{% for m in messages %}{% if m.role == 'developer' %}DEV{% endif %}{% endfor %}"
    assert render_here(knows, [developer]) == "DEV"


def test_an_unknown_role_is_refused_but_a_templates_own_is_not() -> None:
    document = {"role": "document", "content": "x"}
    assert render_here(CHATML, [document]).startswith("request: 'document' is no role")
    own = "{% for m in messages %}{% if m.role == 'document' %}D:{{ m.content }}{% endif %}{% endfor %}"
    assert render_here(own, [document]) == "D:x"
    assert render_here(CHATML, [{"content": "no role"}]).startswith("request: 'None' is no role")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", "first\nsecond"),
        ("{% for part in messages[0]['content'] %}[{{ part.text }}]{% endfor %}", "[first][second]"),
        ("{% for m in messages %}{% set c = m.get('content') %}{% for p in c %}{{ p.text }};{% endfor %}{% endfor %}",
         "first;second;"),
        ("{% for line in messages[0].content.split('\n') %}<{{ line }}>{% endfor %}", "<first><second>"),
    ],
)  # fmt: skip
def test_text_parts_are_joined_unless_the_template_walks_over_them(template: str, expected: str) -> None:
    assert render_here(template, [{"role": "user", "content": PARTS}]) == expected


def test_a_part_that_is_no_text_is_refused_where_parts_are_joined() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert "no text" in render_here(CHATML, [{"role": "user", "content": [*PARTS, image]}])


def test_a_call_without_text_and_its_result_are_both_in_the_prompt() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' + m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments.x }}){% endfor %};"
        "{% endfor %}"
    )
    assert render_here(template, [CALL, RESULT]) == "assistant:add(1);tool:42;"


def test_null_stays_null_for_a_template_that_asks() -> None:
    asks = "{% for m in messages %}{% if m['content'] is none %}NONE{% else %}{{ m.content }}{% endif %}{% endfor %}"
    assert render_here(asks, [CALL, RESULT]) == "NONE42"
    asks_in_one_place_only = asks + "{{ 'x' + messages[0].content }}"
    assert render_here(asks_in_one_place_only, [CALL, RESULT]) == "42x"


def test_other_null_fields_are_as_good_as_missing() -> None:
    template = "{{ 'name' in messages[0] }} {{ messages[0].tool_calls is defined }}"
    assert render_here(template, [{**USER, "name": None, "tool_calls": None}]) == "False False"


def test_arguments_that_are_no_json_object_stay_as_they_are() -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    for text in ("not json", "[1]", "{"):
        call = {"type": "function", "function": {"name": "f", "arguments": text}}
        assert render_here(template, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == text


@pytest.mark.parametrize("template", ["{{ messages[-1].content }}</end>", "{{ messages[-1].content | trim }}</end>"])
def test_a_final_message_is_left_open(template: str) -> None:
    text = render_here(template, [{"role": "assistant", "content": "so far "}], continue_final_message=True)
    assert text == ("so far" if "trim" in template else "so far ")


def test_what_cannot_be_continued_is_refused(renderer: Renderers) -> None:
    for template, message in [(CHATML, CALL), ("nothing", ASSISTANT)]:
        assert render_here(template, [message], continue_final_message=True).startswith("request: ")
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        renderer(CHATML).render([ASSISTANT], add_generation_prompt=True, continue_final_message=True)


def test_only_the_templates_own_options_can_be_set(renderer: Renderers) -> None:
    thinking = renderer(
        "{{ enable_thinking }} {{ bos_token }} {{ raise_exception is defined }} {{ messages | length }}"
    )
    assert thinking.render([USER], template_kwargs={"enable_thinking": False}) == "False <s> True 1"
    for name in ("tokenize", "bos_token", "messages", "raise_exception", "tools"):
        with pytest.raises(InvalidRequestError, match=rf"'{name}' is no option.*: enable_thinking") as caught:
            thinking.render([USER], template_kwargs={name: True})
        assert caught.value.param == "chat_template_kwargs"


def test_without_a_template_the_remedy_is_named(renderer: Renderers) -> None:
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        renderer(None).render([USER])


def test_a_source_that_is_no_template_is_the_models_fault(renderer: Renderers) -> None:
    broken = renderer("{% if messages %}never ends")
    for _ in range(2):
        with pytest.raises(ModelLoadError, match=r"cannot be compiled.*line 1"):
            broken.render([USER])


def test_the_operators_template_is_text_or_a_file(tmp_path: Path) -> None:
    assert load_chat_template("{{ x }}") == "{{ x }}"
    (tmp_path / "chat.jinja").write_text("from a file")
    assert load_chat_template(str(tmp_path / "chat.jinja")) == "from a file"
    with pytest.raises(ModelLoadError, match=r"missing\.jinja"):
        load_chat_template(str(tmp_path / "missing.jinja"))


# --- hostile templates and messages

ATTACKS = {
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ cycler.__init__.__globals__ }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}": "SecurityError",
    "{{ namespace(_x=1) }}": "SecurityError",
    "{{ 'a' * 10**10 }}": "MemoryError",
    "{{ messages[0].content * 10**10 }}": "MemoryError",
    "{{ '%99999999999d' | format(1) }}": "MemoryError",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "RecursionError",
    "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}": "more than 16777216 characters",
    "{{ missing.attribute }}": "'missing' is undefined",
    "{% include 'x' %}": "no loader",
}


def test_what_the_sandbox_stops_costs_one_request_and_no_worker(renderer: Renderers) -> None:
    switch = "".join(
        f"{{% if messages[0].content == '{number}' %}}{attack}{{% endif %}}" for number, attack in enumerate(ATTACKS)
    )
    target = renderer(switch + "{{ messages[0].content }}")
    for number, expected in enumerate(ATTACKS.values()):
        with pytest.raises(InvalidRequestError, match=expected) as caught:
            target.render([{"role": "user", "content": str(number)}])
        assert len(str(caught.value)) < 1200 and " at 0x" not in str(caught.value)
    assert target.render([{"role": "user", "content": "still here"}]) == "still here"


ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 9) }}",
}


@pytest.mark.parametrize("attack", ENDLESS.values(), ids=ENDLESS.keys())
def test_what_does_not_end_is_killed_and_replaced(renderer: Renderers, attack: str) -> None:
    target = renderer(f"{{% if messages[0].content == 'go' %}}{attack}{{% endif %}}fine", deadline=1.0)
    target.render([USER])  # the template is compiled
    with pytest.raises(InvalidRequestError, match="longer than 1 seconds") as caught:
        target.render([{"role": "user", "content": "go"}])
    assert caught.value.param == "messages"
    assert target.render([USER]) == "fine"


def test_a_slow_one_does_not_hold_up_the_others(renderer: Renderers) -> None:
    attack = f"{{% if messages[0].content == 'go' %}}{ENDLESS['loops']}{{% endif %}}ok"
    target = renderer(attack, workers=2, deadline=600.0)

    with ThreadPoolExecutor(5) as threads:
        slow = threads.submit(target.render, [{"role": "user", "content": "go"}])
        assert list(threads.map(target.render, [[USER]] * 20)) == ["ok"] * 20
        assert not slow.done()
        target.close()
        with pytest.raises(EngineUnavailableError):
            slow.result()


def test_a_worker_that_dies_is_replaced(renderer: Renderers) -> None:
    target = renderer(CHATML)
    first = target.render([USER])
    (worker,) = target._running
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert target.render([USER]) == first


def test_a_worker_has_no_secrets_and_ends_with_its_parent() -> None:
    """The parent is a process of its own, killed without a chance to clean up."""
    code = (
        "import time; from suimon.core_engine.chat_template import ChatTemplateRenderer as R; "
        "r = R('{{ messages | length }}', workers=1); r.render([{'role': 'user', 'content': ''}]); "
        "print(next(iter(r._running))._process.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "SUIMON_API_KEY": "secret", "HF_TOKEN": "secret"}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    if Path("/proc/self/environ").exists():
        assert b"secret" not in Path(f"/proc/{worker}/environ").read_bytes()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    give_up = time.monotonic() + 30
    while is_running(worker):
        assert time.monotonic() < give_up
        time.sleep(0.05)


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process_id}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_messages_too_deep_for_json_are_the_requests_fault(renderer: Renderers) -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    target = renderer(CHATML)
    with pytest.raises(InvalidRequestError, match="cannot be rendered"):
        target.render([{"role": "user", "content": "x", "extra": deep}])
    assert "x" in target.render([{"role": "user", "content": "x"}])


def test_the_rendered_size_is_bounded(renderer: Renderers) -> None:
    target = renderer("{{ messages[0].content }}", max_chars=100)
    assert target.render([{"role": "user", "content": "x" * 100}]) == "x" * 100
    with pytest.raises(InvalidRequestError, match="more than 100 characters"):
        target.render([{"role": "user", "content": "x" * 101}])


def test_a_long_conversation_passes(renderer: Renderers) -> None:
    """Far more than a socket's buffer, both ways."""
    messages = [{"role": "user", "content": "é" * 1_000_000} for _ in range(4)]
    assert renderer("{% for m in messages %}{{ m.content }}{% endfor %}").render(messages) == "é" * 4_000_000


def test_half_a_surrogate_pair_comes_back_as_it_is(renderer: Renderers) -> None:
    assert renderer("{{ messages[0].content }}").render([{"role": "user", "content": "\ud800"}]) == "\ud800"


def test_after_closing_nothing_is_rendered_and_no_process_is_left() -> None:
    target = ChatTemplateRenderer(CHATML, workers=2)
    target.start()
    processes = [worker._process for worker in target._running]
    assert len(processes) == 2
    target.close()
    assert all(process.returncode is not None for process in processes)
    with pytest.raises(EngineUnavailableError):
        target.render([USER])
    target.close()


# --- the worker and its frames


def test_the_worker_imports_nothing_heavy() -> None:
    code = (
        "import sys, suimon.core_engine.template_worker; "
        "print(sorted({'torch', 'numpy', 'transformers', 'tokenizers', 'msgspec', 'asyncio'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_frames_go_and_come_back() -> None:
    import io

    stream = io.BytesIO(encode_frame({"a": [1, "é"]}) + encode_frame("b"))
    assert (read_frame(stream.read), read_frame(stream.read)) == ({"a": [1, "é"]}, "b")
    with pytest.raises(EOFError):
        read_frame(stream.read)
    with pytest.raises(EOFError, match="inside a frame"):
        read_frame(io.BytesIO(encode_frame("abc")[:-1]).read)
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        read_frame(io.BytesIO(b"\xff\xff\xff\xff").read)
