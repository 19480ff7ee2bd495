"""The built-in backends keep the contract that others are held to. The remote ones' modules hold theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from suimon.gateway.config import ModelSettings
from suimon.gateway.hookspecs import Backend
from suimon.gateway.testing import BackendContract
from suimon.plugins.echo import EchoBackend
from suimon.plugins.native import NativeBackend


class TestEcho(BackendContract):
    def create_backend(self) -> Backend:
        return EchoBackend()


class TestNative(BackendContract):
    @pytest.fixture(scope="class")
    @staticmethod
    def make_backend() -> Callable[[], Backend]:
        settings = ModelSettings(dtype="float32", max_model_len=512, num_blocks=128, max_num_seqs=8, num_threads=1)
        return lambda: NativeBackend(settings)
