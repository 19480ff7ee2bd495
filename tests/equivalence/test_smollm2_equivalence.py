"""SmolLM2-135M answers greedily as transformers in fp32 with the same weights, however the engine came to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def subject(demo_gguf: Path, make_real_subject: Any) -> Any:
    return make_real_subject(demo_gguf, few={"batch 1", "PyTorch's operations"})


def test_it_answers_as_transformers(subject: Any) -> None:
    subject.check()


def test_how_the_engine_got_there_changes_no_token(subject: Any, variant: str) -> None:
    subject.check_variant(variant)
