"""Shares of the hardware's rates that real work reaches, each with its source. Costs are physical times divided by these."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Shares are in (0, 1]; the times are what no rate explains, the two rates are of parts that hardware.* leaves out.

    Sources: "measured" is a table of docs/benchmarks.md, on H200; "assumed" is nobody's measurement yet.
    """

    train_flops: float
    """Share of hardware.gpu_flops in training. Measured, the rows without tensor parallelism: 40 % of the 790 TFLOP/s that a
    matrix product reaches, which is 35 % of the data sheet's 989 once attention is counted."""

    tensor_parallel_link: float
    """Share of hardware.link_bytes_per_s in the all-reduces of tensor parallelism, with whatever else it slows down.
    Measured, TP 2 rows: 0.11 to 0.18 for the 1.5B shape, 0.2 for layers of the 7B shape, which is wide enough to keep a GPU
    busy. An all-reduce of 25 MB alone reaches 0.5."""

    data_parallel_link: float
    """The same for gradients and parameters of data parallelism. Measured: the DP 2 rows."""

    network: float
    """Share of hardware.network_bytes_per_s between nodes. Assumed."""

    memory: float
    """Share of hardware.gpu_memory_bytes_per_s in the optimizer step. Assumed: plain streams reach about this."""

    prefill_flops: float
    """Share of hardware.gpu_flops that vLLM reaches on prompts. Assumed."""

    decode_memory: float
    """Share of hardware.gpu_memory_bytes_per_s that vLLM reaches while decoding. Assumed."""

    all_reduce_s: float
    """Latency of one all-reduce between the GPUs of a vLLM instance. Assumed."""

    eager_layer_s: float
    """Time that starting one layer's kernels takes in a decode step without CUDA graphs. Assumed."""

    host_link_bytes_per_s: float
    """Between one GPU and pinned host memory, one direction. Measured on one H200 host: 55 GB/s."""

    host_adam_bytes_per_s: float
    """Host memory that one rank's Adam reads and writes. Assumed: a node's memory bandwidth, shared by its ranks."""


EXPECTED = Efficiency(
    train_flops=0.35,
    tensor_parallel_link=0.2,
    data_parallel_link=0.4,
    network=0.6,
    memory=0.8,
    prefill_flops=0.5,
    decode_memory=0.6,
    all_reduce_s=10e-6,
    eager_layer_s=0.6e-3,
    host_link_bytes_per_s=55e9,
    host_adam_bytes_per_s=20e9,
)

IDEAL = Efficiency(
    train_flops=1.0,
    tensor_parallel_link=1.0,
    data_parallel_link=1.0,
    network=1.0,
    memory=1.0,
    prefill_flops=1.0,
    decode_memory=1.0,
    all_reduce_s=0.0,
    eager_layer_s=0.0,
    host_link_bytes_per_s=math.inf,
    host_adam_bytes_per_s=math.inf,
)
"""The hardware's own rates: times that cannot be beaten."""
