"""HF safetensors into a Megatron model and back out, each rank only its own slices, none of it through one rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from stages.trainer.architecture import Architecture, ModelError, ModelFolderError
from stages.trainer.mapping import Piece, hf_tensors, pieces
from stages.trainer.parallel import RankGrid, TrainerRanks
from stages.weights.ranks import agree
from stages.weights.tensors import LocalTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class WeightsMismatchError(ModelError):
    """The tensors of a model folder are not those of its config.json."""


def load_weights(model: torch.nn.Module, folder: Path, architecture: Architecture, grid: RankGrid) -> None:
    """Fill the parameters of this rank from `folder`, reading only the slices that it holds; converts to their dtype.

    Rows that pad the vocabulary become 0. Raises ModelFolderError, and WeightsMismatchError when a tensor is missing, of
    another shape, or more than the architecture has.
    """
    locations = tensor_files(folder)
    _check_names(locations, architecture, folder)
    parameters = dict(model.named_parameters())
    with torch.no_grad(), ExitStack() as stack:
        files = {path: stack.enter_context(_open(path)) for path in sorted(set(locations.values()))}
        for parameter in parameters.values():
            parameter.zero_()
        for piece in pieces(architecture, grid.tp_rank, grid.tp):
            stored = files[locations[piece.hf_name]].get_slice(piece.hf_name)
            if tuple(stored.get_shape()) != piece.full_shape:
                found, wanted = list(stored.get_shape()), list(piece.full_shape)
                raise WeightsMismatchError(f"{folder}: {piece.hf_name} has shape {found}, config.json says {wanted}")
            rows = _rows(parameters[piece.parameter], piece)
            rows.copy_(_read(stored, piece).view(rows.shape))


def export_shards(model: torch.nn.Module, architecture: Architecture, grid: RankGrid) -> Iterator[LocalTensor]:
    """This rank's share of the HF model for publishing, largest first; collective over all ranks where there are
    tensor-parallel ones, and whoever begins must take all of it.

    As `export_slices`, but instead of the columns that it holds of a matrix each rank gives rows, which it gets from the others:
    rows are one stretch of the file, columns one for each row (5 times slower to write at 3.5 kB, measured on ext4).

    Raises PublishError on all ranks, before the first exchange, when one of them lacks the memory for it.
    """
    named = dict(model.named_parameters())
    owned = sorted(owned_pieces(architecture, grid), key=lambda piece: -piece.elements)
    if grid.tp > 1:
        # A rank that fails in an exchange leaves the others waiting in it.
        agree(TrainerRanks(grid), lambda: _try_memory(named, owned), None)
    for piece in owned:
        tensor = _slice(named[piece.parameter], piece)
        if piece.dim == 1 and grid.tp > 1:
            first, tensor = _rows_for_columns(tensor, grid)
            yield LocalTensor.along(piece.hf_name, piece.full_shape, 0, first, tensor)
        else:
            yield LocalTensor.along(piece.hf_name, piece.full_shape, piece.dim, piece.start, tensor)


def export_slices(
    named: Mapping[str, torch.Tensor], architecture: Architecture, grid: RankGrid
) -> Iterator[LocalTensor]:
    """`named` tensors laid out like the parameters (or their gradients), under their HF names.

    Over all ranks every element of every HF tensor comes exactly once: tensor-parallel ranks give the slices they hold,
    whole tensors come from the first of them, data-parallel replicas divide the tensors among themselves by size.
    """
    for piece in owned_pieces(architecture, grid):
        tensor = _slice(named[piece.parameter], piece)
        yield LocalTensor.along(piece.hf_name, piece.full_shape, piece.dim, piece.start, tensor)


def owned_pieces(architecture: Architecture, grid: RankGrid) -> list[Piece]:
    """The pieces that this rank publishes."""
    mine = pieces(architecture, grid.tp_rank, grid.tp)
    owners = _balance((piece.elements for piece in pieces(architecture, 0, grid.tp)), grid.dp)
    return [
        piece
        for piece, owner in zip(mine, owners, strict=True)
        if owner == grid.dp_rank and (grid.tp_rank == 0 or not piece.replicated)
    ]


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file of a HF folder holds each tensor, for one file or many. Raises ModelFolderError."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelFolderError(f"{index} is not a safetensors index: {error}") from error
        return {name: folder / file for name, file in weight_map.items()}
    if single.is_file():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    raise ModelFolderError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not read")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(f"{path} is missing or not a safetensors file: {error}") from error


def _check_names(locations: dict[str, Path], architecture: Architecture, folder: Path) -> None:
    wanted = hf_tensors(architecture)
    missing = sorted(set(wanted) - set(locations))
    if missing:
        raise WeightsMismatchError(f"{folder} lacks {len(missing)} tensors of {architecture.name}, first {missing[0]}")
    # Older files store the head of a tied model, and the rotary frequencies, although both follow from the rest.
    extra = sorted(name for name in set(locations) - set(wanted) if not name.endswith((".inv_freq", "lm_head.weight")))
    if extra:
        raise WeightsMismatchError(f"{folder} holds tensors that {architecture.name} does not use, first {extra[0]}")


def _read(stored: torch.Tensor, piece: Piece) -> torch.Tensor:
    """`stored` is a safetensors slice object: indexing it reads just that part of the file."""
    part = slice(piece.start, piece.start + piece.size)
    return stored[part] if piece.dim == 0 else stored[:, part]


def _rows(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    """View of the rows of `parameter` that hold the piece: [groups, rows of one group, ...]."""
    grouped = parameter.view(piece.groups, -1, *parameter.shape[1:])
    return grouped[:, piece.offset : piece.offset + piece.rows]


def _slice(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece as HF has it: a view of `parameter` where its rows follow each other, else a copy."""
    return _rows(parameter.detach(), piece).reshape(piece.local_shape)


def _try_memory(named: Mapping[str, torch.Tensor], owned: Iterable[Piece]) -> None:
    """Take, and give back to the allocator, what the largest exchange needs: what is sent, received, and put in order."""
    shared = [_slice(named[piece.parameter], piece) for piece in owned if piece.dim == 1]
    largest = max(shared, key=torch.Tensor.numel, default=None)
    if largest is not None:
        largest.new_empty((3, *largest.shape))


def _rows_for_columns(columns: torch.Tensor, grid: RankGrid) -> tuple[int, torch.Tensor]:
    """Every rank holds as many `columns` [rows, n] of a matrix; returns the first of this rank's rows, and these, whole."""
    rows, width = columns.shape
    bounds = [rows * rank // grid.tp for rank in range(grid.tp + 1)]
    counts = [last - first for first, last in pairwise(bounds)]
    mine = counts[grid.tp_rank]
    received = columns.new_empty(grid.tp, mine, width)
    row_bytes = width * columns.element_size()
    # As bytes: gloo does not know all number formats.
    dist.all_to_all_single(
        received.view(torch.uint8).view(-1),
        columns.contiguous().view(torch.uint8).view(-1),
        [mine * row_bytes] * grid.tp,
        [count * row_bytes for count in counts],
        group=grid.tp_group,
    )
    return bounds[grid.tp_rank], received.transpose(0, 1).reshape(mine, grid.tp * width)


def _balance(sizes: Iterable[int], parts: int) -> list[int]:
    """Give each size, in order, to the part that has least so far."""
    filled = [0] * parts
    owners = []
    for size in sizes:
        owner = filled.index(min(filled))
        filled[owner] += size
        owners.append(owner)
    return owners
