"""What a command line asks for: a run, a sweep, help, the configuration as text, or an answer of Hydra's own."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from launch.errors import ConfigError, LibraError
from launch.hydra_internals import FAILURES, arguments_parser, hydra_main
from launch.tree import HOUSE, Tree, tree_at

NOTHING_ASKED = "nothing to run: name an experiment (+experiment=demo), or a model (model_path=FOLDER)"
SHELLS = ("install=", "uninstall=", "query=")
"""How the word behind --shell-completion begins; `query` is what the shell asks."""
INTERRUPTED = 130
BROKEN_PIPE = 141
"""The shell's exit codes for SIGINT and SIGPIPE."""


def run(words: Sequence[str]) -> int:
    """The exit code. What is wrong is said on stderr, without a stack trace."""
    _let_any_text_out()
    try:
        code = _answer(words)
        print(end="", flush=True)
        return code
    except LibraError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `... | head`
        _close_output()
        return BROKEN_PIPE
    except OSError as error:  # a full disk, say, for a run directory or for what is printed
        print(f"the system refused: {error}", file=sys.stderr)
        _close_output()
        return 1


def _let_any_text_out() -> None:
    """Names of files need not be UTF-8, and a terminal need not be able to show all of it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _close_output() -> None:
    """Otherwise the interpreter complains once more when it flushes stdout at its end."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(words: Sequence[str]) -> int:
    if not words:
        from launch.help import help_text

        print(f"{help_text(HOUSE)}\n{NOTHING_ASKED}", file=sys.stderr)
        return 2
    asked = parse(words)
    if not asked.help:
        _check_working_folder()
    tree = tree_at(asked.config_path, asked.config_name, asked.config_dir)
    if asked.help:
        from launch.help import help_text

        print(help_text(tree))
        return 0
    if asked.shell_completion:
        return _complete(asked.overrides)
    if asked.hydra_help or asked.info or asked.cfg in ("hydra", "all"):
        return _ask_hydra(words, asked, tree)
    return _launch(asked, tree)


def _ask_hydra(words: Sequence[str], asked: argparse.Namespace, tree: Tree) -> int:
    """After a look of our own: Hydra stops at the first thing that is wrong, and takes less than we do. Raises ConfigError."""
    from launch.compose import compose_with_sources

    compose_with_sources(asked.overrides, tree)
    return _hydra_answer(_for_hydra(words, asked, tree))


def _hydra_answer(words: Sequence[str]) -> int:
    try:
        return hydra_main(words)
    except FAILURES as error:
        raise ConfigError([f"Hydra: {' '.join(str(error).split())}"]) from error


def _check_working_folder() -> None:
    """Relative paths mean nothing without one, and Hydra asks for it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(["the folder in which this command was started is gone; cd to one that exists"]) from None


def _complete(overrides: list[str]) -> int:
    """The shell text to install completion, or the words that may follow: the line is in the environment, as Hydra has it."""
    from launch.completion import folder_flags, script

    if len(overrides) != 1 or not overrides[0].startswith(SHELLS):
        raise ConfigError(["--shell-completion stands alone with one word: install=bash, or uninstall=bash"])
    if overrides in (["install=bash"], ["uninstall=bash"]):
        print(script(overrides[0].removesuffix("=bash")), end="")
        return 0
    if "COMP_LINE" not in os.environ and overrides[0].startswith("query="):
        raise ConfigError([f"--shell-completion {overrides[0]} is what a shell asks, with its line in COMP_LINE"])
    asked = parse(folder_flags())
    tree = tree_at(asked.config_path, asked.config_name, asked.config_dir)
    return _hydra_answer([*_folders(tree), "-sc", *overrides])


def _launch(asked: argparse.Namespace, tree: Tree) -> int:
    from launch import pipeline

    if asked.cfg:
        pipeline.show(asked.overrides, tree, _section(asked.package))
        return 0
    if asked.multirun:
        from launch.sweeps import launch_sweep

        return launch_sweep(asked.overrides, tree)
    pipeline.launch(asked.overrides, tree)
    return 0


def _section(package: str | None) -> str:
    """The option or group that --package names, "" for all (Hydra calls that _global_). Raises ConfigError for any other name."""
    from conf.typed import options, sections
    from launch.suggest import unknown_option

    name = package or ""
    if name in ("", "_global_"):
        return ""
    if name not in options() and name not in sections():
        raise ConfigError([f"--package: {unknown_option(name, '', {})}"])
    return name


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags, in any order among the overrides. Exits as argparse does on unknown ones and for --version."""
    parser = arguments_parser()
    parser.prog = "python -m launch"
    asked = parser.parse_intermixed_args(words)
    if asked.experimental_rerun:
        raise ConfigError(["--experimental-rerun reads a pickle; use --config-path RUN (its config.yaml) instead"])
    actions = ("run", "multirun", "cfg", "info", "shell_completion")
    given = [f"--{name.replace('_', '-')}" for name in actions if getattr(asked, name)]
    if len(given) > 1:
        raise ConfigError([f"{' and '.join(given)} cannot be had together; choose one"])
    if (asked.package is not None or asked.resolve) and not asked.cfg:
        raise ConfigError([f"{'--resolve' if asked.resolve else '--package'} only goes with --cfg job"])
    return asked


def _for_hydra(words: Sequence[str], asked: argparse.Namespace, tree: Tree) -> list[str]:
    """The same words in an order that Hydra's own parser takes, with the folders as it wants them."""
    return [*asked.overrides, *(word for word in words if word not in asked.overrides), *_folders(tree)]


def _folders(tree: Tree) -> list[str]:
    """Hydra would take a relative --config-path from the folder of its caller, and the last of two flags counts."""
    extra = ["--config-dir", tree.extra] if tree.extra else []
    return ["--config-path", tree.root, "--config-name", tree.name, *extra]
