"""GET /version."""

from __future__ import annotations

from litestar import Response, get

from suimon.gateway.auth import AUTH, KEY
from suimon.gateway.routes.common import json_response
from suimon.gateway.version import VERSION


@get("/version", opt={AUTH: KEY})
async def version() -> Response[bytes]:
    """The version that runs here."""
    return json_response({"version": VERSION})
