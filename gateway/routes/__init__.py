"""The endpoints, one file each. ``ROUTES`` is all of them; each states its class of authentication."""

from suimon.gateway.routes.chat import chat_completions
from suimon.gateway.routes.completions import completions
from suimon.gateway.routes.embeddings import embeddings
from suimon.gateway.routes.health import health, live, ready, startup
from suimon.gateway.routes.metrics import metrics
from suimon.gateway.routes.models import list_models, retrieve_model
from suimon.gateway.routes.tokenization import detokenize, tokenize
from suimon.gateway.routes.version import version

ROUTES = (
    chat_completions,
    completions,
    embeddings,
    list_models,
    retrieve_model,
    tokenize,
    detokenize,
    health,
    live,
    ready,
    startup,
    metrics,
    version,
)
