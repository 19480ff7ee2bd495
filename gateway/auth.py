"""Who is asking: API keys, plugins, and which routes need neither.

Denies by default: a request passes without a key only if its raw path is, byte for byte, that of a route declared
``PUBLIC``. Keys are compared as digests, all of them every time, so time tells nothing about which one came close.
Refuses to know what a tenant may do.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from suimon.gateway.hookspecs import NotAuthenticated

if TYPE_CHECKING:
    from suimon.gateway.config import ApiKey

# The classes of routes, stated by every route as ``opt={AUTH: ...}``.
AUTH = "auth"
PUBLIC = "public"  # probes: anybody
KEY = "key"  # whoever proves to be a tenant, once keys are in use
CLASSES = (PUBLIC, KEY)

Headers = Iterable[tuple[bytes, bytes]]
AuthenticateHook = Callable[[Mapping[str, str]], str | None]


class Authenticator:
    """Proves tenants. ``hook`` is the plugins' ``authenticate``, None if no plugin has one."""

    def __init__(self, keys: Iterable[ApiKey], hook: AuthenticateHook | None = None) -> None:
        self._keys = [(key.digest, key.name) for key in keys]
        self._hook = hook
        self.required = bool(self._keys) or hook is not None

    def tenant(self, headers: Headers) -> str:
        """The tenant that these headers prove; "" where nothing is asked for. Raises NotAuthenticated."""
        if not self.required:
            return ""
        tenant = self._hook(_text_headers(headers)) if self._hook else None
        if tenant:
            return tenant
        presented = presented_key(headers)
        if presented is None:
            raise NotAuthenticated("No API key was given: send it as `Authorization: Bearer KEY`.")
        found = self._match(presented)
        if found is None:
            raise NotAuthenticated("The API key is not valid.")
        return found

    def _match(self, presented: bytes) -> str | None:
        digest = hashlib.sha256(presented).digest()
        found = None
        for known, name in self._keys:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def presented_key(headers: Headers) -> bytes | None:
    """The key in ``Authorization: Bearer`` or ``x-api-key``, as bytes: keys need not be ASCII."""
    found = {name: value for name, value in headers if name in (b"authorization", b"x-api-key")}
    scheme, _, credentials = found.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and credentials.strip():
        return credentials.strip()
    return found.get(b"x-api-key") or None


def _text_headers(headers: Headers) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


def is_public(scope: Mapping[str, Any], public_paths: frozenset[bytes]) -> bool:
    """Whether the request's target is a public route's own path: nothing decoded, normalised or rewritten."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw in public_paths


def cache_salt(tenant: str, salt: str | None) -> str | None:
    """The salt that a tenant's prefixes are cached under: tenants share none, whatever salt they choose."""
    if not tenant:
        return salt
    parts = (tenant.encode(), (salt or "").encode())
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).hexdigest()
