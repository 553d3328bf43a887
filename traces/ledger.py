"""The GPU-hour ledger: every second of every slot, from the attempt's first record to its last, in exactly one class.

A slot is what a process holds (`num_slots` of them): a GPU, or a worker on a CPU machine. Rules:
- Inside a process's life, a moment belongs to the innermost phase of `traces.phases`; where phases of several threads,
  or of a process and its helpers ("rollout_000.server"), overlap, to the first class in the order of LedgerClass.
- A rollout instance that records nothing decodes while a request to it is in flight (the controller's `generate`
  spans, by their `instance` detail), else it waits: for weights while the controller does, otherwise for prompts. So
  "useful decode" means that there was work, not that the GPU was full. Evaluation is "other".
- Before a process's first record its slots are being set up; between two lives, and after the last record of a process
  that did not end in order, they are lost.
- Decode that was thrown away is the decode time times (dropped tokens / generated tokens).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from traces.intervals import Intervals, intersect, subtract, total, union
from traces.model import ProcessTrace, Session, SpanRecord
from traces.phases import DROPPED_INSTANT, PHASES, LedgerClass

_WAITS_FOR_WEIGHTS = ("wait_for_weights", "wait_for_trainer")


@dataclass
class AttemptActivity:
    """What the controller says about the rollout instances of one attempt."""

    start_ns: int
    end_ns: int
    generating: dict[str, Intervals] = field(default_factory=lambda: defaultdict(list))
    failing: dict[str, Intervals] = field(default_factory=lambda: defaultdict(list))
    waiting_for_weights: Intervals = field(default_factory=list)
    evaluating: Intervals = field(default_factory=list)
    generated_tokens: float = 0
    dropped_tokens: float = 0

    def learn(self, process: ProcessTrace) -> None:
        """Take in the requests and waits of one process."""
        for span in process.spans:
            moment = (span.start_ns, span.end_ns)
            if span.phase == "generate":
                side = self.failing if "error" in span.details else self.generating
                side[str(span.details.get("instance", ""))].append(moment)
                self.generated_tokens += _tokens(span.details)
            elif span.phase == "evaluate":
                self.evaluating.append(moment)
            elif span.phase in _WAITS_FOR_WEIGHTS:
                self.waiting_for_weights.append(moment)
        for point in process.points:
            if point.kind == "instant" and point.name == DROPPED_INSTANT:
                self.dropped_tokens += _tokens(point.details)

    def of_instance(self, side: dict[str, Intervals], name: str) -> Intervals:
        """When requests to instance `name`, or to an instance that was not named, were in flight."""
        return union([*side.get(name, []), *side.get("", [])])

    @property
    def thrown_away_share(self) -> float:
        """Share of the generated tokens that nothing will train on, 0 when tokens were not recorded."""
        return min(1.0, self.dropped_tokens / self.generated_tokens) if self.generated_tokens else 0.0


class SlotHolder:
    """One process that holds slots, with the phases of its helpers, without keeping their spans."""

    def __init__(self, process: ProcessTrace) -> None:
        self.role = process.role
        self.attempt = process.attempt
        self.num_slots = process.num_slots
        self._name = process.name
        self._sessions: list[Session] = list(process.sessions.values())
        self._by_class: dict[LedgerClass, Intervals] = {}
        self.add_phases(process)

    def add_phases(self, process: ProcessTrace) -> None:
        """Count the phases of `process`, the holder itself or a helper, as this slot's."""
        for ledger_class, found in class_intervals(process.spans).items():
            self._by_class[ledger_class] = union([*self._by_class.get(ledger_class, []), *found])

    def seconds(self, attempt: AttemptActivity) -> dict[LedgerClass, float]:
        """Slot-seconds by class; their sum is num_slots x the attempt's length."""
        life = union((session.first_ns, session.last_ns) for session in self._sessions)
        parts = dict.fromkeys(LedgerClass, 0)
        for ledger_class, outside_ns in self._outside_life(life, attempt):
            parts[ledger_class] += outside_ns
        remaining = life
        for ledger_class, claim in self._claims(attempt, life):
            parts[ledger_class] += total(intersect(remaining, claim))
            remaining = subtract(remaining, claim)
        seconds = {ledger_class: self.num_slots * ns / 1e9 for ledger_class, ns in parts.items()}
        if self.role == "rollout":
            thrown_away_s = seconds[LedgerClass.USEFUL_DECODE] * attempt.thrown_away_share
            seconds[LedgerClass.USEFUL_DECODE] -= thrown_away_s
            seconds[LedgerClass.THROWN_AWAY] += thrown_away_s
        return seconds

    def _outside_life(self, life: Intervals, attempt: AttemptActivity) -> Iterable[tuple[LedgerClass, int]]:
        if not life:
            return
        first_ns, last_ns = life[0][0], life[-1][1]
        yield LedgerClass.SET_UP, first_ns - attempt.start_ns
        yield LedgerClass.LOST, (last_ns - first_ns) - total(life)
        ended_in_order = max(self._sessions, key=lambda session: session.last_ns).closed
        yield (LedgerClass.OTHER if ended_in_order else LedgerClass.LOST), attempt.end_ns - last_ns

    def _claims(self, attempt: AttemptActivity, life: Intervals) -> Iterable[tuple[LedgerClass, Intervals]]:
        """The classes in the order in which they may take time; the last takes what is left."""
        for ledger_class in LedgerClass:
            yield ledger_class, self._by_class.get(ledger_class, [])
        if self.role == "rollout":
            yield LedgerClass.USEFUL_DECODE, attempt.of_instance(attempt.generating, self._name)
            yield LedgerClass.LOST, attempt.of_instance(attempt.failing, self._name)
            yield LedgerClass.OTHER, union(attempt.evaluating)
            yield LedgerClass.WAITING_FOR_WEIGHTS, union(attempt.waiting_for_weights)
            yield LedgerClass.WAITING_FOR_DATA, life
        else:
            yield LedgerClass.OTHER, life


def class_intervals(spans: list[SpanRecord]) -> dict[LedgerClass, Intervals]:
    """When any thread was, in its innermost phase, doing something of each class."""
    children: dict[tuple[str, int], Intervals] = defaultdict(list)
    by_id = {(span.session, span.span_id): span for span in spans}
    for span in spans:
        if span.parent_id is not None:
            children[span.session, span.parent_id].append((span.start_ns, span.end_ns))
    found: dict[LedgerClass, Intervals] = defaultdict(list)
    for span in spans:
        ledger_class = _class_of(span, by_id)
        if ledger_class is not None:
            inner = children.get((span.session, span.span_id or 0), [])
            found[ledger_class] += subtract(union([(span.start_ns, span.end_ns)]), union(inner))
    return {ledger_class: union(parts) for ledger_class, parts in found.items()}


def _class_of(span: SpanRecord, by_id: dict[tuple[str, int | None], SpanRecord]) -> LedgerClass | None:
    """The class of the nearest enclosing phase, itself included, that is listed in `traces.phases`."""
    current: SpanRecord | None = span
    while current is not None:
        known = PHASES.get(current.phase)
        if known is not None:
            return known.ledger
        # Ids grow, so a parent's is smaller; a file that says otherwise is damaged and must not make a circle.
        has_parent = current.parent_id is not None and current.parent_id < (current.span_id or 0)
        current = by_id.get((current.session, current.parent_id)) if has_parent else None
    return None


def _tokens(details: dict[str, object]) -> float:
    tokens = details.get("tokens", 0)
    return float(tokens) if isinstance(tokens, int | float) else 0.0
