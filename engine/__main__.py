"""`python -m engine`: serve models over HTTP, and look after the model files."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from engine import catalog
from engine.memory import parse_size, restart_with_runtime_settings
from engine.model_sources import CatalogError
from engine.models_cli import app as models_app
from engine.models_cli import pull_with_progress

app = typer.Typer(help="Farthing's inference engine.", no_args_is_help=True, add_completion=False)
app.add_typer(models_app, name="models")


class DTypeName(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"


class KvTypeName(StrEnum):
    INT8 = "int8"


@app.command()
def serve(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="Names from `models list`, .gguf files or folders with safetensors."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8001,
    dtype: Annotated[
        DTypeName | None,
        typer.Option(
            help="What weights are kept in, from exact to small. Default: int8 where the CPU has AVX512-VNNI or AMX, "
            "else bfloat16."
        ),
    ] = None,
    kv_dtype: Annotated[
        KvTypeName | None,
        typer.Option(
            help="What the KV cache is kept in: int8, for int8 and int4 weights, has room for almost twice the tokens. "
            "Default: bfloat16, or float32 with float32 weights."
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for the KV caches of all models together, like 1GiB. Default: a quarter of what is free once "
            "the models are loaded, 4 GiB at most."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Cores to compute on. Default: all.", min=1)] = None,
    max_batch_tokens: Annotated[
        int, typer.Option(help="Most tokens computed in one step, of all requests.", min=1)
    ] = 512,
    tenant_cache_floor: Annotated[
        float,
        typer.Option(
            help="Part of the KV cache, from 0 to 0.9, in which tenants keep equal shares: what one has cached there "
            "no other tenant's requests push out.",
            min=0,
            max=0.9,
        ),
    ] = 0.25,
) -> None:
    """Serve one or more models on one port until interrupted."""
    try:
        memory = None if kv_memory is None else parse_size(kv_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv-memory") from error
    found = _find(models)
    typer.echo(f"Loading {' and '.join(found)} (a first start takes longer than later ones)", err=True)

    # torch and the server take a second to import, which `--help` and `models` need not wait for.
    from engine.runner import default_dtype
    from engine.serve import ServeOptions, bind
    from engine.serve import serve as run

    try:
        listener = bind(host, port)
    except OSError as error:
        _fail(f"Cannot listen on {host}:{port} ({error.strerror}): choose another --host or --port.")
    chosen = default_dtype() if dtype is None else dtype.value
    options = ServeOptions(
        models=found,
        dtype=chosen,
        kv_dtype=None if kv_dtype is None else "int8",
        kv_memory=memory,
        threads=threads,
        max_batch_tokens=max_batch_tokens,
        tenant_floor=tenant_cache_floor,
    )
    problem = run(options, listener)
    if problem is not None:
        _fail(problem)


def _find(models: list[str]) -> dict[str, Path]:
    """Paths by the names that requests will use: the catalogue's, or the file's or folder's own."""
    found: dict[str, Path] = {}
    for given in models:
        try:
            if given in catalog.entries():
                name, path = given, pull_with_progress(given)
            else:
                path = catalog.resolve(given)
                name = path.stem if path.is_file() else path.resolve().name
        except CatalogError as error:
            _fail(str(error))
        if name in found:
            _fail(f"Two of the models would be called {name!r}: give each its own file or folder name.")
        found[name] = path
    return found


def _fail(message: str) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        restart_with_runtime_settings()
    app(prog_name="python -m engine")
