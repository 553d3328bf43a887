"""Where the time of a run went, as numbers: phases, overlap, the GPU-hour ledger, what each step waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from traces.intervals import Intervals, intersect, total, union
from traces.ledger import AttemptActivity, SlotHolder, class_intervals
from traces.model import ProcessTrace
from traces.phases import LedgerClass
from traces.run import RunTrace

_STEP_TERMS = {
    LedgerClass.WAITING_FOR_DATA: "data_s",
    LedgerClass.USEFUL_TRAIN: "train_s",
    LedgerClass.WAITING_FOR_WEIGHTS: "weights_s",
}


@dataclass(frozen=True)
class PhaseStatistics:
    """All spans of one phase in one role, seconds."""

    role: str
    phase: str
    count: int
    total_s: float
    p50_s: float
    p95_s: float
    max_s: float
    unfinished: int


@dataclass(frozen=True)
class Overlap:
    """How much of generation and training ran at the same time, seconds of wall time."""

    generation_s: float
    training_s: float
    both_s: float


@dataclass
class StepTerms:
    """What one optimizer step of the first trainer rank was made of; `dominated_by` is the largest term's name."""

    attempt: int
    step: int
    data_s: float = 0.0
    train_s: float = 0.0
    weights_s: float = 0.0

    @property
    def dominated_by(self) -> str:
        """ "data", "train" or "weights"."""
        return max(("data", "train", "weights"), key=lambda term: float(getattr(self, f"{term}_s")))


@dataclass
class Summary:
    """Everything `python -m traces summary` says. The ledger is slot-seconds by role and class."""

    run: str
    duration_s: float
    attempts: list[int]
    phases: list[PhaseStatistics]
    overlap: Overlap
    ledger: dict[str, dict[str, float]]
    steps: list[StepTerms]
    open_processes: list[str]
    bad_lines: dict[str, int]
    dropped_records: int
    clock_shifts_s: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        steps = [{**asdict(step), "dominated_by": step.dominated_by} for step in self.steps]
        return {**asdict(self), "steps": steps}


def summarise(run: RunTrace) -> Summary:
    """Reads all processes of `run` once."""
    collected = _Collected(run)
    for process in run.processes():
        collected.take(process)
    end_ns = max(run.end_ns.values())
    shifts = {host: clock.shift_ns / 1e9 for host, clock in run.clocks.hosts.items() if clock.shift_ns}
    return Summary(
        run=str(run.where),
        duration_s=(end_ns - run.start_ns) / 1e9,
        attempts=run.attempts,
        phases=collected.phase_statistics(),
        overlap=collected.overlap(),
        ledger=collected.ledger(),
        steps=sorted(collected.steps.values(), key=lambda step: (step.attempt, step.step)),
        open_processes=collected.open_processes,
        bad_lines=collected.bad_lines,
        dropped_records=collected.dropped_records,
        clock_shifts_s=shifts,
    )


@dataclass
class _Collected:
    run: RunTrace
    durations_s: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    unfinished: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    generation: Intervals = field(default_factory=list)
    training: Intervals = field(default_factory=list)
    holders: dict[tuple[int, str, str, int], SlotHolder] = field(default_factory=dict)
    steps: dict[tuple[int, int], StepTerms] = field(default_factory=dict)
    open_processes: list[str] = field(default_factory=list)
    bad_lines: dict[str, int] = field(default_factory=dict)
    dropped_records: int = 0

    def __post_init__(self) -> None:
        self._activity = {attempt: self._attempt_window(attempt) for attempt in self.run.attempts}
        trainers = [head for head in self.run.heads if head.role == "trainer"]
        self._first_trainer = {
            attempt: min((head.key for head in trainers if head.attempt == attempt), default=None)
            for attempt in self.run.attempts
        }

    def take(self, process: ProcessTrace) -> None:
        """Processes come in display order: the holder of slots before its helpers."""
        for span in process.spans:
            self.durations_s[process.role, span.phase].append((span.end_ns - span.start_ns) / 1e9)
            self.unfinished[process.role, span.phase] += span.unfinished
            if span.phase == "generate":
                self.generation.append((span.start_ns, span.end_ns))
        if process.role == "trainer":
            self.training += class_intervals(process.spans).get(LedgerClass.USEFUL_TRAIN, [])
        if process.key == self._first_trainer[process.attempt]:
            self._take_steps(process)
        self._activity[process.attempt].learn(process)
        if process.holder_key in self.holders:
            self.holders[process.holder_key].add_phases(process)
        elif process.num_slots:
            self.holders[process.holder_key] = SlotHolder(process)
        self._take_health(process)

    def phase_statistics(self) -> list[PhaseStatistics]:
        """Largest total first within each role."""
        rows = [
            PhaseStatistics(
                role,
                phase,
                len(values),
                sum(values),
                percentile(values, 0.5),
                percentile(values, 0.95),
                max(values),
                self.unfinished[role, phase],
            )
            for (role, phase), values in self.durations_s.items()
        ]
        return sorted(rows, key=lambda row: (row.role, -row.total_s, row.phase))

    def overlap(self) -> Overlap:
        """From the union over all processes."""
        generation, training = union(self.generation), union(self.training)
        both = intersect(generation, training)
        return Overlap(total(generation) / 1e9, total(training) / 1e9, total(both) / 1e9)

    def ledger(self) -> dict[str, dict[str, float]]:
        """Slot-seconds by role and class."""
        roles: dict[str, dict[str, float]] = {}
        for holder in self.holders.values():
            role = roles.setdefault(holder.role, {ledger_class.value: 0.0 for ledger_class in LedgerClass})
            for ledger_class, seconds in holder.seconds(self._activity[holder.attempt]).items():
                role[ledger_class.value] += seconds
        return roles

    def _attempt_window(self, attempt: int) -> AttemptActivity:
        heads = [head for head in self.run.heads if head.attempt == attempt]
        firsts = [session.first_ns for head in heads for session in head.sessions.values()]
        end_ns = self.run.end_ns[attempt]
        return AttemptActivity(min(firsts, default=end_ns), end_ns)

    def _take_steps(self, process: ProcessTrace) -> None:
        by_step = defaultdict(list)
        for span in process.spans:
            if span.step is not None:
                by_step[span.step].append(span)
        for step, spans in by_step.items():
            terms = self.steps.setdefault((process.attempt, step), StepTerms(process.attempt, step))
            for ledger_class, intervals in class_intervals(spans).items():
                if ledger_class in _STEP_TERMS:
                    setattr(terms, _STEP_TERMS[ledger_class], total(intervals) / 1e9)

    def _take_health(self, process: ProcessTrace) -> None:
        if process.num_bad_lines:
            self.bad_lines[self.run.short(process.path)] = process.num_bad_lines
        self.dropped_records += sum(session.dropped for session in process.sessions.values())
        if any(not session.closed for session in process.sessions.values() if session.anchors):
            self.open_processes.append(f"attempt {process.attempt} {process.label}")


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of `values` lie, between neighbours linearly. `values` is not empty."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
