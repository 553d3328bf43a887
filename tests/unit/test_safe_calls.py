"""Calls that would let others run code, or reach what they should not, are nowhere in the product."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("conf", "launch", "planner", "stages", "traces")
FORBIDDEN = {
    # torch sends these as pickles; stages.exchange has what takes their place
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    # they run what they read
    "eval",
    "exec",
    "os.popen",
    "os.system",
    "pickle.load",
    "pickle.loads",
    "cloudpickle.load",
    "cloudpickle.loads",
    "yaml.unsafe_load",
    "marshal.loads",
    "shelve.open",
    # a name that somebody else can take before it is used
    "tempfile.mktemp",
}
PICKLES_OF_THE_RUN = {"launch/steps.py"}
"""Reads submitit's result pickles, from the run directory (mode 0700) only."""

SAFE_LOADERS = ("yaml.SafeLoader", "_StrictLoader")
"""The second is a SafeLoader that refuses a key given twice (conf/import_reference/read.py)."""


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Dotted name of what is called, with the call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def unsafe(text: str) -> list[str]:
    found = []
    for name, call in calls(ast.parse(text)):
        keywords = {word.arg: ast.unparse(word.value) for word in call.keywords}
        last = name.rpartition(".")[2]
        if name in FORBIDDEN or last in FORBIDDEN - {"eval", "exec"} or (last == "pickle_load"):
            found.append(name)
        if name == "torch.load" and keywords.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if name == "yaml.load" and keywords.get("Loader") not in SAFE_LOADERS:
            found.append("yaml.load with a loader that makes objects")
        if keywords.get("shell") == "True":
            found.append(f"{name} with shell=True")
        if last in ("bind", "create_server") and _host(call) in ("", "0.0.0.0", "::"):
            found.append(f"{name} on all addresses")
    return found


def _host(call: ast.Call) -> str | None:
    """The host of an (host, port) pair that is written down, None when it is computed."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Tuple) and isinstance(first.elts[0], ast.Constant):
        return str(first.elts[0].value)
    return None


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_file_makes_an_unsafe_call(path: Path) -> None:
    expected = ["pickle_load"] if str(path.relative_to(ROOT)) in PICKLES_OF_THE_RUN else []

    assert unsafe(path.read_text()) == expected


@pytest.mark.parametrize(
    "text",
    [
        "dist.all_gather_object(a, b)",
        "eval(text)",
        "pickle.loads(data)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run(command, shell=True)",
        "socket.create_server(('', 0))",
        "server.bind(('0.0.0.0', port))",
        "tempfile.mktemp()",
        "yaml.load(text)",
    ],
)
def test_unsafe_calls_are_found(text: str) -> None:
    assert len(unsafe(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "socket.create_server((host, 0))",
        "socket.bind(('127.0.0.1', 0))",
    ],
)
def test_safe_calls_are_left_alone(text: str) -> None:
    assert unsafe(text) == []
