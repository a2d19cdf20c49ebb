"""`farthing keys …`: virtual keys, straight in the database. Heavy imports wait, as in cli.py."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.people import KeyInfo, NewSecret
    from billing.restrictions import Restrictions

app = typer.Typer(help="Create, restrict, rotate and revoke virtual keys.", no_args_is_help=True)

Which = Annotated[str, typer.Argument(metavar="KEY", help="Its id or prefix, as `farthing keys list` shows them.")]
Days = Annotated[int | None, typer.Option(min=1, max=36_500, help="Days until it expires (default: never).")]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A name it may ask for (auto, small and large are names too); repeat for more."),
]
Routes = Annotated[
    list[str] | None,
    typer.Option(
        "--route",
        help="chat.completions, completions, embeddings, responses, messages, files, batches or models; repeat.",
    ),
]
Networks = Annotated[
    list[str] | None, typer.Option("--network", help="Where it may be used from, like 10.0.0.0/8 or 2001:db8::/32.")
]
Tags = Annotated[list[str] | None, typer.Option("--tag", metavar="NAME=VALUE", help="On all its operations; repeat.")]
MayAttribute = Annotated[
    bool | None,
    typer.Option(
        "--may-attribute/--no-may-attribute",
        help="Whether the callers' own tags (x-farthing-tags, user) are taken, and count in the tags' budgets.",
        show_default=False,
    ),
]
RecordPayloads = Annotated[
    bool | None,
    typer.Option(
        "--record-payloads/--no-record-payloads",
        help="Whether the bodies of its requests and answers are kept (default: no).",
        show_default=False,
    ),
]
ANY = "any"
"""The word that lifts a restriction."""


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for; need not be unique.")],
    org: Annotated[str, typer.Option(help="Organisation, made if there is none of that name.")] = "default",
    team: Annotated[str | None, typer.Option(help="Team, likewise.")] = None,
    user: Annotated[str | None, typer.Option(help="User, likewise.")] = None,
    days: Days = None,
    models: Models = None,
    routes: Routes = None,
    networks: Networks = None,
    tags: Tags = None,
    may_attribute: MayAttribute = None,
    record_payloads: RecordPayloads = None,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make a key and show it, this once: the database keeps only its hash."""
    expires_at = _in_days(days)

    async def work(connection: "AsyncConnection") -> "NewSecret":
        from billing import people

        restrictions = _changed(people.UNRESTRICTED, models, routes, networks, tags, may_attribute, record_payloads)
        org_id = await people.find_org(connection, org) or await people.create_org(connection, org)
        team_id = user_id = None
        if team is not None:
            team_id = await people.find_team(connection, org_id, team)
            team_id = team_id or await people.create_team(connection, org_id, team)
        if user is not None:
            user_id = await people.find_user(connection, org_id, user)
            user_id = user_id or await people.create_user(connection, org_id, user, team_id)
        return await people.create_key(
            connection,
            org_id,
            name,
            team_id=team_id,
            user_id=user_id,
            expires_at=expires_at,
            restrictions=restrictions,
        )

    key = in_database(work, database_url, data_dir)
    show([{"id": key.id, "name": name, "expires_at": expires_at, "key": key.secret}], as_json)


@app.command("list")
def list_(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List all keys, oldest first."""

    async def work(connection: "AsyncConnection") -> "list[KeyInfo]":
        from billing import people

        return await people.list_keys(connection)

    keys = in_database(work, database_url, data_dir)
    rows = [_facts(key) | {"restricted": _restricted(key)} for key in keys]
    show(rows, as_json)


@app.command("show")
def show_(which: Which, as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Show all there is to know about a key; its secret is not known."""

    async def work(connection: "AsyncConnection") -> "KeyInfo":
        from billing import people

        return await people.get_key(connection, which)

    key = in_database(work, database_url, data_dir)
    facts = _facts(key) | {
        "old_secret_works_until": key.replaces_until,
        "models": _words(key.models),
        "routes": _words(key.routes),
        "networks": None if key.networks is None else ", ".join(map(str, key.networks)),
        "tags": ", ".join(f"{name}={value}" for name, value in sorted(key.tags.items())) or None,
        "may_attribute": "yes" if key.may_attribute else "no",
        "record_payloads": "yes" if key.record_payloads else "no",
    }
    show([facts] if as_json else [{"of the key": name, "": value} for name, value in facts.items()], as_json)


@app.command()
def rotate(
    which: Which,
    hours: Annotated[
        float, typer.Option(min=0, max=24 * 365, help="How long the old secret works beside the new one.")
    ] = 24,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Give a key a new secret and show it, this once. All else stays; the old secret works for a while."""

    async def work(connection: "AsyncConnection") -> "tuple[NewSecret, datetime | None]":
        from billing import people

        key = await people.get_key(connection, which)
        secret = await people.rotate_key(connection, key.key_id, timedelta(hours=hours))
        assert secret is not None, "it was there within this transaction"
        return secret, (await people.get_key(connection, str(key.key_id))).replaces_until

    secret, until = in_database(work, database_url, data_dir)
    show([{"id": secret.id, "old_secret_works_until": until, "key": secret.secret}], as_json)


@app.command()
def restrict(
    which: Which,
    days: Annotated[int | None, typer.Option(min=0, max=36_500, help="Days from now; 0: it never expires.")] = None,
    models: Models = None,
    routes: Routes = None,
    networks: Networks = None,
    tags: Tags = None,
    may_attribute: MayAttribute = None,
    record_payloads: RecordPayloads = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Change what a key may be used for. What you name takes the place of what was; the word `any` lifts it."""
    if days is may_attribute is record_payloads is None and not (models or routes or networks or tags):
        fail("nothing to change; see `farthing keys restrict --help`")

    async def work(connection: "AsyncConnection") -> None:
        from billing import people

        key = await people.get_key(connection, which)
        changed = _changed(key, models, routes, networks, tags, may_attribute, record_payloads)
        await people.restrict_key(connection, key.key_id, changed)
        if days is not None:
            await people.expire_key(connection, key.key_id, _in_days(days))

    in_database(work, database_url, data_dir)
    typer.echo(f"changed {which}")


@app.command()
def revoke(which: Which, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Refuse a key from now on, with all its secrets."""

    async def work(connection: "AsyncConnection") -> None:
        from billing import people

        await people.revoke_key(connection, (await people.get_key(connection, which)).key_id)

    in_database(work, database_url, data_dir)
    typer.echo(f"revoked {which}")


def _facts(key: "KeyInfo") -> dict[str, Any]:
    return {
        "id": key.key_id,
        "prefix": key.prefix,
        "name": key.name,
        "org": key.org,
        "team": key.team,
        "user": key.user,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }


def _in_days(days: int | None) -> datetime | None:
    return datetime.now(UTC) + timedelta(days=days) if days else None


def _changed(
    before: "Restrictions",
    models: list[str] | None,
    routes: list[str] | None,
    networks: list[str] | None,
    tags: list[str] | None,
    may_attribute: bool | None,
    record_payloads: bool | None,
) -> "Restrictions":
    """`before` with what was named on the command line in its place."""
    from billing import restrictions

    def named(given: list[str] | None, old: frozenset[str] | None) -> frozenset[str] | None:
        if not given:
            return old
        return None if given == [ANY] else frozenset(given)

    ranges = before.networks
    if networks:
        ranges = None if networks == [ANY] else restrictions.networks(networks)
    own = before.tags
    if tags:
        own = {} if tags == [ANY] else _tags(tags)
    return restrictions.Restrictions(
        models=named(models, before.models),
        routes=named(routes, before.routes),
        networks=ranges,
        tags=own,
        may_attribute=before.may_attribute if may_attribute is None else may_attribute,
        record_payloads=before.record_payloads if record_payloads is None else record_payloads,
    )


def _tags(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ValueError(f"{text!r} is no tag; write NAME=VALUE, or `any` for none")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _words(names: frozenset[str] | None) -> str | None:
    return None if names is None else ", ".join(sorted(names))


def _restricted(key: "KeyInfo") -> str | None:
    """By what, in a word each."""
    names = [name for name in ("models", "routes", "networks") if getattr(key, name) is not None]
    return ", ".join(names) or None
