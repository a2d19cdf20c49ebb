"""The operator's pages: a router that `gateway/app.py` mounts, which reads the ledger and nothing else."""

from dashboards.web.router import create_router

__all__ = ["create_router"]
