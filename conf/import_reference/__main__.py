"""`python -m conf.import_reference FILE.yaml`: a configuration of the published system becomes a Libra experiment.

The YAML goes to stdout, or to a file with --out; the account of every key goes to stderr. Exit codes: 0 done, 1 the input
has keys that the published system does not know (nothing is written; --lenient leaves them out), 2 a file cannot be read
or written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conf.import_reference.check import problems_of
from conf.import_reference.convert import convert
from conf.import_reference.errors import ImportReferenceError
from conf.import_reference.groups import choose
from conf.import_reference.read import read
from conf.import_reference.report import refusal, report
from conf.import_reference.write import experiment_name, experiment_text, target, write


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _import(options)
    except ImportReferenceError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conf.import_reference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=_path, metavar="FILE", help="a .yaml, .yml or .json file of the published system")
    parser.add_argument("--name", help="name of the experiment (default: made of the file's name)")
    parser.add_argument(
        "--out", type=_path, metavar="DIR_OR_FILE", help="write DIR/experiment/NAME.yaml, or this .yaml file"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    parser.add_argument("--lenient", action="store_true", help="leave out keys that nobody knows, in place of stopping")
    return parser


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)


def _import(options: argparse.Namespace) -> int:
    source = read(options.file)
    if options.out is None:
        file, name = None, experiment_name(options.name, options.file)
    else:
        file, name = target(options.out, options.name, options.file)
    imported = choose(convert(source.settings))
    if imported.unknown and not options.lenient:
        print(refusal(source, imported), file=sys.stderr)
        return 1
    text = experiment_text(imported, name)
    account = report(source, imported, problems_of(text, name))
    if file is None:
        print(text, end="")
    else:
        write(file, text, replace=options.force)
        account += f"\n\nwritten: {file}\n{_how_to_use(file, name)}"
    print(account, file=sys.stderr)
    return 0


def _how_to_use(file: Path, name: str) -> str:
    if file.parent.name != "experiment":
        return f"to use it, move it to DIR/experiment/{name}.yaml: python -m launch --config-dir DIR +experiment={name}"
    return f"to see the plan: python -m launch --config-dir {file.parent.parent} +experiment={name} launch.dry_run=true"


if __name__ == "__main__":
    sys.exit(main())
