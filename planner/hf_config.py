"""Values of a HF config.json, which anybody may have edited: each has the type that it must have, or is said to be wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.options import LARGEST_INT


@dataclass(frozen=True)
class HfConfig:
    """`error` is what each question raises, with `where`, the key, what was found and what is wanted. null is no value."""

    values: Mapping[str, Any]
    error: type[ValueError] = ValueError
    where: str = "config.json"

    def architecture(self) -> str:
        """The only name in `architectures`, "(none)" when there is none."""
        names = self.values.get("architectures")
        if names is None or names == []:
            return "(none)"
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.wrong("architectures", "a list of one name")
        return names[0]

    def size(self, key: str, default: int | None = None) -> int:
        """A count; without `default` it has to be there."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_INT:
            raise self.wrong(key, "a whole number of at least 1")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, "a number above 0")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(key, "a number above 0") from None

    def switch(self, key: str) -> bool:
        """False when it is not there."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def part(self, key: str) -> HfConfig:
        """An object inside the object, empty when it is not there."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return HfConfig(value or {}, self.error, f"{self.where} {key}")

    def head_dim(self, usual: int | None) -> int:
        """Width of one head; `usual` is what the architecture has when config.json says nothing, None a part of hidden_size."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if self.values.get("head_dim") is None and usual is None and hidden % heads:
            raise self.error(
                f"{self.where} says hidden_size {hidden}, no multiple of num_attention_heads {heads}, and no head_dim"
            )
        return self.size("head_dim", usual or max(1, hidden // heads))

    def wrong(self, key: str, wanted: str) -> ValueError:
        return self.error(f"{self.where} says {key} {self.values.get(key)!r}; wanted {wanted}")
