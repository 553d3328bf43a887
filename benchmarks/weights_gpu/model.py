"""The trainer's side: random parameters on the device, steps that change all of them, and what they say about a probe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.weights_model import (
    QWEN_7B,
    STANDARD_DEVIATION,
    TINY,
    Shape,
    random_tensors,
    shape_of_bytes,
    write_config,
)
from stages.weights.manifest import Probe
from stages.weights.tensors import SAFETENSORS_NAMES, TORCH_DTYPES, LocalTensor

SHAPES = {"7b": QWEN_7B, "1gb": shape_of_bytes(1e9, 2), "tiny": replace(TINY, family="qwen2")}
STEP_SHARE = 0.3
"""Of every parameter, replaced by new noise in one step: old weights are then far from the new ones on every probe."""
_SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")


class Parameters:
    """A causal language model whose parameters are the tensors that are published: nothing is copied for the probe."""

    def __init__(self, shape: Shape, dtype: str, device: torch.device, probe_tokens: int) -> None:
        self.shape = shape
        self._device = device
        self._generator = torch.Generator(device).manual_seed(1)
        self._tensors = random_tensors(shape, TORCH_DTYPES[SAFETENSORS_NAMES[dtype]], str(device), seed=0)
        self._model = self._assembled(dtype)
        draws = np.random.default_rng(0).integers(0, shape.vocab_size, size=probe_tokens)
        self._probe_ids = tuple(int(token) for token in draws)

    def _assembled(self, dtype: str) -> torch.nn.Module:
        config = AutoConfig.for_model(**self.shape.config(dtype))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(self._tensors, assign=True)
        # Its frequencies are no part of the state, so they are still on no device.
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(self._device)
        return model.eval()  # type: ignore[no-any-return]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def tensors(self) -> list[LocalTensor]:
        """Largest first, as a trainer gives them (`stages.trainer.hf_weights.export_shards`)."""
        largest_first = sorted(self._tensors.items(), key=lambda item: -item[1].numel())
        return [LocalTensor.whole(name, tensor) for name, tensor in largest_first]

    @torch.no_grad()
    def step(self) -> None:
        """Change every parameter; returns when the device has done it."""
        for name, tensor in self._tensors.items():
            noise = torch.empty_like(tensor).normal_(0.0, STANDARD_DEVIATION, generator=self._generator)
            tensor.lerp_(noise + 1.0 if name.endswith("norm.weight") else noise, STEP_SHARE)
        self.synchronize()

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.no_grad()
    def probe(self) -> Probe:
        """Log-probs (nats) of the fixed tokens under the present parameters."""
        ids = torch.tensor([self._probe_ids], device=self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        scores = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        return Probe(self._probe_ids, tuple(scores.tolist()))


def write_source(folder: Path, shape: Shape, dtype: str) -> Path:
    """A HF folder without weights: config.json, and a tokenizer with a word for every token."""
    write_config(folder, shape, dtype)
    words = [*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), shape.vocab_size))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    tokenizer.save_pretrained(folder)
    return folder
