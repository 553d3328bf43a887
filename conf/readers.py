"""Which source files read which option, found in the code itself.

The types of names are followed from where code says them: parameters, fields and results annotated with a config class, and
attributes called `config` (of a context, of a prepared run), which are a LibraConfig everywhere in Libra unless the class says
otherwise. From there through assignments, `replace(config, ...)` and attribute chains. A leaf option that ends such a chain is
read; handing a section on is not. A name whose type is not known reads nothing, so the answer errs towards too few files.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from pathlib import Path

from conf.options import declared
from conf.reads import LOOKS_AT_ALL
from conf.schema import LibraConfig

PROJECT = Path(__file__).resolve().parents[1]
FOLDERS = ("conf", "launch", "planner", "stages", "traces")
CONFIG_ATTRIBUTES = ("config", "_config")
JUDGES = (*LOOKS_AT_ALL, "planner.conflicts", "launch.checks")
"""Modules that judge the values and do nothing with them."""
SAME_TYPE = ("replace", "track")
"""Functions whose result is what their first argument is."""

Types = dict[str, str | None]
"""Name -> config class; None is a name that is known to be something else."""


@cache
def readers() -> dict[str, tuple[str, ...]]:
    """Every option with the files that read it, relative to the project, sorted; takes about a second, once."""
    trees = {path.relative_to(PROJECT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in _sources()}
    results: Types = {}
    for tree in trees.values():
        results |= _results(tree)
    found: dict[str, set[str]] = {name: set() for names in _leaves().values() for name in names}
    for file, tree in trees.items():
        for option in _Reader(results).read(tree) if _uses_options(file) else ():
            found[option].add(file)
    return {name: tuple(sorted(files)) for name, files in found.items()}


def options_read(source: str) -> set[str]:
    """The options that a file of this text reads."""
    tree = ast.parse(source)
    return _Reader(_results(tree)).read(tree)


def _sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((PROJECT / folder).rglob("*.py"))


def _uses_options(file: str) -> bool:
    module = file.removesuffix(".py").replace("/", ".")
    return not any(module == name or module.startswith(f"{name}.") for name in JUDGES)


@cache
def _sections() -> dict[tuple[str, str], str]:
    """(config class, field of it that is a section) -> the section's class."""
    found: dict[tuple[str, str], str] = {}
    waiting: list[type] = [LibraConfig]
    while waiting:
        owner = waiting.pop()
        for name, kind in typing.get_type_hints(owner).items():
            if is_dataclass(kind):
                assert isinstance(kind, type)
                found[owner.__name__, name] = kind.__name__
                waiting.append(kind)
    return found


@cache
def _leaves() -> dict[tuple[str, str], tuple[str, ...]]:
    """(config class, field) -> dotted names: one, or those of all sections of that class (slurm.trainer, slurm.rollout)."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for name in declared(LibraConfig):
        *parents, leaf = name.split(".")
        owner = "LibraConfig"
        for parent in parents:
            owner = _sections()[owner, parent]
        found[owner, leaf] = (*found.get((owner, leaf), ()), name)
    return found


def _annotated(annotation: ast.expr | None) -> str | None:
    """The config class that an annotation names, also as `X | None` or as a string."""
    classes = {"LibraConfig", *_sections().values()}
    for node in [annotation.left, annotation.right] if isinstance(annotation, ast.BinOp) else [annotation]:
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "value", None)
        if isinstance(name, str) and name in classes:
            return name
    return None


def _results(tree: ast.Module) -> Types:
    """Functions that say that they return a config class."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {node.name: kind for node in functions if (kind := _annotated(node.returns))}


@dataclass
class _Reader(ast.NodeVisitor):
    """Goes through one file in the order of its text; `names` and `attributes` are those of where it is."""

    results: Types
    names: Types = field(default_factory=dict)
    attributes: Types = field(default_factory=dict)
    found: set[str] = field(default_factory=set)

    def read(self, tree: ast.Module) -> set[str]:
        self.visit(tree)
        return self.found

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self.attributes
        self.attributes = {
            item.target.id: _annotated(item.annotation)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        self.generic_visit(node)
        self.attributes = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self.names
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.names = {**outer, **{one.arg: _annotated(one.annotation) for one in parameters}}
        self.generic_visit(node)
        self.names = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.names[node.target.id] = _annotated(node.annotation)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        options = _leaves().get((self._kind(node.value) or "", node.attr), ())
        if isinstance(node.ctx, ast.Load):
            self.found.update(options)
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = self._kind(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for inner_target, inner_value in zip(target.elts, value.elts, strict=False):
                self._bind(inner_target, inner_value)

    def _kind(self, node: ast.expr) -> str | None:
        """The config class of an expression, as far as it can be told."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            return self._kind(node.args[0]) if name in SAME_TYPE and node.args else self.results.get(name)
        return None

    def _attribute(self, node: ast.Attribute) -> str | None:
        owner = self._kind(node.value)
        if owner is not None:
            return _sections().get((owner, node.attr))
        if getattr(node.value, "id", "") == "self" and node.attr in self.attributes:
            return self.attributes[node.attr]
        return "LibraConfig" if node.attr in CONFIG_ATTRIBUTES else None
