"""The key that `farthing up` hands out: one person needs no user administration to send a first request."""

from sqlalchemy.ext.asyncio import AsyncConnection

from billing import people

NAME = "default"


async def working_key(connection: AsyncConnection, known: str | None) -> str:
    """`known` if it still works here, else a new key of the user "default" (made with its org and team if need be).

    The database holds only hashes, so a key that nobody remembers cannot be brought back.
    """
    if known is not None:
        principal = await people.find_key(connection, known)
        if principal is not None and principal.ended() is None:
            return known
    org_id = await people.find_org(connection, NAME)
    team_id = None
    if org_id is None:
        org_id = await people.create_org(connection, NAME)
        team_id = await people.create_team(connection, org_id, NAME)
    user_id = await people.find_user(connection, org_id, NAME)
    if user_id is None:
        user_id = await people.create_user(connection, org_id, NAME, team_id)
    return (await people.create_key(connection, org_id, NAME, team_id=team_id, user_id=user_id)).secret
