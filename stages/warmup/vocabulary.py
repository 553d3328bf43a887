"""A tokenizer made by code: one token for each character of an alphabet and for each of some longer phrases."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from stages.warmup.errors import WarmupError

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL_TOKENS = [PAD, BOS, EOS, UNKNOWN]
PAD_ID, BOS_ID, EOS_ID, UNKNOWN_ID = range(4)
PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n"


def build_tokenizer(alphabet: str, phrases: list[str]) -> Tokenizer:
    """Ids: pad 0, bos 1, eos 2, unknown 3, then phrases, then characters, in the order given.

    Text is encoded as bos + tokens, without eos; decoding gives back the text exactly. An empty `alphabet` stands for
    printable ASCII and newline. Raises WarmupError for a token that is there twice.
    """
    tokens = [*SPECIAL_TOKENS, *phrases, *(alphabet or PRINTABLE)]
    doubled = sorted(
        {token for token in tokens if tokens.count(token) > 1} | {phrase for phrase in phrases if not phrase}
    )
    if doubled:
        raise WarmupError(f"warmup.alphabet and warmup.phrases give {doubled} more than once, or empty")
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    longest_first = sorted(phrases, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write what transformers (4 and 5) and vLLM read: tokenizer.json, tokenizer_config.json, special_tokens_map.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,  # it would eat spaces before punctuation
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=1) + "\n", encoding="utf-8")


def encode_strictly(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Ids of `text`, with bos if `special`. Raises WarmupError naming characters that have no token."""
    encoding = tokenizer.encode(text, add_special_tokens=special)
    if UNKNOWN_ID in encoding.ids:
        places = zip(encoding.ids, encoding.offsets, strict=True)
        missing = sorted({text[start:end] for id, (start, end) in places if id == UNKNOWN_ID})
        raise WarmupError(f"no token for {''.join(missing)!r} in {text!r}; add it to warmup.alphabet")
    ids: list[int] = encoding.ids
    return ids
