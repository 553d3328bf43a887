"""Where every second of a run went: span recorder, clock alignment, Chrome export, summary.

Imports only the standard library, so a stage can record from its first line. `Recorder` writes while the
run is alive; everything else (`reader`, `chrome`, `summary`, `picture`) reads afterwards.
"""

from traces.recorder import Recorder, Span

__all__ = ["Recorder", "Span"]
