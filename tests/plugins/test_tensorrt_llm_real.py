"""The contract file against the real TensorRT-LLM, and a few tokens from it; skipped, with the reason, where it is not.

What cannot be compared from outside is left out: annotations, which are written in several ways, and results, of which
the generation at the end sees every member. ``SUIMON_TEST_TENSORRT_LLM_MODEL`` names the model for it, a folder or a
Hugging Face id; without it that test is skipped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

CONTRACT = yaml.safe_load((Path(__file__).parent.parent / "contracts" / "tensorrt_llm.yaml").read_text())
MODEL = os.environ.get("SUIMON_TEST_TENSORRT_LLM_MODEL", "")


def _why_not() -> str:
    """What keeps the package from running here, "" if nothing does."""
    import torch

    try:
        importlib.import_module("tensorrt_llm.llmapi")
    except Exception as error:  # of a missing package, or of CUDA libraries that it misses
        return f"tensorrt_llm cannot be imported: {type(error).__name__}: {error}"[:200]
    return "" if torch.cuda.is_available() else "there is no NVIDIA GPU"


WHY_NOT = _why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def rows(kind: str) -> list[Any]:
    """(module, class, row) of that kind."""
    found = CONTRACT["modules"].items()
    return [(module, name, row) for module, classes in found for name, row in classes.items() if row["kind"] == kind]


def of(module: str, name: str, row: dict[str, Any]) -> Any:
    """The real thing; skips what the installed version is too old for."""
    real = getattr(importlib.import_module(module), name, None)
    if real is None and not is_here(row):
        pytest.skip(f"{name} came with {row['since']}, and {version()} is installed")
    assert real is not None, f"{module} {version()} has no {name}"
    return real


def version() -> str:
    return str(importlib.import_module("tensorrt_llm").__version__)


def is_here(row: dict[str, Any]) -> bool:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")[:2]))

    return numbers(row.get("since", "1.0")) <= numbers(version())


def wrong_defaults(real: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    """name -> (what it is, what the contract says) where they differ or the name is missing."""
    wanted = {name: row for name, row in named.items() if is_here(row)}
    missing = {name: ("missing", row.get("default")) for name, row in wanted.items() if name not in real}
    return missing | {
        name: (real[name], row.get("default", inspect.Parameter.empty))
        for name, row in wanted.items()
        if name in real and not row.get("required") and real[name] != row.get("default")
    }


def parameters(function: Any) -> dict[str, Any]:
    return {name: found.default for name, found in inspect.signature(function).parameters.items()}


def fields(model: Any) -> dict[str, Any]:
    """Field -> default of a pydantic model; a default that is made is made."""
    return {name: field.get_default(call_default_factory=True) for name, field in model.model_fields.items()}


def test_llm() -> None:
    ((module, name, row),) = [found for found in rows("class") if found[1] == "LLM"]
    llm = of(module, name, row)
    assert wrong_defaults(parameters(llm.__init__), row["parameters"]) == {}
    for method, told in row["methods"].items():
        assert wrong_defaults(parameters(getattr(llm, method)), told["parameters"]) == {}, method


def test_keywords_of_llm() -> None:
    """Taken through **kwargs: they are fields of the model of its arguments."""
    arguments = importlib.import_module("tensorrt_llm.llmapi").TorchLlmArgs
    named = CONTRACT["modules"]["tensorrt_llm"]["LLM"]["keywords"]
    missing = [name for name, row in named.items() if is_here(row) and name not in arguments.model_fields]
    assert missing == []


@pytest.mark.parametrize(("module", "name", "row"), rows("dataclass"))
def test_dataclasses(module: str, name: str, row: dict[str, Any]) -> None:
    real = of(module, name, row)
    defaults = {field.name: field.default for field in dataclasses.fields(real) if field.init}
    assert wrong_defaults(defaults, row["parameters"]) == {}


@pytest.mark.parametrize(("module", "name", "row"), rows("model"))
def test_configuration_models(module: str, name: str, row: dict[str, Any]) -> None:
    real = of(module, name, row)
    assert [name for name, field in row["fields"].items() if is_here(field) and name not in real.model_fields] == []
    if name == "KvCacheConfig":
        assert wrong_defaults(fields(real), row["fields"]) == {}


@pytest.mark.parametrize(("module", "name", "row"), rows("enum"))
def test_enumerations(module: str, name: str, row: dict[str, Any]) -> None:
    real = of(module, name, row)
    assert [member for member in row["members"] if getattr(real, member, None) != member] == []


@pytest.mark.parametrize(("module", "name", "row"), rows("exception"))
def test_exceptions(module: str, name: str, row: dict[str, Any]) -> None:
    assert issubclass(of(module, name, row), RuntimeError)


def test_the_rules_that_the_plugin_goes_by() -> None:
    params = importlib.import_module("tensorrt_llm").SamplingParams
    for wrong in ({"n": 2}, {"temperature": 0.0, "n": 2}, {"top_k": 1, "n": 2}):
        with pytest.raises(ValueError, match=r"[Gg]reedy"):
            params(**wrong)
    with pytest.raises(TypeError):
        params(logit_bias={1: 2.0})


@pytest.mark.skipif(not MODEL, reason="SUIMON_TEST_TENSORRT_LLM_MODEL names no model")
def test_a_few_tokens() -> None:
    """Greedy tokens twice, log-probabilities, two choices, a stop string, one client that leaves; then the end."""
    from suimon.gateway.config import ModelSettings
    from suimon.gateway.hookspecs import Delta, GenerateRequest, SamplingParams
    from suimon.plugins.tensorrt_llm import TensorRTBackend

    backend = TensorRTBackend(ModelSettings(model=MODEL, backend="tensorrt_llm", max_model_len=256, max_num_seqs=8))

    async def ask(**sampling: Any) -> list[Delta]:
        known = {"temperature": 0.0, "max_tokens": 12}
        request = GenerateRequest(
            request_id="r",
            model=backend.model_id,
            prompt="The capital of France is",
            sampling=SamplingParams(**known | sampling),
        )
        return [delta async for delta in backend.generate(request)]

    def text(deltas: list[Delta], index: int = 0) -> str:
        return "".join(delta.text for delta in deltas if delta.index == index)

    async def everything() -> None:
        await backend.start()
        try:
            first, second = await ask(), await ask(logprobs=1)
            assert text(first) == text(second) != ""
            entries = [entry for delta in second for entry in delta.logprobs or ()]
            assert len(entries) == second[-1].usage.completion_tokens
            assert any(entry.chosen.logprob != 0.0 for entry in entries)
            assert text(await ask(stop=(text(first)[-3:],))) in text(first)
            several = await ask(n=2, temperature=1.0)
            assert {delta.index for delta in several if delta.finish_reason} == {0, 1}
            left = backend.generate(GenerateRequest(request_id="l", model=backend.model_id, prompt="Once"))
            await anext(left)
            await left.aclose()
            assert text(await ask()) == text(first)
        finally:
            await backend.stop()

    asyncio.run(asyncio.wait_for(everything(), 1200))
