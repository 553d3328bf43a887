"""Messages for names that do not exist, with the name that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence

from conf.typed import options, sections

Groups = Mapping[str, Sequence[str]]
CLOSE = 0.6
"""difflib's ratio from which two names count as alike."""
FEW = 15
"""Options of a section that fit into a message."""
_NOT_FOUND = re.compile(r"(?:In '([^']*)': )?Could not find '([\w/.-]+)/([^'/]+)'")
_NOT_LISTED = re.compile(r"(?:In '([^']*)': )?Could not override '([\w./@-]+)'")
_TWICE = re.compile(r"Multiple values for ([\w./@-]+)\.|([\w./@-]+) appears more than once in the final defaults list")


def unknown_option(name: str, given: str, groups: Groups) -> str:
    """`given` is the text of the override or the file that sets it; empty when that says nothing more."""
    where = f" ({given})" if given and given != name else ""
    return f"unknown option '{name}'{where}{_meant(name, groups)}"


def unknown_choice(group: str, choice: str, groups: Groups, where: str = "") -> str:
    available = groups.get(group, [])
    close = difflib.get_close_matches(choice, available, n=1, cutoff=CLOSE)
    meant = f"; did you mean '{close[0]}'?" if close else ""
    own = ""
    leaf = group.rpartition("/")[2]
    if not available and choice in groups.get(leaf, []):
        own = f"; a group from the top of the tree has a slash in front: /{leaf}: {choice}"
    elif "/" in choice:
        own = f"; for a file of your own: --config-dir FOLDER {group}=NAME with FOLDER/{group}/NAME.yaml"
    return f"{where}there is no {group} '{choice}'; available: {', '.join(available) or 'none'}{meant}{own}"


def not_an_assignment(word: str, groups: Groups) -> str:
    """For a word without "="."""
    name = word.lstrip("+~")
    text = f"'{word}' is not of the form option=value"
    for group, choices in groups.items():
        if name in choices:
            return f"{text}; did you mean '{group}={name}'?"
    if name.endswith((".yaml", ".yml")):
        return f"{text}; for a file of your own: --config-dir FOLDER experiment=NAME with FOLDER/experiment/NAME.yaml"
    if name in options() or name in sections() or "=" in word:
        return text
    return f"{text}{_meant(name, groups)}"


def unlike_hydra(error: Exception, groups: Groups, naming: Callable[[str], str] = lambda choice: "") -> str:
    """One sentence for what Hydra, OmegaConf or PyYAML says about the files. `naming` finds the file that names a choice."""
    if isinstance(error, RecursionError):
        return "the defaults lists include one another without end; look for a file that includes itself"
    text = " ".join(str(error).split())
    if found := _NOT_FOUND.search(text):
        file = naming(found[3])
        return unknown_choice(found[2], found[3], groups, f"{file}: " if file else "")
    if found := _NOT_LISTED.search(text):
        return _not_listed(found[1] or "", found[2])
    if found := _TWICE.search(text):
        group = found[1] or found[2]
        return f"the group '{group}' is chosen in two places; say 'override /{group}: CHOICE' in one of the files"
    return text


def _not_listed(file: str, group: str) -> str:
    """A defaults list of `file` ("experiment/mine") overrides `group` ("model", or "model@experiment.model" inside a package)."""
    name, _, package = group.partition("@")
    if package and package.startswith(f"{file.partition('/')[0]}."):
        return f"{file}.yaml lacks the line '# @package _global_' at its top: without it, '{name}' is looked for as '{package}'"
    return (
        f"{file or 'the command line'} overrides the group '{group}', which no defaults list of the configuration"
        f" names; leave out the word override there, or put '- {group}: CHOICE' into the root file"
    )


def _meant(name: str, groups: Groups) -> str:
    """The same last part elsewhere first, then the nearest name in the same section, then the nearest anywhere."""
    *parents, leaf = name.split(".")
    section = ".".join(parents)
    same = [option for option in options() if option.rsplit(".", 1)[-1] == leaf and option != name]
    if same:
        return f"; did you mean {' or '.join(repr(option) for option in same)}?"
    if section in sections():
        leaves = [option.rsplit(".", 1)[-1] for option in options() if option.rpartition(".")[0] == section]
        close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=CLOSE)
        if close:
            return f"; did you mean '{section}.{close[0]}'?"
        if len(leaves) <= FEW:
            return f"; {section} has {', '.join(leaves)}"
        return f"; launch.explain={section} lists its options"
    known = [*options(), *sections(), *groups]
    close = difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
    if close:
        return f"; did you mean '{close[0]}'?"
    by_leaf = {option.rsplit(".", 1)[-1]: option for option in known}
    close = difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=CLOSE)
    return f"; did you mean '{by_leaf[close[0]]}'?" if close else ""
