"""`python -m gateway --config farthing.toml --host 127.0.0.1 --port 8080`: the gateway process."""

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway import hangups

if TYPE_CHECKING:
    from gateway.settings import Settings


def serve(
    config: Annotated[Path, typer.Option(help="A file like farthing.example.toml.")] = Path("farthing.toml"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8080,
) -> None:
    """Serve the gateway until SIGTERM or Ctrl-C."""
    hangups.hold()  # before what takes its time to import
    import uvicorn

    from billing.spool import SpoolError
    from gateway.app import create_app
    from gateway.connect import DatabaseUnavailableError
    from gateway.memory import collect_seldom, use_huge_pages
    from gateway.server import allow_many_connections
    from gateway.server import config as server_config
    from gateway.settings_file import ConfigurationError, load
    from gateway.telemetry import configure_logs

    configure_logs()
    allow_many_connections()
    try:
        settings = _for_asyncpg(load(config))
        listener = _listen(host, port)
        app = create_app(settings, config)
    except (ConfigurationError, DatabaseUnavailableError, SpoolError, OSError) as error:
        typer.echo(f"farthing gateway: {error}", err=True)
        raise typer.Exit(1) from None
    address = f"http://{host}:{listener.getsockname()[1]}"
    typer.echo(f"gateway listens on {address}", err=True)
    collect_seldom()
    use_huge_pages()
    uvicorn.Server(server_config(app, settings)).run(sockets=[listener])


def _for_asyncpg(settings: "Settings") -> "Settings":
    """The same settings with the database's address as SQLAlchemy wants it, however it was written."""
    from pydantic import SecretStr

    from gateway.connect import asyncpg_url

    url = asyncpg_url(settings.database_url.get_secret_value())
    return settings.model_copy(update={"database_url": SecretStr(url.render_as_string(hide_password=False))})


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror}. Stop what uses it, or choose another with --port."
        ) from error
    return listener


if __name__ == "__main__":
    typer.run(serve)
