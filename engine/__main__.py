"""`python -m engine`: serve models over HTTP, and look after the model files."""

from pathlib import Path
from typing import Annotated

import typer

from engine.models_cli import app as models_app

app = typer.Typer(help="Farthing's inference engine.", no_args_is_help=True, add_completion=False)
app.add_typer(models_app, name="models")


@app.callback()
def main() -> None:
    pass


@app.command()
def serve(
    models: Annotated[list[str], typer.Argument(help="Names from the catalogue, .gguf files or model folders.")],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8001,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or int8.")] = "bfloat16",
    kv_memory: Annotated[
        str | None, typer.Option(help="KV cache of all models together, like 1GiB. Default: a quarter of what is free.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Cores to use. Default: all.", min=1)] = None,
    max_batch_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.", min=1)] = 512,
) -> None:
    """Serve one or more models on one port until interrupted."""
    # The heavy imports wait until they are needed, so that --help is quick.
    from engine.catalog import CatalogError, resolve
    from engine.memory import parse_size
    from engine.serve import ServeOptions, bind
    from engine.serve import serve as run

    if dtype not in ("float32", "bfloat16", "int8"):
        raise typer.BadParameter(f"{dtype!r} is not one of float32, bfloat16, int8", param_hint="--dtype")
    try:
        memory = None if kv_memory is None else parse_size(kv_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--kv-memory") from error
    found: dict[str, Path] = {}
    for given in models:
        try:
            path = resolve(given)
        except CatalogError as error:
            raise _fail(str(error)) from error
        name = given if path != Path(given) else path.stem if path.is_file() else path.resolve().name
        if name in found:
            raise _fail(f"Two of the models would be called {name!r}: give each its own file or folder name.")
        found[name] = path
    try:
        listener = bind(host, port)
    except OSError as error:
        raise _fail(f"Cannot listen on {host}:{port} ({error.strerror}): choose another --port.") from error
    problem = run(ServeOptions(found, host, port, dtype, memory, threads, max_batch_tokens), listener)  # type: ignore[arg-type]
    if problem is not None:
        raise _fail(problem)


def _fail(message: str) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="python -m engine")
