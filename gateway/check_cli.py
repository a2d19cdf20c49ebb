"""`farthing check`: whether a configuration is right, where it is not, and what it means."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.command_line import fail

PLACEHOLDERS = {
    "database_url": "postgresql+asyncpg://nobody@nowhere/nothing",
    "admin_key_hash": "0" * 64,
    "data_dir": "/nowhere",
}
"""For what comes from the environment of the gateway, which need not be the one of who checks."""
OWN_ENGINE = "engine"
"""The upstream that `farthing up` runs itself, on a port of its own choice."""


def check(
    file: Annotated[Path, typer.Argument(help="The configuration.")] = Path("farthing.toml"),
    probe: Annotated[bool, typer.Option("--probe", help="Ask every upstream whether it is there.")] = False,
) -> None:
    """Say whether a configuration is right, and what it means. Exit code 1 when it is wrong."""
    from gateway import check as words
    from gateway.settings_file import ConfigurationError, load
    from gateway.upfile import UpFile

    try:
        settings = load(file, **PLACEHOLDERS)
    except ConfigurationError as error:
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        for line, mistake in zip(str(error).splitlines(), error.mistakes, strict=True):
            typer.echo(line, err=True)
            for shown in words.with_excerpt(mistake, text):
                typer.echo(shown, err=True)
        raise typer.Exit(1) from None
    for line in words.explain(settings):
        typer.echo(line)
    for line in words.warnings(settings):
        typer.echo(f"note: {line}", err=True)
    if probe:
        up = UpFile.read(file.resolve().parent)
        if up is not None and up.engine_url and OWN_ENGINE in settings.upstreams:
            typer.echo(f"asking {OWN_ENGINE} at {up.engine_url}, where `farthing up` on this folder last had its own")
            settings.upstreams[OWN_ENGINE] = settings.upstreams[OWN_ENGINE].model_copy(
                update={"base_url": up.engine_url}
            )
        away = asyncio.run(_probe(settings))
        if away:
            fail("; ".join(f"the upstream {name} {reason}" for name, reason in away.items()))
    typer.echo(f"{file} is right")


async def _probe(settings: Any) -> dict[str, str]:
    """What is wrong with the upstreams that are not there, by name."""
    from gateway.upstreams.upstream import Upstream

    upstreams = [Upstream(name, upstream) for name, upstream in settings.upstreams.items()]
    reasons = await asyncio.gather(*(upstream.health() for upstream in upstreams))
    for upstream in upstreams:
        await upstream.close()
    return {upstream.name: reason for upstream, reason in zip(upstreams, reasons, strict=True) if reason is not None}
