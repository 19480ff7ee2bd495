"""The sampler against plain float64 arithmetic with a full sort, and against transformers' logits processors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from suimon.core_engine.batch import FreeSequence, ScheduledBatch, ScheduledSequence
from suimon.core_engine.executor import ExecutorCapabilities, ForwardExecutor
from suimon.core_engine.logit_edits import TokenCounts, apply_penalties
from suimon.core_engine.sampler import MIN_LOGPROB, Sampler, SamplerOutput, SamplingRow
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.uniform_numbers import philox, uniform_numbers
from suimon.kernels import cpu

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds of both."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "is_available", lambda: False)
    elif not cpu.is_available():
        pytest.skip("no C++ compiler on this machine")


def make_row(params: SamplingParams = GREEDY, **overrides: object) -> SamplingRow:
    fields: dict = {
        "seq_id": 0,
        "params": params,
        "prompt_token_ids": [1, 2, 3],
        "output_token_ids": [],
        "seed": 0,
        "position": 3,
        "eos_token_ids": frozenset(),
    }
    return SamplingRow(**(fields | overrides))


def make_logits(rows: int, vocab_size: int, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
    return Sampler().sample(logits, rows)


def draws(line: torch.Tensor, params: SamplingParams, count: int, **overrides: object) -> list[int]:
    """``count`` tokens from the same logits (V,) with seeds 0, 1, 2, …"""
    rows = [make_row(params, seq_id=seed, seed=seed, **overrides) for seed in range(count)]
    output = sample(line.expand(count, -1), rows)
    assert not output.errors
    return output.token_ids


def reference_probabilities(line: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Temperature, top_k, top_p, min_p by definition: sort everything, in float64. Equal logits: lower id first."""
    logits = line.double().numpy() / params.temperature
    order = np.lexsort((np.arange(len(logits)), -logits))
    p = np.exp(logits[order] - logits.max())
    if params.top_k > 0:
        p[params.top_k :] = 0.0
    p /= p.sum()
    before = np.concatenate(([0.0], np.cumsum(p)[:-1]))
    p[before >= params.top_p] = 0.0
    p[p < params.min_p * p[0]] = 0.0
    probabilities = np.empty_like(p)
    probabilities[order] = p / p.sum()
    return probabilities


def assert_distributed_as(observed: Sequence[int], probabilities: np.ndarray) -> None:
    """Pearson's chi-square at five standard deviations; cells that expect under 5 are pooled. Seeds are fixed."""
    counts = np.bincount(observed, minlength=len(probabilities)).astype(float)
    assert not counts[probabilities == 0].any(), "a token outside the candidate set was drawn"
    expected = probabilities * len(observed)
    large = expected >= 5
    cells = np.append(counts[large], counts[~large].sum()), np.append(expected[large], expected[~large].sum())
    filled = cells[1] > 0
    statistic = ((cells[0][filled] - cells[1][filled]) ** 2 / cells[1][filled]).sum()
    freedom = max(1, filled.sum() - 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5


# Random numbers


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox(np.array([counter], np.uint64).T, np.array([key], np.uint64).T)
    assert words[:, 0].tolist() == expected


def test_uniform_numbers_are_in_range_uncorrelated_and_differ_by_seed_position_and_draw() -> None:
    numbers = uniform_numbers([7] * 20_000, range(20_000))
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.01 and abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    across_seeds = uniform_numbers(range(20_000), [3] * 20_000)
    assert abs(np.corrcoef(across_seeds[:-1], across_seeds[1:])[0, 1]) < 0.03
    some = [*uniform_numbers([1, -1, 2**63 - 1, 1], [0, 0, 0, 1]), *uniform_numbers([1], [0], draw=1)]
    assert len(set(some)) == 5


# Distribution

FILTERS = {
    "temperature": SamplingParams(temperature=0.8),
    "hot": SamplingParams(temperature=5.0),
    "top_k": SamplingParams(top_k=7),
    "top_k wider than the list": SamplingParams(top_k=150, temperature=2.0),
    "top_p": SamplingParams(top_p=0.7),
    "wide nucleus": SamplingParams(top_p=0.9, temperature=8.0),
    "narrow nucleus of a flat distribution": SamplingParams(top_p=0.3, temperature=50.0),
    "wide nucleus with min_p": SamplingParams(top_p=0.95, temperature=8.0, min_p=0.3),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in FILTERS for dtype in (torch.float32, torch.bfloat16)]
    + [("all", torch.float16), ("wide nucleus", torch.float64)],
)
def test_draws_follow_the_exact_distribution(name: str, dtype: torch.dtype) -> None:
    line = make_logits(1, 500, seed=5)[0].to(dtype)
    assert_distributed_as(draws(line, FILTERS[name], 4000), reference_probabilities(line, FILTERS[name]))


def test_a_wide_nucleus_is_exact_at_its_edge() -> None:
    """256 different likelihoods, so that an entry too many or too few is a cell of the test."""
    line = -torch.arange(256).float().flip(0) / 200
    params = SamplingParams(top_p=0.6)
    probabilities = reference_probabilities(line, params)
    observed = draws(line, params, 20_000)
    assert_distributed_as(observed, probabilities)
    assert set(observed) == set(np.flatnonzero(probabilities))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.integers(1, 300),
    top_k=st.integers(-1, 310),
    top_p=st.floats(1e-9, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.sampled_from([1e-4, 0.1, 1.0, 10.0, 100.0]),
    coarse=st.booleans(),
)
def test_no_draw_leaves_the_candidate_set(
    seed: int, vocab_size: int, top_k: int, top_p: float, min_p: float, temperature: float, coarse: bool
) -> None:
    """Against the sorted definition; ``coarse`` logits are full of ties. Edges within rounding are left open."""
    line = make_logits(1, vocab_size, seed=seed)[0]
    line = line.round() if coarse else line
    given = {"temperature": temperature, "top_k": top_k}
    observed = set(draws(line, SamplingParams(top_p=top_p, min_p=min_p, **given), 40))
    widest = SamplingParams(top_p=min(1.0, top_p * (1 + 1e-5) + 1e-7), min_p=min_p * (1 - 1e-5), **given)
    assert observed <= set(np.flatnonzero(reference_probabilities(line, widest)))


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        (SamplingParams(top_k=12), ("TopKLogitsWarper", 12)),
        (SamplingParams(top_p=0.8), ("TopPLogitsWarper", 0.8)),
        (SamplingParams(min_p=0.05), ("MinPLogitsWarper", 0.05)),
    ],
)
def test_filters_agree_with_transformers(params: SamplingParams, warper: tuple[str, float]) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    line = make_logits(1, 300, spread=1.5, seed=2)[0]
    theirs = getattr(processors, warper[0])(warper[1])(torch.zeros(1, 0, dtype=torch.long), line.unsqueeze(0).clone())
    probabilities = theirs[0].double().softmax(-1).numpy()
    observed = draws(line, params, 6000)
    assert_distributed_as(observed, probabilities)
    assert set(observed) == set(np.flatnonzero(probabilities))


def test_top_k_beyond_any_limit_is_no_limit() -> None:
    """B36: 0, -1 and V + 1 are all "off"; outputs vary."""
    line = make_logits(1, 100, spread=1.0)[0]
    outcomes = [draws(line, SamplingParams(top_k=k), 20) for k in (0, -1, 100, 101)]
    assert all(outcome == outcomes[0] for outcome in outcomes) and len(set(outcomes[0])) > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "params",
    [
        *(SamplingParams(temperature=t) for t in (1e-4, 1e-6, 1e-30)),
        *(SamplingParams(top_p=p) for p in (1e-4, 1e-9)),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-5, top_p=1e-9, top_k=3, min_p=0.9),
    ],
)
def test_extreme_settings_are_greedy(params: SamplingParams, dtype: torch.dtype) -> None:
    """B33, B36. The best entry is unique here; equals are equally likely at any temperature above 1e-3."""
    logits = make_logits(8, 1000, seed=3).to(dtype)
    logits[range(8), range(100, 900, 100)] = 30.0
    assert sample(logits, [make_row(params, seed=i) for i in range(8)]).token_ids == list(range(100, 900, 100))


# Independence of the batch

MIXED = [*FILTERS.values(), GREEDY, SamplingParams(repetition_penalty=1.3), SamplingParams(logit_bias={5: 3.0})]


def test_a_token_depends_on_seed_and_position_and_not_on_its_batch() -> None:
    logits = make_logits(52, 700, seed=9)
    rows = [
        make_row(MIXED[i % len(MIXED)], seq_id=i, seed=i, position=i * 7, output_token_ids=[i, i]) for i in range(52)
    ]
    together = sample(logits, rows).token_ids
    assert [sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(52)] == together
    order = torch.randperm(52, generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits[order], [rows[i] for i in order]).token_ids == [together[i] for i in order]


def test_seeds_and_positions_give_different_tokens_and_repeat() -> None:
    logits = torch.zeros(3, 4096)
    rows = [make_row(SamplingParams(), seed=1), make_row(SamplingParams(), seed=2)]
    rows.append(make_row(SamplingParams(), seed=1, position=4))
    first, again = sample(logits, rows).token_ids, sample(logits, rows).token_ids
    assert first == again and len(set(first)) == 3


def test_drafts_before_a_row_give_the_tokens_of_step_by_step_decoding() -> None:
    """Verification rows of a sequence see their preceding drafts in penalties, min_tokens and position."""
    params = SamplingParams(presence_penalty=2.0, frequency_penalty=1.0, repetition_penalty=1.5, min_tokens=3)
    logits = make_logits(4, 40, spread=1.0)
    ends = frozenset({0, 1, 2, 3})
    sampler, output = Sampler(), [7, 8]
    for step in range(4):
        row = make_row(params, output_token_ids=output, position=5 + step, eos_token_ids=ends)
        output = output + sampler.sample(logits[step : step + 1], [row]).token_ids
    drafts = output[2:]
    rows = [
        make_row(params, output_token_ids=[7, 8], draft_token_ids=drafts[:k], position=5 + k, eos_token_ids=ends)
        for k in range(4)
    ]
    assert sample(logits, rows).token_ids == drafts


# Greedy, and what happens to the logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000])
def test_greedy_takes_the_lowest_id_among_the_best(dtype: torch.dtype, vocab_size: int) -> None:
    logits = make_logits(20, vocab_size).round().to(dtype)
    assert sample(logits, [make_row()] * 20).token_ids == np.argmax(logits.float().numpy(), axis=1).tolist()


@pytest.mark.parametrize("params", MIXED)
def test_logits_are_left_unchanged_and_may_be_a_strided_view(params: SamplingParams) -> None:
    wide = make_logits(6, 256)
    view, before = wide[::2, :192], wide.clone()
    rows = [make_row(params, seed=i, output_token_ids=[9]) for i in range(3)]
    assert sample(view, rows).token_ids == sample(view.clone(), rows).token_ids
    assert torch.equal(wide, before)


def test_rows_that_are_not_finite_fail_alone() -> None:
    for params in (GREEDY, SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(presence_penalty=1.0)):
        logits = make_logits(5, 200)
        rows = [make_row(params, seed=i, output_token_ids=[4]) for i in range(5)]
        expected = sample(logits, rows).token_ids
        logits[1, 17], logits[2, 60], logits[3] = torch.nan, torch.inf, -torch.inf
        output = sample(logits, rows)
        assert sorted(output.errors) == [1, 2, 3] and "not finite" in output.errors[1]
        assert [output.token_ids[i] for i in (0, 4)] == [expected[i] for i in (0, 4)]
        assert all(0 <= token_id < 200 for token_id in output.token_ids)


def test_impossible_entries_are_never_drawn() -> None:
    line = torch.full((500,), -torch.inf)
    line[[3, 77, 499]] = torch.tensor([0.0, 1.0, -1.0])
    for params in (SamplingParams(), SamplingParams(top_p=0.99999), SamplingParams(top_k=50)):
        assert set(draws(line, params, 300)) == {3, 77, 499}


def test_no_rows_and_a_wrong_number_of_rows() -> None:
    assert sample(torch.empty(0, 10), []) == SamplerOutput([], [])
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        sample(torch.zeros(2, 10), [make_row()])


# Penalties, bias, bans


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.8])
def test_repetition_penalty_agrees_with_transformers(penalty: float) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = make_logits(4, 90)
    sequences = torch.randint(0, 90, (4, 30), generator=torch.Generator().manual_seed(0))
    theirs = processors.RepetitionPenaltyLogitsProcessor(penalty)(sequences, logits.clone())
    params = SamplingParams(repetition_penalty=penalty)
    rows = [
        make_row(params, prompt_token_ids=line[:10], output_token_ids=line[10:20], draft_token_ids=line[20:])
        for line in sequences.tolist()
    ]
    counts = [TokenCounts(row.prompt_token_ids, 90) for row in rows]
    for count, row in zip(counts, rows, strict=True):
        count.catch_up(row.output_token_ids)
    apply_penalties(logits, rows, counts)
    torch.testing.assert_close(logits, theirs)


def test_presence_and_frequency_count_the_output_and_not_the_prompt() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    row = make_row(params, prompt_token_ids=[1, 2], output_token_ids=[2, 3, 3], draft_token_ids=[3, 4])
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0, 1.0]])
    counts = TokenCounts(row.prompt_token_ids, 6)
    counts.catch_up(row.output_token_ids)
    apply_penalties(logits, [row], [counts])
    assert logits[0].tolist() == [1.0, 0.5, 0.5 - 0.75, 0.5 - 0.5 - 0.75, -2.0 - 0.75, 1.0]


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(-2, 12)),
    output=st.lists(st.integers(-2, 12)),
    drafts=st.lists(st.integers(-2, 12)),
    cuts=st.lists(st.integers(0, 200)),
)
def test_token_counts_in_steps_equal_counting_at_once(
    prompt: list[int], output: list[int], drafts: list[int], cuts: list[int]
) -> None:
    output = output * 20
    counts = TokenCounts(prompt, 10)
    for cut in sorted(cuts):
        counts.catch_up(output[:cut])
        counts.entries(drafts)
    counts.catch_up(output)
    ids, values = counts.entries(drafts)
    expected = {t: 0 for t in prompt if 0 <= t < 10} | Counter(t for t in output + drafts if 0 <= t < 10)
    assert len(set(ids.tolist())) == len(ids)
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == expected


def test_penalty_state_survives_a_restarted_sequence_id() -> None:
    sampler, params = Sampler(), SamplingParams(temperature=0.0, presence_penalty=2.0)
    logits = torch.tensor([[1.0, 0.0, 0.5]])
    assert sampler.sample(logits, [make_row(params, output_token_ids=[0, 2])]).token_ids == [1]
    assert sampler.sample(logits, [make_row(params, output_token_ids=[])]).token_ids == [0]
    sampler.sample(logits, [make_row(params, output_token_ids=[0, 2])])
    sampler.forget(0)
    assert sampler.sample(logits, [make_row(params, output_token_ids=[1, 1])]).token_ids == [0]


def test_logit_bias() -> None:
    """B30: the legal bias works, and ids outside the vocabulary, refused earlier, do no harm here."""
    line = torch.zeros(70)
    line[5] = 50.0
    params = SamplingParams(logit_bias={5: -100.0, 69: 20.0, 999_999: 5.0, -1: 5.0})
    assert set(draws(line, params, 200)) == {69}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}])
def test_min_tokens_bans_every_end_id_until_enough_new_tokens(params: dict) -> None:
    """B28, B29, B32: all EOS ids and stop_token_ids; the prompt does not count; strange ids do no harm."""
    wanted = SamplingParams(min_tokens=4, logit_bias={1: 100.0, 2: 99.0}, stop_token_ids=(3, 10**9, -1, 99), **params)
    line = torch.zeros(99)
    line[3] = 100.0
    ends = {"eos_token_ids": frozenset({1, 2, -1}), "prompt_token_ids": list(range(50))}
    for produced in range(4):
        rows = {"output_token_ids": [7] * (produced // 2), "draft_token_ids": [7] * (produced - produced // 2)}
        assert not set(draws(line, wanted, 50, **ends, **rows)) & {1, 2, 3}
    assert set(draws(line, wanted, 50, **ends, output_token_ids=[7] * 4)) <= {1, 2, 3}


def test_ignore_eos_makes_eos_an_ordinary_token_and_bans_no_other() -> None:
    """B32: the last id of the vocabulary stays possible."""
    params = SamplingParams(ignore_eos=True, min_tokens=4, logit_bias={98: 50.0}, temperature=0.0)
    assert draws(torch.zeros(99), params, 1, eos_token_ids=frozenset({1})) == [98]
    params = SamplingParams(ignore_eos=True, min_tokens=4, logit_bias={1: 50.0}, temperature=0.0)
    assert draws(torch.zeros(99), params, 1, eos_token_ids=frozenset({1})) == [1]


# Grammar masks


def make_mask(allowed: Sequence[int], words: int) -> Future[torch.Tensor]:
    bits = np.zeros(words, np.uint32)
    for token_id in allowed:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    future: Future[torch.Tensor] = Future()
    future.set_result(torch.from_numpy(bits.view(np.int32)))
    return future


@pytest.mark.parametrize("vocab_size", [100, 128, 130])
@pytest.mark.parametrize("words", [1, 4, 7])
def test_only_allowed_tokens_are_drawn(vocab_size: int, words: int) -> None:
    allowed = [2, 31] + ([32, 63, 95] if words > 1 else [])
    row = {"mask": make_mask([*allowed, words * 32 - 1] if words == 7 else allowed, words)}
    assert set(draws(torch.zeros(vocab_size), SamplingParams(), 200, **row)) == set(allowed)


def test_a_finished_grammar_overrules_min_tokens() -> None:
    """B38: nothing but EOS is legal, so EOS it is; with another legal token, the ban holds."""
    params, ends = SamplingParams(min_tokens=64), {"eos_token_ids": frozenset({5})}
    assert set(draws(torch.zeros(40), params, 20, mask=make_mask([5], 2), **ends)) == {5}
    assert set(draws(torch.zeros(40), params, 20, mask=make_mask([5, 6], 2), **ends)) == {6}


def test_a_failed_or_dead_ended_grammar_fails_its_row_alone() -> None:
    broken: Future[torch.Tensor] = Future()
    broken.set_exception(RuntimeError("too deep"))
    unlimited: Future[None] = Future()
    unlimited.set_result(None)
    masks = [None, broken, make_mask([], 2), unlimited]
    logits = make_logits(4, 64)
    output = sample(logits, [make_row(mask=mask) for mask in masks])
    assert sorted(output.errors) == [1, 2]
    assert "too deep" in output.errors[1] and "no token is left" in output.errors[2]
    assert [output.token_ids[i] for i in (0, 3)] == [int(logits[i].argmax()) for i in (0, 3)]


# Log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(dtype: torch.dtype) -> None:
    logits = make_logits(3, 300, seed=4).to(dtype)
    rows = [make_row(SamplingParams(logprobs=n), seed=n) for n in (0, 5, 20)]
    output = sample(logits, rows)
    expected = logits.double().log_softmax(-1)
    for line, row, found in zip(expected, rows, output.logprobs, strict=True):
        assert found is not None and found.logprob == pytest.approx(line[found.token_id].item(), abs=1e-5)
        assert found.rank == int((line > line[found.token_id]).sum()) + 1
        best = sorted(range(300), key=lambda t: (-line[t].item(), t))[: row.params.logprobs]
        assert [token_id for token_id, _ in found.top] == best
        assert [value for _, value in found.top] == pytest.approx(line[best].tolist(), abs=1e-5)


def test_logprobs_do_not_change_with_the_sampling_parameters() -> None:
    """B34."""
    line = make_logits(1, 200)
    variants = [
        {"temperature": 0.1},
        {"temperature": 1.7, "top_p": 0.1},
        {"logit_bias": {3: 40.0}},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0, "min_tokens": 9},
    ]
    tops = [
        sample(line, [make_row(SamplingParams(logprobs=5, **v), output_token_ids=[1])]).logprobs[0] for v in variants
    ]
    assert all(found is not None and found.top == tops[0].top for found in tops)
    assert tops[2].token_id == 3 and tops[2].rank == 1 + int((line > line[0, 3]).sum()) > 6


def test_logprobs_are_finite_and_given_to_those_who_ask() -> None:
    """B16, B17: 0 means the chosen token alone; impossible tokens get a floor."""
    logits = torch.full((3, 30), -torch.inf)
    logits[:, 4] = 0.0
    rows = [make_row(SamplingParams(logprobs=n, top_k=1)) for n in (0, 20)] + [make_row()]
    first, second, none = sample(logits, rows).logprobs
    assert none is None and first.top == () and (first.logprob, first.rank) == (0.0, 1)
    assert second.top[0] == (4, 0.0) and {value for _, value in second.top[1:]} == {MIN_LOGPROB}
    biased = SamplingParams(logprobs=20, logit_bias=dict.fromkeys(range(29), -100.0))
    found = sample(torch.zeros(1, 30), [make_row(biased)]).logprobs[0]
    assert found.token_id == 29 and found.logprob == pytest.approx(-math.log(30))


def test_more_logprobs_than_tokens() -> None:
    found = sample(torch.zeros(1, 6), [make_row(SamplingParams(logprobs=20))]).logprobs[0]
    assert [token_id for token_id, _ in found.top] == list(range(6))


# Through the executor


class FixedLogits(ForwardExecutor):
    """Answers every step with the logits it was given."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(vocab_size=8, max_model_len=64, num_blocks=4, block_size=16, max_num_seqs=4)

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        return self.logits


def test_executor_accepts_drafts_and_reports_errors_per_sequence() -> None:
    logits = torch.eye(8)[[3, 5, 6, 1, 2]]
    logits[3] = torch.nan
    executor = FixedLogits(logits)
    sequences = [
        ScheduledSequence(1, [9, 3, 4], 0, [0], num_logits=3),
        ScheduledSequence(2, [9], 0, [1], num_logits=1),
        ScheduledSequence(3, [9], 0, [1], num_logits=0),
        ScheduledSequence(4, [9], 0, [2], num_logits=1),
    ]
    rows = [make_row(SamplingParams(temperature=0.0, logprobs=0))] * 5
    results = executor.submit(ScheduledBatch(0, sequences), rows).result().sequences
    assert results[1].token_ids == [3, 5] and [found.token_id for found in results[1].logprobs] == [3, 5]
    assert results[2].error is not None and results[2].token_ids == []
    assert (results[3].token_ids, results[3].error) == ([], None)
    assert results[4].token_ids == [2]


def test_executor_ignores_an_error_after_the_first_wrong_draft_and_forgets_freed_sequences() -> None:
    logits = torch.eye(8)[[3, 5]]
    logits[1] = torch.nan
    executor = FixedLogits(logits)
    batch = ScheduledBatch(0, [ScheduledSequence(0, [9, 4], 0, [0], num_logits=2)])
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    results = executor.submit(batch, [make_row(params), make_row(params, draft_token_ids=[4])]).result().sequences
    assert (results[0].token_ids, results[0].error) == ([3], None)
    executor.logits = torch.eye(8)[:1]
    freed = ScheduledBatch(1, [ScheduledSequence(0, [9], 0, [0])], [FreeSequence(0)])
    row = make_row(params, output_token_ids=[0])
    assert executor.submit(freed, [row]).result().sequences[0].token_ids == [1]
