"""Which operations somebody asks about."""

from typing import Any
from uuid import UUID

import msgspec


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """All that is given must hold. A tag is (name, value)."""

    org_id: UUID | None = None
    team_id: UUID | None = None
    user_id: UUID | None = None
    key_id: UUID | None = None
    model: str | None = None
    """The model that answered."""
    tag: tuple[str, str] | None = None
    currency: str | None = None

    def sql(self, o: str = "o") -> tuple[str, dict[str, Any]]:
        """A condition on table `o` (operation) that begins with AND, or nothing; and its parameters."""
        equal = ("org_id", "team_id", "user_id", "key_id", "model", "currency")
        given = {name: getattr(self, name) for name in equal if getattr(self, name) is not None}
        condition = "".join(f" AND {o}.{name} = :f_{name}" for name in given)
        parameters = {f"f_{name}": value for name, value in given.items()}
        if self.tag is not None:
            condition += f" AND {o}.tags ->> :f_tag_name = :f_tag_value"
            parameters |= {"f_tag_name": self.tag[0], "f_tag_value": self.tag[1]}
        return condition, parameters
