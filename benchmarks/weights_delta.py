"""How much of the weights one optimizer step changes, and what a delta of it takes: bytes, seconds to make and to apply.

    python -m benchmarks.weights_delta                            # a synthetic tensor of 100 million bf16 weights
    python -m benchmarks.weights_delta --model FOLDER --json      # a HF model, with policy gradients of its own samples
    python -m benchmarks.weights_delta --through /lustre/me       # whole versions and deltas through a folder, by the product

Weights have float32 masters and are published in bfloat16, as the trainer does; AdamW steps at a constant rate. The synthetic
tensor has normal weights and normal gradients, which is pure noise: successive steps cancel, and few weights move. The model
samples the next token at every place of random texts, each with an advantage of 1 or -1: gradients that are small and alike from
step to step. One line for each step: share of changed elements, size beside the full version, times on `--threads` threads.
Digests of base and new version are taken as known when a delta is made (publishing makes them anyway), the digest of the base
when it is applied in place; the result is always verified. `copy_s` copies the full version in memory.

With `--through`, the trainer's publisher and a node's staging carry every step through a folder, with weights.delta=off (`full_...`) and
sparse (`delta_...`) in turn: `publish_s` from the beginning of a publication to its commit, `prepare_s` to have it verified in the node's
memory, `snapshot_s` how long training is blocked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.weights_delta_exchange import WAYS, through
from stages.weights.delta import Bytes, encode, overwrite
from stages.weights.manifest import xxh3_128
from stages.weights.tensors import bytes_of

STANDARD_DEVIATION = 0.02
BATCH, LENGTH = 4, 96


def main() -> int:
    options = parse()
    torch.manual_seed(0)
    if options.model is None:
        masters, gradients = synthetic(int(options.elements))
    else:
        masters, gradients = of_model(options.model)
    if options.through is not None:
        for line in through(options.through, versions(masters, gradients, options), options.threads):
            print(json.dumps(line) if options.json else describe_exchange(line), flush=True)
        return 0
    for line in measure(masters, gradients, options):
        print(json.dumps(line) if options.json else describe(line), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weights_delta",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="HF folder; default: a synthetic tensor")
    parser.add_argument("--elements", type=float, default=1e8, help="of the synthetic tensor (default %(default)g)")
    parser.add_argument("--learning-rate", type=float, default=1e-6, help="(default %(default)g)")
    parser.add_argument("--steps", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--through", type=Path, metavar="FOLDER", help="publish and stage, through this folder")
    parser.add_argument("--json", action="store_true", help="one object for each step")
    return parser.parse_args()


Tensors = list[torch.Tensor]


def synthetic(elements: int) -> tuple[Tensors, Callable[[], None]]:
    """float32 masters, and a function that gives them their next gradients."""
    masters = [torch.randn(elements).mul_(STANDARD_DEVIATION).requires_grad_()]
    masters[0].grad = torch.empty(elements)

    def gradients() -> None:
        assert masters[0].grad is not None
        masters[0].grad.normal_()

    return masters, gradients


def of_model(folder: Path) -> tuple[Tensors, Callable[[], None]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    masters: Tensors = list(model.parameters())

    def gradients() -> None:
        tokens = torch.randint(model.config.vocab_size, (BATCH, LENGTH))
        scores = model(tokens).logits.flatten(0, 1).log_softmax(-1)
        samples = torch.distributions.Categorical(logits=scores.detach()).sample()
        advantages = torch.ones(BATCH, LENGTH).mul_(torch.tensor([1.0, -1.0] * (BATCH // 2))[:, None]).flatten()
        model.zero_grad()
        (-(advantages * scores.gather(1, samples[:, None])[:, 0]).mean()).backward()

    return masters, gradients


def measure(masters: Tensors, gradients: Callable[[], None], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    optimizer = torch.optim.AdamW(masters, lr=options.learning_rate, weight_decay=0.0)
    before = published(masters)
    with ThreadPoolExecutor(options.threads) as pool:
        for step in range(options.steps):
            gradients()
            optimizer.step()
            after = published(masters)
            yield {"step": step, **compared(before, after, pool)}
            before = after


def versions(
    masters: Tensors, gradients: Callable[[], None], options: argparse.Namespace
) -> Iterator[list[torch.Tensor]]:
    """bfloat16, of the start and after each step."""
    optimizer = torch.optim.AdamW(masters, lr=options.learning_rate, weight_decay=0.0)
    yield [master.detach().bfloat16() for master in masters]
    for _ in range(options.steps):
        gradients()
        optimizer.step()
        yield [master.detach().bfloat16() for master in masters]


def published(masters: Tensors) -> list[Bytes]:
    return [bytes_of(master.detach().bfloat16().contiguous()) for master in masters]


def compared(before: list[Bytes], after: list[Bytes], pool: ThreadPoolExecutor) -> dict[str, Any]:
    """Threads share the blocks of each tensor."""
    digests = [[xxh3_128(data) for data in version] for version in (before, after)]
    started_s = time.perf_counter()
    encoded = [
        encode(old, new, 2, digests=known, pool=pool)
        for old, new, known in zip(before, after, zip(*digests, strict=True), strict=True)
    ]
    encoded_s = time.perf_counter()
    for (delta, payload), held in zip(encoded, before, strict=True):
        overwrite(delta, payload, held, held=delta.base, pool=pool)
    applied_s = time.perf_counter()
    for old, new in zip(before, after, strict=True):
        old[:] = new
    copied_s = time.perf_counter()
    full_bytes, delta_bytes = sum(map(len, after)), sum(delta.bytes for delta, _ in encoded)
    changed = sum(delta.changed for delta, _ in encoded)
    return {
        "changed_share": changed / (full_bytes // 2),
        "full_bytes": full_bytes,
        "delta_bytes": delta_bytes,
        "ratio": full_bytes / delta_bytes,
        "bits_per_change": 8 * delta_bytes / max(1, changed),
        "encode_s": encoded_s - started_s,
        "apply_s": applied_s - encoded_s,
        "copy_s": copied_s - applied_s,
    }


def describe(line: dict[str, Any]) -> str:
    return (
        f"step {line['step']}: {line['changed_share']:.2%} of the weights changed; {line['delta_bytes']:,} bytes instead of "
        f"{line['full_bytes']:,}, {line['ratio']:.1f} times fewer, {line['bits_per_change']:.1f} bits a change; encode "
        f"{line['encode_s']:.3f} s, apply {line['apply_s']:.3f} s, plain copy {line['copy_s']:.3f} s"
    )


def describe_exchange(line: dict[str, Any]) -> str:
    words = (
        f"{way}: {line[f'{way}_bytes']:,} bytes, publish {line[f'{way}_publish_s']:.3f} s ({line[f'{way}_snapshot_s']:.3f} s "
        f"blocked), prepare {line[f'{way}_prepare_s']:.3f} s"
        for way in WAYS
    )
    return "; ".join(words)


if __name__ == "__main__":
    sys.exit(main())
