"""The version of this distribution, as it was installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("suimon")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0+unknown"
