"""The operator's pages: a router that `gateway/app.py` mounts, which reads the ledger and nothing else."""

from dashboards.web.oidc import Provider, ProviderSettings
from dashboards.web.router import create_router
from dashboards.web.session import COOKIE, Sessions, Throttle

__all__ = ["COOKIE", "Provider", "ProviderSettings", "Sessions", "Throttle", "create_router"]
