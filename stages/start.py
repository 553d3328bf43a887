"""`python -m stages.start FOLDER`: submitit's own `submitit.core._submit FOLDER`, started in half the time.

What every task of a step runs. submitit imports numpy first where it is installed, which takes as much processor time as all else
before the stage's first line (0.08 of 0.19 s); a stage that wants numpy imports it itself, and no pickle of ours contains any.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


def submitit_main() -> Callable[[], None]:
    """submitit's main function, which takes FOLDER from sys.argv. Without numpy, unless something has imported it already."""
    hidden = "numpy" not in sys.modules
    if hidden:
        # The import system takes None for "there is no such module", and so does submitit.
        sys.modules["numpy"] = None  # type: ignore[assignment]
    try:
        from submitit.core import submission
    finally:
        if hidden:
            del sys.modules["numpy"]
    main: Callable[[], None] = submission.submitit_main
    return main


if __name__ == "__main__":
    submitit_main()()
