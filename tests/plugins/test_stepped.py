"""A stranger's StepExecutor as a backend: thirty lines of it, over HTTP's neutral form, in a real engine process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import BackendUnavailable, Delta, GenerateRequest, InvalidRequest, Message, SamplingParams
from suimon.plugins.stepped import SteppedBackend

PATIENCE = 60.0  # seconds that only a defect takes

EXECUTOR = '''
import torch
from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.executor import ExecutorCapabilities, ForwardExecutor


class NextLetter(ForwardExecutor):
    """After a letter comes the next one of the alphabet, ``stride`` further on; its tokenizer's ids are the letters."""

    eos_token_ids = (26,)
    plan = ("knows the alphabet",)

    def __init__(self, config, model_path):
        super().__init__()
        self.stride = config.executor_options.get("stride", 1)
        if self.stride < 1:
            raise ModelLoadError("a stride of less than one")

    capabilities = ExecutorCapabilities(
        vocab_size=27, max_model_len=64, num_blocks=64, block_size=16, max_num_seqs=4
    )

    def forward(self, batch):
        last = [t for s in batch.sequences for t in s.token_ids[len(s.token_ids) - s.num_logits:]]
        following = torch.tensor([min(t + self.stride, 26) for t in last])
        return torch.nn.functional.one_hot(following, 27) * 50.0
'''
PLUGIN = """
from suimon.gateway.hookspecs import hookimpl
from suimon.plugins.stepped import SteppedBackend


@hookimpl
def register_backends(register, settings):
    for model in settings.models:
        if model.backend == "alphabet":
            register(SteppedBackend(model, executor="next_letter:NextLetter", options=model.options))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model's folder and, importable as an installed package would be, its executor."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    place = tmp_path_factory.mktemp("alphabet")
    letters = {chr(ord("a") + number): number for number in range(26)} | {"<end>": 26}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(place / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": template}))
    (place / "next_letter.py").write_text(EXECUTOR)
    (place / "alphabet_plugin.py").write_text(PLUGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place))
        patch.syspath_prepend(str(place))
        yield place


def make_backend(folder: Path, **options: Any) -> SteppedBackend:
    import alphabet_plugin

    registered: list[Any] = []
    model = ModelSettings(model=str(folder), backend="alphabet", served_model_name="abc", options=options)
    alphabet_plugin.register_backends(registered.append, Settings(models=(model, ModelSettings(backend="other"))))
    (backend,) = registered
    return backend


async def collect(backend: SteppedBackend, **request: Any) -> list[Delta]:
    wanted = GenerateRequest(request_id="r", model="abc", **request)
    return [delta async for delta in backend.generate(wanted)]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def run(backend: SteppedBackend, work: Any) -> Any:
    async def session() -> Any:
        try:
            await backend.start()
            return await work(backend)
        finally:
            await backend.stop()

    return asyncio.run(asyncio.wait_for(session(), PATIENCE))


GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


def test_a_strangers_executor_gets_the_whole_engine(folder: Path) -> None:
    async def work(backend: SteppedBackend) -> None:
        assert (backend.model_id, list(backend.describe())) == ("abc", ["knows the alphabet"])
        assert text_of(await collect(backend, prompt="abc", sampling=GREEDY)) == "defgh"
        chat = (Message(role="user", content="uvw"),)
        deltas = await collect(backend, messages=chat, sampling=SamplingParams(temperature=0.0))
        assert (text_of(deltas), deltas[-1].finish_reason) == ("xyz", "stop")
        assert deltas[-1].usage is not None and deltas[-1].usage.prompt_tokens == 3
        stopped = await collect(backend, prompt="a", sampling=SamplingParams(temperature=0.0, stop=("ef",)))
        assert (text_of(stopped), stopped[-1].stop_reason) == ("bcd", "ef")
        biased = SamplingParams(temperature=0.0, max_tokens=1, logit_bias={2: 100.0}, logprobs=2)
        (only,) = [delta for delta in await collect(backend, prompt="a", sampling=biased) if delta.logprobs]
        assert only.text == "c" and [top.token for top in only.logprobs[0].top] == ["b", "a"]
        crowd = await asyncio.gather(*(collect(backend, prompt=p, sampling=GREEDY) for p in ("a", "kl", "qrs") * 4))
        assert [text_of(deltas) for deltas in crowd] == ["bcdef", "mnopq", "tuvwx"] * 4

    run(make_backend(folder), work)


def test_its_options_reach_it(folder: Path) -> None:
    async def work(backend: SteppedBackend) -> str:
        return text_of(await collect(backend, prompt="a", sampling=GREEDY))

    assert run(make_backend(folder, stride=2), work) == "cegik"


def test_what_it_raises_while_loading_is_told(folder: Path) -> None:
    async def work(backend: SteppedBackend) -> None: ...

    with pytest.raises(BackendUnavailable, match="a stride of less than one"):
        run(make_backend(folder, stride=0), work)


def test_an_executor_that_cannot_be_imported_is_named(folder: Path) -> None:
    async def work(backend: SteppedBackend) -> None: ...

    backend = SteppedBackend(ModelSettings(model=str(folder)), executor="next_letter:Missing")
    with pytest.raises(InvalidRequest, match="next_letter:Missing"):
        run(backend, work)


def test_a_reader_that_leaves_and_an_engine_that_dies_leave_nothing_behind(folder: Path) -> None:
    async def work(backend: SteppedBackend) -> None:
        endless = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        for _ in range(5):
            request = GenerateRequest(request_id="r", model="abc", prompt="a", sampling=endless)
            async with aclosing(backend.generate(request)) as deltas:
                await anext(deltas)
        os.kill(backend.client.pid, signal.SIGKILL)
        assert text_of(await collect(backend, prompt="abc", sampling=GREEDY)) == "defgh"
        while (load := backend.load()).running or load.blocks_used:
            await asyncio.sleep(0.01)
        assert load.restarts == 1

    run(make_backend(folder), work)


def test_a_setting_that_the_engine_refuses_names_the_model(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"model 'abc': block_size .* 3"):
        SteppedBackend(ModelSettings(model="m", served_model_name="abc", block_size=3), executor="x:Y")
