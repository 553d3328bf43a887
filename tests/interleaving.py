"""Parties that share files, run in every order: a scheduler at file operations, and a search over its choices.

Each party is a thread that runs only when it is chosen, from one operation on files that others also use to the next. Its clock
is the scheduler's: time stands still while anybody can go on, and a party that sleeps is woken early only by a change of what it
looked at since it woke last. So a run is a function of the choices, and can be repeated.

A state is what each party has seen and done, and who wrote last what they share. The search goes on from each state once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.watched_files import Operation
from tests.faulty_files import FaultyFiles, Rule

QUANTUM_S = 5.0
"""Whoever sleeps does so at least this long, unless something changes: polls that see nothing new are not the point."""
CHANGES = frozenset({"create", "write", "flush", "rename", "remove", "mkdir"})
LONGEST_S = 2000.0
"""A run that is not over by then, on its own clock, waits for something without a deadline."""


class Crashed(BaseException):
    """The process of this party is gone: nothing that it still wants to do happens."""


class NeverEndsError(AssertionError):
    """Parties wait for each other, or go on for ever."""


class _Pruned(Exception):
    """The state was reached before, on another way."""


Accesses = Sequence[tuple[str, bool]]


@lru_cache(10_000)
def accesses(operation: Operation) -> Accesses:
    """What an operation uses that others can see, and whether it changes it. Names with a dot in front are private."""
    if operation.kind == "list":
        return [(f"{operation.path}/", False)] if _is_public(operation.path) else []
    if operation.kind == "open":
        path = PurePosixPath(operation.path)
        return [(str(name), False) for name in (path, *path.parents) if _is_public(operation.path)]
    if operation.kind == "mkdir":  # harmless when it is there already
        return [(f"{PurePosixPath(operation.path).parent}/", True)] if _is_public(operation.path) else []
    if operation.kind in ("rename", "remove", "create"):
        names = [name for name in (operation.path, operation.target) if name and _is_public(name)]
        return [(used, True) for name in names for used in (name, f"{PurePosixPath(name).parent}/")]
    return []


def _is_public(path: str) -> bool:
    return path == "." or not any(part.startswith(".") for part in PurePosixPath(path).parts)


@dataclass
class Sharing:
    """Who reads and who changes what, over all runs so far: the order of two uses matters where one of them is a change.

    Changes of one folder under different names commute, so a folder matters where somebody lists it.
    """

    _readers: dict[str, set[str]] = field(default_factory=dict)
    _writers: dict[str, set[str]] = field(default_factory=dict)
    _known: frozenset[tuple[str, str, bool]] = frozenset()
    """(party, name, changes it) whose moment matters."""

    def note(self, party: str, used: Accesses) -> None:
        for name, is_write in used:
            (self._writers if is_write else self._readers).setdefault(name, set()).add(party)

    def matter(self, party: str, used: Accesses) -> Accesses:
        return [(name, is_write) for name, is_write in used if (party, name, is_write) in self._known]

    def are_independent(self, one: str, other: str) -> bool:
        """Neither sees what the other does, as far as is known."""
        for name, writers in self._writers.items():
            users = self._readers.get(name, set()) | (set() if name.endswith("/") else writers)
            if (one in writers and other in users) or (other in writers and one in users):
                return False
        return True

    def learn(self) -> bool:
        """Whether something was not known to matter."""
        before = self._known
        known: set[tuple[str, str, bool]] = set()
        for name, writers in self._writers.items():
            readers = self._readers.get(name, set())
            rivals = readers if name.endswith("/") else readers | writers
            known |= {(party, name, True) for party in writers if rivals - {party}}
            known |= {(party, name, False) for party in readers if writers - {party}}
        self._known = frozenset(known)
        return self._known != before


@dataclass(eq=False)
class Party:
    """`crash_at`, `stall_at`: before which operation it dies, or stands still for `stall_s`; 0 for never, 1 for the first.

    `moments` are its operations so far whose order with those of others matters, `changes` those that leave something behind:
    a crash before any other operation is one before the next of these.
    """

    name: str
    body: Callable[[], object]
    crash_at: int = 0
    stall_at: int = 0
    stall_s: float = 0.0
    operations: int = 0
    moments: list[int] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    history: int = 0
    is_gone: bool = False
    is_over: bool = False
    is_asleep: bool = False
    is_called: bool = False
    due_s: float = 0.0
    stalled_until_s: float = 0.0
    looked_at: dict[str, int] = field(default_factory=dict)
    error: BaseException | None = None
    result: object = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None

    def crash(self) -> None:
        """At its next operation, which does not happen."""
        self.is_gone = True


Choose = Callable[["Schedule", list[Party]], Party]


class Schedule:
    """One run. `choose` says who goes on; `watch` is called before each operation, `check` after each stretch of a party."""

    def __init__(
        self,
        root: Path,
        sharing: Sharing,
        choose: Choose,
        *,
        rules: Sequence[Rule] = (),
        watch: Callable[[Party, Operation], None] = lambda party, operation: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.parties: list[Party] = []
        self.now_s = 1000.0
        self.last: Party | None = None
        self.files = FaultyFiles(root, rules, self._before)
        self._sharing, self._choose, self._watch, self._check = sharing, choose, watch, check
        self._versions: dict[str, int] = {}
        self._turn = threading.Semaphore(0)
        self._here = threading.local()
        self._real_clock: Callable[[], float] = time.monotonic
        self._real_sleep: Any = time.sleep

    @contextmanager
    def entered(self) -> Iterator[Schedule]:
        """Inside, parties have the schedule's clock and files. At the end, those that still run are gone."""
        with self.files:
            sleep: Any = self._sleep
            time.monotonic, time.sleep = self._clock, sleep
            try:
                yield self
            finally:
                self.end(self.parties)
                time.monotonic, time.sleep = self._real_clock, self._real_sleep

    def add(self, name: str, body: Callable[[], object], host: str = "", **faults: Any) -> Party:
        party = Party(name, body, **faults)
        party.thread = threading.Thread(target=self._run, args=(party, host or name), daemon=True)
        self.parties.append(party)
        party.thread.start()
        return party

    def end(self, parties: Sequence[Party]) -> None:
        """Kill them all."""
        for party in parties:
            party.crash()
            if not party.is_over:
                self._resume(party)
            assert party.thread is not None
            party.thread.join()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Raises NeverEndsError; what `check` raises."""
        while not is_done():
            able = [party for party in self.parties if self._is_able(party)]
            if able:
                self.last = able[0] if len(able) == 1 else self._choose(self, able)
                self._resume(self.last)
                if isinstance(self.last.error, AssertionError):
                    raise self.last.error
                self._check()
            else:
                self._let_time_pass()

    def change(self, name: str) -> None:
        """Something outside all parties changed `name`."""
        self._sharing.note("nobody", [(name, True)])
        self._versions[name] = hash((name, self._versions.get(name, 0)))

    def state(self) -> tuple[Any, ...]:
        """Equal for two runs that go on alike, whatever is chosen."""
        parties = tuple(
            (p.history, p.is_over, p.is_gone, p.is_asleep, p.due_s, p.stalled_until_s) for p in self.parties
        )
        return self.now_s, parties, frozenset(self._versions.items())

    # ---- the scheduler's thread ------------------------------------------------------------------------------------

    def _is_able(self, party: Party) -> bool:
        if party.is_over or self.now_s < party.stalled_until_s:
            return False
        return not party.is_asleep or party.is_called or self.now_s >= party.due_s or self._has_news(party)

    def _has_news(self, party: Party) -> bool:
        return any(self._versions.get(name, 0) != seen for name, seen in party.looked_at.items())

    def _let_time_pass(self) -> None:
        waiting = [max(party.due_s, party.stalled_until_s) for party in self.parties if not party.is_over]
        if not waiting or min(waiting) > 1000.0 + LONGEST_S:
            told = ", ".join(f"{party.name}: {'over' if party.is_over else party.due_s}" for party in self.parties)
            raise NeverEndsError(f"nobody goes on at {self.now_s:.1f} s ({told})")
        self.now_s = max(self.now_s, min(waiting))

    def _resume(self, party: Party) -> None:
        party.go.release()
        self._turn.acquire()

    # ---- the parties' threads --------------------------------------------------------------------------------------

    def _run(self, party: Party, host: str) -> None:
        self._here.party = party
        party.go.acquire()
        try:
            if not party.is_gone:
                with self.files.on(host):
                    party.result = party.body()
        except BaseException as error:  # noqa: BLE001 (whoever runs the schedule looks at it)
            party.error = error
        party.is_over = True
        self._turn.release()

    def _before(self, operation: Operation) -> None:
        party: Party | None = getattr(self._here, "party", None)
        if party is None:
            return
        party.operations += 1
        if party.is_gone or party.operations == party.crash_at:
            party.is_gone = True
            raise Crashed
        if party.operations == party.stall_at:
            party.stalled_until_s = self.now_s + party.stall_s
        if operation.kind in CHANGES:
            party.changes.append(party.operations)
        used = accesses(operation)
        self._sharing.note(party.name, used)
        shared = self._sharing.matter(party.name, used)
        if shared or self.now_s < party.stalled_until_s:
            self._hand_over(party)
        self._watch(party, operation)
        if shared:
            party.moments.append(party.operations)
            self._account(party, operation, shared)

    def _account(self, party: Party, operation: Operation, shared: Accesses) -> None:
        seen = tuple((name, self._versions.get(name, 0)) for name, _ in shared)
        party.history = hash((party.history, operation.kind, seen))
        for name, is_write in shared:
            if is_write:
                self._versions[name] = hash((party.name, party.history, name))
            party.looked_at[name] = self._versions.get(name, 0)

    def _hand_over(self, party: Party) -> None:
        self._turn.release()
        party.go.acquire()
        if party.is_gone:
            raise Crashed

    def _clock(self) -> float:
        return self.now_s if hasattr(self._here, "party") else self._real_clock()

    def _sleep(self, duration_s: float, /) -> None:
        party: Party | None = getattr(self._here, "party", None)
        if party is None:
            self._real_sleep(duration_s)
            return
        party.is_asleep, party.due_s = True, self.now_s + max(duration_s, QUANTUM_S)
        self._hand_over(party)
        party.is_asleep = party.is_called = False
        party.history = hash((party.history, self.now_s))
        party.due_s = 0.0
        party.looked_at.clear()


# ---- choices ---------------------------------------------------------------------------------------------------------


def in_order(*names: str) -> Choose:
    """Whoever comes first in `names` goes on as long as it can; the others after them."""

    def choose(schedule: Schedule, able: list[Party]) -> Party:
        return min(able, key=lambda party: names.index(party.name) if party.name in names else len(names))

    return choose


def in_turn(schedule: Schedule, able: list[Party]) -> Party:
    """One stretch each."""
    after = schedule.parties.index(schedule.last) + 1 if schedule.last in schedule.parties else 0
    around = schedule.parties[after:] + schedule.parties[:after]
    return next(party for party in around if party in able)


@dataclass
class Search:
    """All orders of a scenario in which a party is interrupted, while it could go on, at most `most_interruptions` times.

    `scenario` makes one run with the given choice, and raises AssertionError when something is wrong.
    """

    scenario: Callable[[Sharing, Choose], None]
    sharing: Sharing
    most_interruptions: int
    runs: int = 0
    states: set[Any] = field(default_factory=set)

    def run(self) -> Search:
        """Again from the beginning whenever something turns out to be shared that was not known to be."""
        self._search()
        while self.sharing.learn():
            self._search()
        return self

    def _search(self) -> None:
        self.states.clear()
        left: list[tuple[list[str], int]] = [([], 0)]
        while left:
            self._follow(*left.pop(), left)

    def _follow(self, given: list[str], interruptions: int, left: list[tuple[list[str], int]]) -> None:
        path: list[str] = []

        def choose(schedule: Schedule, able: list[Party]) -> Party:
            if len(path) < len(given):
                chosen = next(party for party in able if party.name == given[len(path)])
            else:
                chosen = self._branch(schedule, able, path, interruptions, left)
            path.append(chosen.name)
            return chosen

        self.runs += 1
        try:
            self.scenario(self.sharing, choose)
        except _Pruned:
            pass

    def _branch(
        self,
        schedule: Schedule,
        able: list[Party],
        path: list[str],
        interruptions: int,
        left: list[tuple[list[str], int]],
    ) -> Party:
        last = schedule.last if schedule.last in able else None
        state = (schedule.state(), last and last.name, interruptions)
        if state in self.states:
            raise _Pruned
        self.states.add(state)
        first = last or able[0]
        then = interruptions + (last is not None)
        if then <= self.most_interruptions:
            left += [([*path, party.name], then) for party in able if party is not first and self._matters(last, party)]
        return first

    def _matters(self, last: Party | None, party: Party) -> bool:
        """Two parties that do not see each other's doings take their turns in one order only: that of their names."""
        return last is None or last.name < party.name or not self.sharing.are_independent(last.name, party.name)
