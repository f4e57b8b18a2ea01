"""Layout of the paged FP8 cache of index K, and reading it."""

from dataclasses import dataclass
from typing import Self

import torch

SCALE_BYTES = 4
BLOCK_SIZES = (32, 64)


@dataclass(frozen=True, slots=True)
class IndexKCacheLayout:
    """Shape of one page of the index-K cache.

    A page is ``block_size * head_dim`` value bytes (float8_e4m3fn, token by token) and then `block_size`
    float32 scales. The tensor that holds pages is uint8 (num_blocks, block_size, 1, head_dim + 4): its
    second stride is nominal, since no token owns `head_dim + 4` bytes in a row. Pages may lie apart (several
    layers interleaved in one pool); the bytes of one page are contiguous.

    Parameters
    ----------
    block_size : int
        Tokens of a page: 32 or 64.
    head_dim : int
        Dimensions of index K, a positive multiple of 4 (128 in every released model).

    Raises
    ------
    ValueError
        If `block_size` or `head_dim` is not allowed.

    Notes
    -----
    Source: the page that DeepGEMM's paged MQA logits read, as peer engines write it.
    """

    block_size: int = 64
    head_dim: int = 128

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}; allowed: {BLOCK_SIZES}")
        if self.head_dim < 1 or self.head_dim % SCALE_BYTES:
            raise ValueError(f"head_dim is {self.head_dim}; allowed: positive multiples of {SCALE_BYTES}")

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes, its scale included."""
        return self.head_dim + SCALE_BYTES

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.block_size * self.token_bytes

    @classmethod
    def of(cls, cache: torch.Tensor) -> Self:
        """Return the layout that the shape of `cache` states.

        Raises
        ------
        TypeError
            If `cache` is not a uint8 tensor.
        ValueError
            If its shape is not (num_blocks, 32 or 64, 1, head_dim + 4), the bytes of a page are not
            contiguous, pages overlap, or a page does not start at a multiple of 4 bytes.
        """
        if not isinstance(cache, torch.Tensor) or cache.dtype != torch.uint8:
            found = getattr(cache, "dtype", type(cache).__name__)
            raise TypeError(f"cache is {found}; allowed: a torch.uint8 tensor")
        if cache.dim() != 4 or cache.shape[2] != 1:
            raise ValueError(
                f"cache has shape {tuple(cache.shape)}; allowed: (num_blocks, block_size, 1, head_dim + 4)"
            )
        layout = cls(block_size=cache.shape[1], head_dim=cache.shape[3] - SCALE_BYTES)
        layout._check_strides(cache)
        return layout

    def allocate(self, num_blocks: int, device: torch.device | str, fill: int | None = None) -> torch.Tensor:
        """Return a contiguous cache (num_blocks, block_size, 1, head_dim + 4) uint8 on `device`.

        Parameters
        ----------
        num_blocks : int
            Pages.
        device : torch.device or str
            Where.
        fill : int, optional
            Value of every byte, 0 to 255. Without it the memory is left as it is: every token must be written
            before it is read.
        """
        shape = (num_blocks, self.block_size, 1, self.token_bytes)
        if fill is None:
            return torch.empty(shape, dtype=torch.uint8, device=device)
        return torch.full(shape, fill, dtype=torch.uint8, device=device)

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and the scales of `cache` as views of its memory.

        Parameters
        ----------
        cache : torch.Tensor
            (num_blocks, block_size, 1, head_dim + 4) uint8; any page stride of at least `page_bytes` that
            is a multiple of 4.

        Returns
        -------
        values : torch.Tensor
            (num_blocks, block_size, head_dim) float8_e4m3fn.
        scales : torch.Tensor
            (num_blocks, block_size) float32.

        Raises
        ------
        TypeError, ValueError
            As `of`, or `cache` has another layout than this one.
        """
        found = type(self).of(cache)
        if found != self:
            raise ValueError(f"cache has layout {found}; allowed: {self}")
        num_blocks, page_stride, start = cache.shape[0], cache.stride(0), cache.storage_offset()
        value_bytes = self.block_size * self.head_dim
        values = cache.as_strided((num_blocks, self.block_size, self.head_dim), (page_stride, self.head_dim, 1), start)
        scales = cache.as_strided((num_blocks, self.block_size * SCALE_BYTES), (page_stride, 1), start + value_bytes)
        return values.view(torch.float8_e4m3fn), scales.view(torch.float32)

    def _check_strides(self, cache: torch.Tensor) -> None:
        page_stride, token_stride, _, byte_stride = cache.stride()
        if token_stride != self.token_bytes or byte_stride != 1:
            raise ValueError(f"cache has strides {cache.stride()}; allowed: (page, {self.token_bytes}, any, 1)")
        if cache.shape[0] > 1 and page_stride < self.page_bytes:
            raise ValueError(f"cache has a page stride of {page_stride} bytes; allowed: at least {self.page_bytes}")
        if page_stride % SCALE_BYTES or cache.data_ptr() % SCALE_BYTES:
            raise ValueError(
                f"cache has a page stride of {page_stride} bytes and starts at byte {cache.storage_offset()} "
                f"of its storage; allowed: multiples of {SCALE_BYTES}, the alignment of a scale"
            )


def gather_index_k(
    cache: torch.Tensor, block_table_row: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the first `length` tokens of one request out of its pages.

    Parameters
    ----------
    cache : torch.Tensor
        (num_blocks, block_size, 1, head_dim + 4) uint8, see `IndexKCacheLayout`.
    block_table_row : torch.Tensor
        (W,) int32 or int64 page ids, same device. Columns past the last token are not read.
    length : int
        Tokens, 0 to W * block_size.

    Returns
    -------
    values : torch.Tensor
        (length, head_dim) float8_e4m3fn.
    scales : torch.Tensor
        (length,) float32.

    Notes
    -----
    Page ids and `length` are not checked here. No host sync.
    """
    layout = IndexKCacheLayout.of(cache)
    values, scales = layout.views(cache)
    num_pages = -(-length // layout.block_size)
    pages = block_table_row[:num_pages]
    tokens = values[pages].view(num_pages * layout.block_size, layout.head_dim)
    return tokens[:length], scales[pages].view(-1)[:length]
