"""Draws a few steps of a run as a picture: one row per process, coloured by phase, arrows for batches and versions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.intervals import Intervals, intersect, subtract, union
from traces.model import ProcessTrace, SpanRecord
from traces.phases import PHASES, LedgerClass
from traces.run import RunTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEFAULT_STEPS = 3
DRAWN_FLOWS = ("batch", "version")
_REQUESTS = "generate"
# Frames around others, and the agent's idle time, would hide the requests in flight behind them.
_NOT_DRAWN = ("step", _REQUESTS, "wait_for_request")
_MAX_SUB_ROWS = 3
_LEAST_SHARE_IN_LEGEND = 0.005
# Colour-blind safe qualitative palettes: Okabe and Ito, "Color Universal Design" (2008), then Tol's "light" (2021).
_COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
    "#77AADD", "#EE8866", "#44BB99", "#BBCC33", "#FFAABB", "#99DDFF", "#AAAA00", "#999999",
)  # fmt: skip
_FLOW_COLOURS = {"batch": "#444444", "version": "#AA0000"}


class MissingMatplotlibError(RuntimeError):
    """The picture needs a library that is not installed."""


class NoSuchStepError(ValueError):
    """The run has no step to draw."""


@dataclass
class Row:
    """One process and its helpers: the innermost phases, the requests in flight that it sent or serves."""

    label: str
    segments: list[tuple[str, int, int]] = field(default_factory=list)
    requests: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Picture:
    """What is drawn. `arrows`: (kind, start ns, start row, end ns, end row); `steps`: step number -> start ns."""

    start_ns: int
    end_ns: int
    rows: list[Row]
    arrows: list[tuple[str, int, int, int, int]]
    steps: dict[int, int]


def draw(run: RunTrace, out: Path, *, first_step: int | None = None, num_steps: int = DEFAULT_STEPS) -> None:
    """Write the picture; its format follows from the name (.png, .svg, .pdf).

    Raises MissingMatplotlibError, and NoSuchStepError when the run has no such step.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingMatplotlibError(
            "a picture needs matplotlib, which is not installed: pip install matplotlib, or the extra [dev]; "
            "`python -m traces export` needs nothing"
        ) from error
    mpl.use("Agg")
    _paint(collect(run, first_step, num_steps), out)


def collect(run: RunTrace, first_step: int | None, num_steps: int) -> Picture:
    """Everything to be drawn between the start of `first_step` and the end of the last of `num_steps` steps."""
    windows = _step_windows(run)
    start_ns, end_ns, steps = _window(windows, first_step, num_steps, (run.start_ns, max(run.end_ns.values())))
    rows: dict[tuple[int, str, str, int], Row] = {}
    flows: dict[tuple[int, str, str], list[tuple[str, int, Row]]] = defaultdict(list)
    requests: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for process in run.processes():
        row = rows.setdefault(process.holder_key, Row(process.label, requests=requests.get(process.name, [])))
        row.segments += _segments(process, start_ns, end_ns)
        for span in process.spans:
            if span.phase == _REQUESTS and _shows(span, start_ns, end_ns):
                row.requests.append((span.start_ns, span.end_ns))
                requests[str(span.details.get("instance", ""))].append((span.start_ns, span.end_ns))
        for point in process.points:
            if point.name in DRAWN_FLOWS and point.flow_id and start_ns <= point.ts_ns <= end_ns:
                flows[process.attempt, point.name, point.flow_id].append((point.kind, point.ts_ns, row))
    shown = [row for row in rows.values() if row.segments or row.requests]
    for row in shown:
        row.segments.sort(key=lambda segment: segment[1])
    return Picture(start_ns, end_ns, shown, _arrows(flows, shown), steps)


def _step_windows(run: RunTrace) -> dict[int, tuple[int, int]]:
    """Step number -> (start, end) in the first trainer process of the newest attempt that has steps."""
    newest: dict[int, tuple[int, int]] = {}
    seen: tuple[int, str, str, int] | None = None
    for process in run.processes():
        steps = [span for span in process.spans if span.step is not None] if process.role == "trainer" else []
        if steps and (seen is None or seen[0] < process.attempt):
            seen, newest = process.key, {}
            for span in steps:
                start_ns, end_ns = newest.get(span.step or 0, (span.start_ns, span.end_ns))
                newest[span.step or 0] = (min(start_ns, span.start_ns), max(end_ns, span.end_ns))
    return newest


def _window(
    windows: dict[int, tuple[int, int]], first_step: int | None, num_steps: int, whole: tuple[int, int]
) -> tuple[int, int, dict[int, int]]:
    if not windows:
        return (*whole, {})
    numbers = sorted(windows)
    if first_step is None:
        first_step = numbers[max(0, (len(numbers) - num_steps) // 2)]
    chosen = [number for number in numbers if number >= first_step][: max(1, num_steps)]
    if not chosen:
        raise NoSuchStepError(f"no step {first_step} or later in this run: it has steps {numbers[0]} to {numbers[-1]}")
    end_ns = max(windows[number][1] for number in chosen)
    return windows[chosen[0]][0], end_ns, {number: windows[number][0] for number in chosen}


def _segments(process: ProcessTrace, start_ns: int, end_ns: int) -> list[tuple[str, int, int]]:
    """(phase, start, end) of what each span does itself, cut to the window; frames and requests are left out."""
    children: dict[tuple[str, int | None], Intervals] = defaultdict(list)
    for span in process.spans:
        children[span.session, span.parent_id].append((span.start_ns, span.end_ns))
    found = []
    for span in process.spans:
        if span.phase in _NOT_DRAWN or not _shows(span, start_ns, end_ns):
            continue
        inner = [] if span.span_id is None else children[span.session, span.span_id]
        own = intersect(subtract([(span.start_ns, span.end_ns)], union(inner)), [(start_ns, end_ns)])
        found += [(span.phase, start, end) for start, end in own]
    return found


def _shows(span: SpanRecord, start_ns: int, end_ns: int) -> bool:
    return span.start_ns < end_ns and span.end_ns > start_ns


def _arrows(
    flows: dict[tuple[int, str, str], list[tuple[str, int, Row]]], rows: list[Row]
) -> list[tuple[str, int, int, int, int]]:
    index = {id(row): position for position, row in enumerate(rows)}
    found = []
    for (_, kind, _), points in flows.items():
        placed = [(direction, ts_ns, index[id(row)]) for direction, ts_ns, row in points if id(row) in index]
        starts = sorted((ts_ns, row) for direction, ts_ns, row in placed if direction == "start")
        for direction, ts_ns, row in placed:
            if direction == "end" and starts and starts[0][0] <= ts_ns:
                found.append((kind, *starts[0], ts_ns, row))
    return found


def _paint(picture: Picture, out: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(12, 1.6 + 0.62 * len(picture.rows)), layout="constrained")
    phases = sorted({phase for row in picture.rows for phase, _, _ in row.segments}, key=_phase_order)
    colours = {phase: _COLOURS[index % len(_COLOURS)] for index, phase in enumerate(phases)}
    for index, row in enumerate(picture.rows):
        _paint_requests(axes, row, index, picture)
        _paint_segments(axes, row, index, picture, colours)
    _paint_arrows(axes, picture)
    for step, ts_ns in picture.steps.items():
        axes.axvline(_seconds(picture, ts_ns), color="#888888", linewidth=0.8, linestyle=":")
        axes.annotate(f" step {step}", (_seconds(picture, ts_ns), -0.62), fontsize=8, color="#555555")
    _paint_frame(axes, picture, colours)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def _paint_segments(axes: Axes, row: Row, index: int, picture: Picture, colours: dict[str, str]) -> None:
    """Phases of one process that overlap (threads, tasks) share the row's height."""
    ends: list[int] = []
    placed = []
    for phase, start_ns, end_ns in row.segments:
        sub_row = next((lane for lane, end in enumerate(ends) if end <= start_ns), len(ends))
        if sub_row == _MAX_SUB_ROWS:
            sub_row = _MAX_SUB_ROWS - 1
        ends[sub_row : sub_row + 1] = [end_ns]
        placed.append((sub_row, phase, start_ns, end_ns))
    height = 0.72 / max(1, len(ends))
    for sub_row, phase, start_ns, end_ns in placed:
        left = _seconds(picture, start_ns)
        bottom = index - 0.36 + sub_row * height
        axes.broken_barh(
            [(left, (end_ns - start_ns) / 1e9)], (bottom, height), facecolors=colours[phase], alpha=_alpha(phase)
        )


def _paint_requests(axes: Axes, row: Row, index: int, picture: Picture) -> None:
    """Requests in flight, as a grey area behind the phases whose height is their number."""
    changes = sorted([(start, 1) for start, _ in row.requests] + [(end, -1) for _, end in row.requests])
    times, counts, running = [picture.start_ns], [0], 0
    for ts_ns, change in changes:
        running += change
        times.append(min(max(ts_ns, picture.start_ns), picture.end_ns))
        counts.append(running)
    most = max(counts)
    if most:
        tops = [index + 0.42 - 0.84 * count / most for count in counts]
        seconds = [_seconds(picture, ts_ns) for ts_ns in times]
        axes.fill_between(seconds, tops, index + 0.42, step="post", color="#D9D9D9", linewidth=0, zorder=0)


def _paint_arrows(axes: Axes, picture: Picture) -> None:
    for kind, start_ns, start_row, end_ns, end_row in picture.arrows:
        axes.annotate(
            "",
            xy=(_seconds(picture, end_ns), end_row),
            xytext=(_seconds(picture, start_ns), start_row),
            arrowprops={
                "arrowstyle": "-|>",
                "color": _FLOW_COLOURS[kind],
                "linewidth": 1.0,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )


def _paint_frame(axes: Axes, picture: Picture, colours: dict[str, str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    axes.set_yticks(range(len(picture.rows)), [row.label for row in picture.rows])
    axes.set_ylim(len(picture.rows) - 0.4, -0.75)
    axes.set_xlim(0, (picture.end_ns - picture.start_ns) / 1e9)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    keys: list[Any] = [
        Patch(facecolor=colour, alpha=_alpha(phase), label=phase)
        for phase, colour in colours.items()
        if _share(picture, phase) >= _LEAST_SHARE_IN_LEGEND
    ]
    if any(row.requests for row in picture.rows):
        keys.append(Patch(color="#D9D9D9", label="requests in flight"))
    for kind in sorted({arrow[0] for arrow in picture.arrows}):
        keys.append(Line2D([], [], color=_FLOW_COLOURS[kind], marker=">", markersize=4, label=kind))
    axes.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=6, fontsize=8, frameon=False)


def _alpha(phase: str) -> float:
    """Waiting is pale, work is not."""
    waits = (LedgerClass.WAITING_FOR_DATA, LedgerClass.WAITING_FOR_WEIGHTS)
    return 0.35 if phase in PHASES and PHASES[phase].ledger in waits and phase != "publish_weights" else 1.0


def _share(picture: Picture, phase: str) -> float:
    drawn = sum(end - start for row in picture.rows for name, start, end in row.segments if name == phase)
    return drawn / max(1, picture.end_ns - picture.start_ns)


def _phase_order(phase: str) -> tuple[int, str]:
    known = list(PHASES)
    return (known.index(phase) if phase in PHASES else len(known), phase)


def _seconds(picture: Picture, ts_ns: int) -> float:
    return (ts_ns - picture.start_ns) / 1e9
