"""From a configuration of the published system to a Libra experiment: `python -m conf.import_reference FILE.yaml`.

`read` follows the inclusion rules of the published loader, `published` knows its options and defaults, `mapping` says what
becomes of each, `convert` applies that to one file, `groups` finds the shipped group files that say the same, `write` makes
the YAML text and file, `check` composes and plans the result, `report` accounts for every key of the input.
"""
