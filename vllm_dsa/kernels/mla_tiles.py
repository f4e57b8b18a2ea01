"""How MLA decode attention is cut into programs: rows, tiles of tokens and parts of the tokens."""

import functools
from typing import NamedTuple

import torch

from vllm_dsa.platform import num_sms

_VALUE = 512
# Waves of programs that splitting may make: more even out the last wave, and write more partial results.
_MAX_WAVES = 4
_MAX_SPLITS = 64
# What a program costs beside its tiles (queries, first latents, partial result), in tiles.
_FIXED_TILES = 4


class Tile(NamedTuple):
    """How one program of the attention kernel works.

    Attributes
    ----------
    rows : int
        Query rows times heads, the M of its products.
    tokens : int
        Latents at a time.
    num_warps, num_stages : int
        Triton's. A page id or slot is a load that a load waits for, which takes two of the stages.
    per_sm : int
        Programs that fit an SM.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    per_sm: int


# 64 x 512 float32 accumulators are all the registers of two warpgroups, and 64 queries with two tiles of latents 217 KB
# of shared memory. Smaller tiles share an SM, so that one's products hide the other's loads.
_WGMMA_TILE = Tile(rows=64, tokens=64, num_warps=8, num_stages=3, per_sm=1)
_SMALL_TILE = Tile(rows=16, tokens=32, num_warps=4, num_stages=5, per_sm=2)
_MIDDLE_TILE = Tile(rows=32, tokens=32, num_warps=4, num_stages=5, per_sm=2)


def workspace_floats(device: torch.device) -> int:
    """Return the float32 elements that any launch on a device needs."""
    rows = max(tile.per_sm * tile.rows for tile in (_SMALL_TILE, _MIDDLE_TILE, _WGMMA_TILE))
    return _MAX_WAVES * _num_sms(device) * rows * (_VALUE + 1)


@functools.cache
def choose_splits(num_blocks: int, num_tiles: int, places: int) -> int:
    """Return in how many parts the tokens of each block of rows are read. Pure.

    Parameters
    ----------
    num_blocks : int
        Programs without splitting.
    num_tiles : int
        Tiles of the longest request that the shapes allow.
    places : int
        Programs that run at a time.

    Returns
    -------
    int
        1 to `_MAX_SPLITS`: the number with the shortest waves of equal programs. Above 1, ``num_blocks`` times it is
        at most `_MAX_WAVES` waves.
    """
    most = min(num_tiles, _MAX_SPLITS, _MAX_WAVES * places // max(1, num_blocks))

    def cost(splits: int) -> int:
        waves = -(-num_blocks * splits // places)
        return waves * (-(-num_tiles // splits) + _FIXED_TILES)

    return min(range(1, max(1, most) + 1), key=cost)


def choose_tile(rows: int, *, is_sparse: bool, is_fp8: bool) -> Tile:
    """Return the tile for a group of `rows` query rows times heads that read the same latents."""
    if rows <= 16:
        return _SMALL_TILE
    # Where latents are dequantised 32 rows spill registers in the loop, and so does a third stage of the sparse form.
    if rows <= 32 and not is_fp8:
        return _MIDDLE_TILE
    return _WGMMA_TILE._replace(num_stages=2) if is_sparse else _WGMMA_TILE


def num_places(tile: Tile, device: torch.device) -> int:
    """Return how many programs run at a time."""
    return tile.per_sm * _num_sms(device)


def _num_sms(device: torch.device) -> int:
    return num_sms(device.index) if device.type == "cuda" else 1
