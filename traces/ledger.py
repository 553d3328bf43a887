"""The GPU-hour ledger: every second of every slot, from the attempt's first record to its last, in exactly one class.

A slot is what a process holds (`num_slots` of them): a GPU, or a worker on a CPU machine. Rules:
- Inside a process's life, a moment belongs to the innermost phase of `traces.phases`; where phases of several threads
  overlap, to the first class in the order of LedgerClass.
- A rollout instance whose agent records nothing decodes while a request to it is in flight (the controller's `generate`
  spans, by their `instance` detail), else it waits: for weights while the controller does, otherwise for prompts. So
  "useful decode" means that there was work, not that the GPU was full.
- Before a process's first record its slots are being set up; between two lives, and after the last record of a process
  that did not end in order, they are lost.
- Decode that was thrown away is the decode time times (dropped tokens / generated tokens).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from traces.intervals import Intervals, intersect, subtract, total, union
from traces.model import ProcessTrace, SpanRecord
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
    generated_tokens: float = 0
    dropped_tokens: float = 0

    def learn(self, process: ProcessTrace) -> None:
        """Take in the requests and waits of one process."""
        for span in process.spans:
            if span.phase == "generate":
                side = self.failing if "error" in span.details else self.generating
                side[str(span.details.get("instance", ""))].append((span.start_ns, span.end_ns))
                self.generated_tokens += _tokens(span.details)
            elif span.phase in _WAITS_FOR_WEIGHTS:
                self.waiting_for_weights.append((span.start_ns, span.end_ns))
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


def slot_seconds(process: ProcessTrace, attempt: AttemptActivity) -> dict[LedgerClass, float]:
    """Slot-seconds of one process by class; their sum is num_slots x the attempt's length."""
    life = union((session.first_ns, session.last_ns) for session in process.sessions.values())
    parts = dict(_outside_life(process, life, attempt))
    remaining = life
    by_class = class_intervals(process.spans)
    for ledger_class in LedgerClass:
        mine = intersect(by_class.get(ledger_class, []), remaining)
        remaining = subtract(remaining, mine)
        parts[ledger_class] = parts.get(ledger_class, 0) + total(mine)
    for ledger_class, mine in _remainder(process, remaining, attempt):
        parts[ledger_class] = parts.get(ledger_class, 0) + total(mine)
    seconds = {ledger_class: process.num_slots * ns / 1e9 for ledger_class, ns in parts.items()}
    if process.role == "rollout":
        thrown_away_s = seconds[LedgerClass.USEFUL_DECODE] * attempt.thrown_away_share
        seconds[LedgerClass.USEFUL_DECODE] -= thrown_away_s
        seconds[LedgerClass.THROWN_AWAY] += thrown_away_s
    return seconds


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


def _outside_life(
    process: ProcessTrace, life: Intervals, attempt: AttemptActivity
) -> Iterable[tuple[LedgerClass, int]]:
    first_ns, last_ns = life[0][0] if life else attempt.end_ns, life[-1][1] if life else attempt.end_ns
    yield LedgerClass.SET_UP, max(0, first_ns - attempt.start_ns)
    last = max(process.sessions.values(), key=lambda session: session.last_ns, default=None)
    after_ns = max(0, attempt.end_ns - last_ns)
    between_ns = (last_ns - first_ns) - total(life)
    in_order = last is not None and last.closed
    yield LedgerClass.LOST, between_ns + (0 if in_order else after_ns)
    yield LedgerClass.OTHER, after_ns if in_order else 0


def _remainder(
    process: ProcessTrace, remaining: Intervals, attempt: AttemptActivity
) -> Iterable[tuple[LedgerClass, Intervals]]:
    """Time in which the process recorded no phase that counts."""
    if process.role != "rollout":
        yield LedgerClass.OTHER, remaining
        return
    claims = [
        (LedgerClass.USEFUL_DECODE, attempt.of_instance(attempt.generating, process.name)),
        (LedgerClass.LOST, attempt.of_instance(attempt.failing, process.name)),
        (LedgerClass.WAITING_FOR_WEIGHTS, union(attempt.waiting_for_weights)),
        (LedgerClass.WAITING_FOR_DATA, remaining),
    ]
    for ledger_class, claim in claims:
        mine = intersect(remaining, claim)
        remaining = subtract(remaining, mine)
        yield ledger_class, mine


def _tokens(details: dict[str, object]) -> float:
    tokens = details.get("tokens", 0)
    return float(tokens) if isinstance(tokens, int | float) else 0.0
