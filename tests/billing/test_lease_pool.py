"""The arithmetic of leases against a model of the database, in any order, with statements and processes lost."""

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from decimal import ROUND_DOWN, Decimal
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from billing.allowances import Allowance
from billing.grants import Rest, grants
from billing.holds import Hold, Need, parts_of
from billing.ids import new_id
from billing.lease_pool import Gift, Pool, Taken
from billing.lease_store import SLICES
from billing.pots import Key
from billing.windows import window_bounds, zone

REPLICAS, NAMES = 3, ("org", "key")
START = datetime(2026, 11, 29, 12, 59, 50, tzinfo=UTC)

replicas = st.integers(0, REPLICAS - 1)
amounts = st.decimals(0, 6, places=2)
shares = st.integers(0, 10)


class Window:
    """A row of budget_window, and its leases: replica -> [granted, settled]."""

    def __init__(self) -> None:
        self.settled = Decimal(0)
        self.leases: dict[str, list[Decimal]] = defaultdict(lambda: [Decimal(0), Decimal(0)])

    @property
    def leased(self) -> Decimal:
        return sum((granted - settled for granted, settled in self.leases.values()), Decimal(0))


class Database:
    """What billing/lease_store.py and billing/settlements.py do, with integers of rows instead of SQL."""

    def __init__(self, limits: dict[UUID, Decimal]) -> None:
        self.limits = limits
        self.windows: dict[Key, Window] = defaultdict(Window)
        self.now = START

    def take(self, replica: str, pool: Pool, now: float) -> list[Taken]:
        demands = pool.demands(now)
        bounds = {d.terms.id: window_bounds(self.now, d.terms.window, zone("UTC")) for d in demands}
        rests = {}
        for budget_id, (starts_at, _) in bounds.items():
            window = self.windows[budget_id, starts_at]
            rest = max(self.limits[budget_id] - window.settled - window.leased, Decimal(0))
            rests[budget_id] = Rest(rest, (rest / SLICES).quantize(Decimal("1E-9"), rounding=ROUND_DOWN))
        answers = []
        for budget_id, taken in grants(demands, pool.wishes, rests).items():
            starts_at, ends_at = bounds[budget_id]
            window = self.windows[budget_id, starts_at]
            lease = window.leases[replica]
            others = window.leased - (lease[0] - lease[1])
            lease[0] += taken
            left = rests[budget_id].rest - taken
            answers.append(Taken((budget_id, starts_at), ends_at, taken, lease[0], left, others))
        return answers

    def give(self, replica: str, gifts: list[Gift]) -> None:
        for key, amount in gifts:
            self.windows[key].leases[replica][0] -= amount

    def granted(self, replica: str) -> dict[Key, Decimal]:
        return {key: window.leases[replica][0] for key, window in self.windows.items() if replica in window.leases}


class Replica:
    """A process: what it has in memory, and its spool."""

    def __init__(self, place: int, run: int) -> None:
        self.name = f"{place}.{run}"
        self.pool = Pool()
        self.open: list[Hold] = []
        self.spool: list[tuple[Hold, Decimal]] = []


class LeaseMachine(RuleBasedStateMachine):
    """`holds + what is spooled + what is settled` of a window is never more than its limit."""

    @initialize(limits=st.lists(st.decimals(1, 20, places=2), min_size=len(NAMES), max_size=len(NAMES)))
    def start(self, limits: list[Decimal]) -> None:
        self.terms = [
            Allowance(
                id=new_id(),
                scope_kind="key",
                scope_id=name,
                unit="money",
                window="hour" if name == "key" else "none",
                time_zone="UTC",
                limit_amount=limit,
                currency="USD",
                hard=True,
            )
            for name, limit in zip(NAMES, limits, strict=True)
        ]
        self.database = Database({terms.id: terms.limit_amount for terms in self.terms})
        self.clock = 1000.0
        self.replicas = [Replica(place, 0) for place in range(REPLICAS)]
        for replica in self.replicas:
            self.learn(replica)

    def learn(self, replica: Replica) -> None:
        replica.pool.set_clock(self.database.now, self.clock)
        replica.pool.learn([("key", name) for name in NAMES], self.terms)

    @rule(
        number=replicas,
        amount=amounts,
        which=st.sampled_from([("org",), ("key",), NAMES]),
        lost=st.sampled_from("  ba"),
    )
    def admit(self, number: int, amount: Decimal, which: tuple[str, ...], lost: str) -> None:
        """A call comes; where it has to wait, the database is asked, and the answer may be lost: before or after."""
        replica, pool = self.replicas[number], self.replicas[number].pool
        for _ in range(2):
            accounts = pool.matching.find({"key": list(which)})
            assert accounts is not None
            parts = parts_of(pool, accounts, Need(amount, 0), "USD", self.clock)
            short = [part for part in parts if part.short]
            if not short:
                replica.open.append(Hold(new_id(), replica.name, parts, self.clock))
                return
            self.find_out(number)
            pool.forget_demands()
            pool.demand({part.account: part.amount for part in short})
            if lost != "b":  # before: nothing was done
                answers = self.database.take(replica.name, pool, self.clock)
            if lost != " ":
                pool.doubt(part.account for part in short)
                return
            pool.set_clock(self.database.now, self.clock)
            pool.take(answers, self.clock)

    @rule(number=replicas)
    def find_out(self, number: int) -> None:
        replica = self.replicas[number]
        if replica.pool.doubtful:
            replica.pool.correct(self.database.granted(replica.name))

    @rule(number=replicas, share=shares, data=st.data())
    def settle(self, number: int, share: int, data: st.DataObject) -> None:
        replica = self.replicas[number]
        if replica.open:
            hold = replica.open.pop(data.draw(st.integers(0, len(replica.open) - 1)))
            if share == 0:
                hold.release()
                return
            billed = max((charge.held for charge in hold.charges), default=Decimal(0)) * share / 10
            replica.spool.append((hold, billed))
            hold.settle(billed, 0)

    @rule(number=replicas)
    def copy_the_spool(self, number: int) -> None:
        replica = self.replicas[number]
        for hold, billed in replica.spool:
            for charge in hold.charges:
                window = self.database.windows[charge.budget_id, charge.starts_at]
                window.settled += billed
                window.leases[hold.replica][1] += min(billed, charge.held)
        replica.spool = []

    @rule(number=replicas, everything=st.booleans(), lost=st.sampled_from("  ba"))
    def give_back(self, number: int, everything: bool, lost: str) -> None:
        replica, pool = self.replicas[number], self.replicas[number].pool
        if pool.doubtful:
            return  # as Leases does: first it finds out
        pool.idle(self.clock)
        gifts = pool.gifts(self.clock, everything)
        if lost != "b":
            self.database.give(replica.name, gifts)
        if lost != " ":
            pool.doubt(pool.accounts[gift.key[0]] for gift in gifts)
        finished = pool.finished(self.clock)
        rows = {pot.key: self.database.windows[pot.key].leases for pot in finished}
        gone = [pot for pot in finished if rows[pot.key][replica.name][0] == rows[pot.key][replica.name][1]]
        for pot in gone:
            del rows[pot.key][replica.name]
        pool.drop(gone)

    @rule(number=replicas)
    def crash(self, number: int) -> None:
        """kill -9. The next process on the spool copies what is there, then frees what was leased."""
        self.copy_the_spool(number)
        place, _, run = self.replicas[number].name.partition(".")
        for window in self.database.windows.values():
            window.leases.pop(self.replicas[number].name, None)
        self.replicas[number] = Replica(int(place), int(run) + 1)
        self.learn(self.replicas[number])

    @rule(seconds=st.sampled_from([1, 60, 1800]))
    def time_passes(self, seconds: int) -> None:
        self.clock += seconds
        self.database.now += timedelta(seconds=seconds)

    @rule(hours=st.sampled_from([-1, 1]))
    def the_clock_jumps(self, hours: int) -> None:
        self.database.now += timedelta(hours=hours)

    @invariant()
    def never_over(self) -> None:
        if not hasattr(self, "database"):
            return
        held: dict[Key, Decimal] = defaultdict(Decimal)
        for replica in self.replicas:
            for hold in replica.open:
                for part in hold.parts:
                    held[part.pot.key] += part.amount
            for hold, billed in replica.spool:
                for charge in hold.charges:
                    held[charge.budget_id, charge.starts_at] += billed
        for key in {*held, *self.database.windows}:
            window = self.database.windows[key]
            assert held[key] + window.settled <= window.settled + window.leased <= self.database.limits[key[0]]

    @invariant()
    def nothing_is_free_that_was_not_granted(self) -> None:
        if not hasattr(self, "database"):
            return
        for replica in self.replicas:
            for account in replica.pool.accounts.values():
                for pot in account.pots.values():
                    assert pot.free >= 0
                    assert pot.granted <= self.database.windows[pot.key].leases[replica.name][0]


LeaseMachine.TestCase.settings = settings(max_examples=500, stateful_step_count=40, deadline=None)
test_leases_in_any_order = LeaseMachine.TestCase
