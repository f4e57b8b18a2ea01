"""A stand-in for a model's indexer projections: every token's content decides its q, k and weights."""

import numpy as np
import torch

from vllm_dsa.config import DsaConfig
from vllm_dsa.reference import RopeStyle, make_cos_sin
from vllm_dsa.runner.splitmix import Uint64Array

_K_TABLE_ROWS = 1 << 14
_Q_TABLE_ROWS = 1 << 9


class SyntheticIndexer:
    """Draws index q, k and head weights from the identity of a token's content.

    A row is the normalised sum of two rows of a random table, picked by two parts of the content key, so that equal
    contents give equal vectors in any batch, on any rank and in any order, and different contents practically never do.

    Parameters
    ----------
    model : DsaConfig
        Heads, head size, RoPE.
    seed : int
        Of the tables.
    device : torch.device
        Where the tables and the results live.
    """

    def __init__(self, model: DsaConfig, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        heads, head_dim = model.index_n_heads, model.index_head_dim

        def table(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator).to(device)

        self.num_heads = heads
        self.head_dim = head_dim
        self.rope_style = RopeStyle.INTERLEAVED if model.rope_interleaved else RopeStyle.HALF_SPLIT
        self.cos_sin = make_cos_sin(model.max_position_embeddings, model.qk_rope_head_dim, model.rope_theta).to(device)
        self.device = device
        self._k_table = table(_K_TABLE_ROWS, head_dim)
        self._q_table = table(_Q_TABLE_ROWS, heads * head_dim)
        self._weight_table = table(_Q_TABLE_ROWS, heads)

    def index_k(self, content_keys: Uint64Array) -> torch.Tensor:
        """Return ``(T, head_dim)`` float32 index K before RoPE."""
        return self._mix(self._k_table, content_keys)

    def index_q(self, content_keys: Uint64Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(T, heads, head_dim)`` q before RoPE and ``(T, heads)`` signed head weights, float32."""
        q = self._mix(self._q_table, content_keys).view(-1, self.num_heads, self.head_dim)
        return q, self._mix(self._weight_table, content_keys)

    def _mix(self, table: torch.Tensor, content_keys: Uint64Array) -> torch.Tensor:
        rows = np.uint64(len(table))
        first = torch.from_numpy((content_keys % rows).astype(np.int64)).to(self.device)
        second = torch.from_numpy((content_keys // rows % rows).astype(np.int64)).to(self.device)
        return torch.add(table[first], table[second]).mul_(0.5**0.5)
