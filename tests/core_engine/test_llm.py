"""LLM, the offline door, over an executor whose answers are known; tests/plugins has it equal the online one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from suimon.core_engine.errors import ContextLengthError, EngineError, InvalidRequestError
from suimon.core_engine.llm import LLM
from suimon.core_engine.sampling_params import SamplingParams

FAILING = 292  # as in counting_executor.py
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        from counting_executor import write_model

        model = write_model(tmp_path_factory.mktemp("counting"))
        options = {"max_num_seqs": 3, "max_model_len": 64, "max_num_queued_requests": 1}
        with LLM(str(model), executor="counting_executor:CountingExecutor", **options) as loaded:
            yield loaded


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.has_work
    llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("5 6", [[7, 8, 9, 10]]),
        ([5, 6], [[7, 8, 9, 10]]),
        (["5", "30"], [[6, 7, 8, 9], [31, 32, 33, 34]]),
        ([[5], [30]], [[6, 7, 8, 9], [31, 32, 33, 34]]),
        ([], []),
    ],
)
def test_prompts_of_every_form(llm: LLM, prompts, expected) -> None:
    results = llm.generate(prompts, GREEDY)
    assert [result.completions[0].token_ids for result in results] == expected


def test_many_more_prompts_than_fit_at_once_come_back_in_their_order(llm: LLM) -> None:
    results = llm.generate([[number] for number in range(100)], GREEDY)
    assert [result.completions[0].token_ids[0] for result in results] == list(range(1, 101))
    assert [result.prompt_token_ids for result in results] == [[number] for number in range(100)]


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in (1, 3)]
    results = llm.generate(["5", "6"], params)
    assert [len(result.completions[0].token_ids) for result in results] == [1, 3]
    with pytest.raises(InvalidRequestError, match="2 prompts, got 1"):
        llm.generate(["5", "6"], params[:1])


def test_a_stop_string_cuts_the_text_and_ends_the_sequence(llm: LLM) -> None:
    (result,) = llm.generate("5", SamplingParams(temperature=0.0, max_tokens=50, stop=("9",)))
    completion = result.completions[0]
    assert (result.text.split(), completion.finish_reason, completion.stop_reason) == (["6", "7", "8"], "stop", "9")
    assert completion.token_ids == [6, 7, 8, 9]


def test_logprobs_run_parallel_to_the_tokens(llm: LLM) -> None:
    (result,) = llm.generate("5", SamplingParams(temperature=0.0, max_tokens=3, logprobs=1))
    completion = result.completions[0]
    assert [entry.token_id for entry in completion.logprobs] == completion.token_ids == [6, 7, 8]


def test_several_choices_of_one_prompt(llm: LLM) -> None:
    (result,) = llm.generate("5", SamplingParams(temperature=5.0, max_tokens=20, n=3, seed=1))
    assert [completion.index for completion in result.completions] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in result.completions}) == 3


def test_chats_one_or_several(llm: LLM) -> None:
    chat = [{"role": "user", "content": "5"}]
    assert llm.chat(chat, GREEDY)[0].text.split() == ["6", "7", "8", "9"]
    assert [result.text.split()[0] for result in llm.chat([chat, chat], GREEDY)] == ["6", "6"]
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat([], GREEDY)


@pytest.mark.parametrize(("prompt", "kind"), [("", InvalidRequestError), ([1] * 64, ContextLengthError)])
def test_one_impossible_prompt_is_refused_before_any_is_computed(llm: LLM, prompt, kind) -> None:
    steps = llm.engine.stats().steps
    with pytest.raises(kind):
        llm.generate(["5", prompt], GREEDY)
    assert llm.engine.stats().steps == steps


def test_a_prompt_that_fails_in_the_engine_is_an_error(llm: LLM) -> None:
    with pytest.raises(EngineError, match="no luck") as caught:
        llm.generate([[5], [FAILING]], SamplingParams(temperature=0.0, max_tokens=50))
    assert "/usr" not in str(caught.value)
    assert llm.generate("5", GREEDY)[0].text.split() == ["6", "7", "8", "9"]


def test_end_tokens_of_the_tokenizers_files_count(llm: LLM) -> None:
    (result,) = llm.generate("5", SamplingParams(temperature=0.0, max_tokens=9, logit_bias={299: 100.0}))
    assert (result.completions[0].finish_reason, result.text) == ("stop", "")


def test_an_executor_that_is_not_there_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="nowhere:Nothing"):
        LLM(llm.config.model, executor="nowhere:Nothing")
