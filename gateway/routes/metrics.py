"""GET /metrics, in the Prometheus text format."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, Response

from suimon.gateway.auth import AUTH, KEY
from suimon.gateway.routes.common import gateway_of, read


@read("/metrics", opt={AUTH: KEY})
async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """All instruments, rendered off the event loop."""
    body, content_type = await asyncio.to_thread(gateway_of(request).telemetry.render_metrics)
    return Response(body, media_type=content_type)
