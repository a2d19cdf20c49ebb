"""Roles: what each of them may do, and who asks."""

from collections.abc import Iterable
from typing import Literal, get_args
from uuid import UUID

import msgspec

Role = Literal["member", "billing_reader", "admin", "owner"]
"""From the one that may least to the one that may most."""
Right = Literal["own", "read", "manage", "administer"]

RIGHTS: dict[Role, frozenset[Right]] = {
    "member": frozenset({"own"}),
    "billing_reader": frozenset({"own", "read"}),
    "admin": frozenset({"own", "read", "manage"}),
    "owner": frozenset({"own", "read", "manage", "administer"}),
}
"""`own`: one's own keys and usage. `read`: people, keys, money, usage and exports. `manage`: change all of that, and
see the audit log. `administer`: who the administrators are."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for something, and how far they may look."""

    actor: str
    """As the audit log names them."""
    name: str
    """As people know them: their e-mail address, or their name."""
    role: Role
    org_id: UUID | None = None
    """The only organisation they see; None: all."""
    user_id: UUID | None = None
    """Who a member is: all that they see is this user's."""
    administrator_id: UUID | None = None
    """None: whoever has the admin key."""

    def may(self, right: Right) -> bool:
        return right in RIGHTS[self.role]


OWNER = Caller(actor="admin-key", name="admin key", role="owner")
"""Whoever has the gateway's own admin key."""


def lower(one: Role, other: Role) -> Role:
    """The one of two roles that may less."""
    return min(one, other, key=get_args(Role).index)


def higher(roles: Iterable[Role]) -> Role:
    """The one of some roles that may most."""
    return max(roles, key=get_args(Role).index)
