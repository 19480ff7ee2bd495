"""GET /version."""

from __future__ import annotations

from litestar import Response

from suimon.gateway.auth import AUTH, KEY
from suimon.gateway.routes.common import json_response, read
from suimon.gateway.version import VERSION


@read("/version", opt={AUTH: KEY})
async def version() -> Response[bytes]:
    """The version that runs here."""
    return json_response({"version": VERSION})
