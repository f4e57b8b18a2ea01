"""Random inputs of MLA decode attention, and who can compute over them."""

import torch

from vllm_dsa.attn_result import DecodeAttnResult
from vllm_dsa.ops import MlaBackend, mla_decode, mla_decode_workspace, sparse_mla_decode
from vllm_dsa.reference import KV_LORA_RANK, LATENT_DIM, pack_fp8_latent

# The head dimension before absorption, of which the models take the scale.
_SCALE = 192**-0.5


class MlaInputs:
    """One step.

    Parameters
    ----------
    heads, batch, next_n, context : int
        Every request has `next_n` rows, of which the last sees `context` tokens and each other one less.
    topk : int or None
        Tokens of a row, drawn at random of those that it sees; None is dense.
    is_fp8 : bool
        FP8 or bfloat16 cache.
    block_size, seed : int
    device : torch.device

    Attributes
    ----------
    latent_bytes : int
        Bytes of latents that must be read.
    flops : int
        Of the products of queries and keys and of weights and values.
    """

    def __init__(
        self,
        heads: int,
        batch: int,
        next_n: int,
        context: int,
        *,
        topk: int | None,
        is_fp8: bool,
        block_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        pages = -(-context // block_size)
        self._table = torch.randperm(batch * pages, generator=generator, device=device).int().view(batch, pages)
        latent = torch.randn(
            batch * pages, block_size, LATENT_DIM, generator=generator, device=device, dtype=torch.bfloat16
        )
        self._latent = latent
        self._cache = pack_fp8_latent(latent) if is_fp8 else latent
        rows = batch * next_n
        q = torch.randn(rows, heads, LATENT_DIM, generator=generator, device=device)
        # Scores of a unit's size: weights neither even nor of a single token.
        self._q = (q * (192 / LATENT_DIM) ** 0.5).bfloat16()
        first = context - next_n + 1
        self._lens = torch.arange(first, context + 1, dtype=torch.int32, device=device).repeat(batch)
        self._next_n, self._context, self._block_size = next_n, context, block_size
        self._slots = None if topk is None else self._choose(min(topk, first), generator)
        # A dense baseline over latents that lie ready; built once, outside of what is timed.
        self._gathered = self._latent[self._table.long()].flatten(1, 2)[:, :context] if topk is None else None
        row_bytes = self._cache.shape[2] * self._cache.element_size()
        tokens = batch * context if self._slots is None else self._slots.numel()
        self.latent_bytes = tokens * row_bytes
        seen = int(self._lens.sum()) if self._slots is None else self._slots.numel()
        self.flops = 2 * heads * seen * (LATENT_DIM + KV_LORA_RANK)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return results and workspace, so that a step allocates nothing."""
        rows, heads, _ = self._q.shape
        return {
            "out": self._q.new_empty((rows, heads, KV_LORA_RANK)),
            "lse": self._q.new_empty((rows, heads), dtype=torch.float32),
            "workspace": mla_decode_workspace(self._q.device),
        }

    def run(self, backend: MlaBackend | None, buffers: dict[str, torch.Tensor] | None = None) -> DecodeAttnResult:
        """Compute the step by a backend; None is the default."""
        options = {"softmax_scale": _SCALE, "backend": backend}
        if self._slots is not None:
            return sparse_mla_decode(self._q, self._cache, self._slots, **options, **(buffers or {}))  # type: ignore[arg-type]
        return mla_decode(self._q, self._cache, self._table, self._lens, **options, **(buffers or {}))  # type: ignore[arg-type]

    def torch_baseline(self) -> torch.Tensor:
        """Compute the step's output by batched products and a softmax."""
        if self._slots is not None:
            latent = self._latent.view(-1, LATENT_DIM)[self._slots.long()]
            return self._attend(self._q, latent, None)
        assert self._gathered is not None
        batch = len(self._table)
        q = self._q.view(batch, -1, LATENT_DIM)
        hidden = torch.arange(self._context, device=q.device) >= self._lens.view(batch, self._next_n, 1)
        return self._attend(q, self._gathered, hidden.repeat_interleave(self._q.shape[1], dim=1))

    @staticmethod
    def _attend(q: torch.Tensor, latent: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        scores = torch.bmm(q * _SCALE, latent.transpose(1, 2))
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        return torch.bmm(scores.softmax(dim=2), latent[..., :KV_LORA_RANK])

    def _choose(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Draw `count` of each row's tokens, in ascending order as the top-k gives them, as slots."""
        rows, device = len(self._lens), self._q.device
        slots = torch.empty(rows, count, dtype=torch.int32, device=device)
        for row in range(rows):
            length = int(self._lens[row])
            token = torch.randperm(length, generator=generator, device=device)[:count].sort().values
            pages = self._table[row // self._next_n, token // self._block_size]
            slots[row] = pages * self._block_size + token % self._block_size
        return slots
