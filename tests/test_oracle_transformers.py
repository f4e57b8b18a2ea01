"""Agreement with the indexers of Hugging Face transformers (never with code of ours on both sides)."""

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_dsa import ops
from vllm_dsa.ops import IndexKCacheLayout, RopeStyle, ScaleFormat
from vllm_dsa.reference import apply_rope, dequantize_fp8, make_cos_sin
from vllm_dsa.reference.mqa_logits import score_tile

pytest.importorskip("transformers")
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig

pytestmark = pytest.mark.oracle

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Family:
    """What one model family calls its parts, and what this package says about it."""

    module: ModuleType
    prefix: str
    config: type
    style: RopeStyle
    num_heads: int

    def part(self, name: str) -> Any:
        return getattr(self.module, self.prefix + name)

    def rotate(self, *args: Any) -> Any:
        interleaved = self.style is RopeStyle.INTERLEAVED
        name = "apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb"
        return getattr(self.module, name)(*args, unsqueeze_dim=2)


FAMILIES = {
    "v32": Family(modeling_deepseek_v32, "DeepseekV32", DeepseekV32Config, RopeStyle.HALF_SPLIT, 64),
    "glm": Family(modeling_glm_moe_dsa, "GlmMoeDsa", GlmMoeDsaConfig, RopeStyle.INTERLEAVED, 32),
}
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


class Tap:
    """A stand-in for the model's cache that keeps the K it is given."""

    def update_indexer(self, k, layer_idx):
        self.k = k.clone()
        return k


def cache_keyword(function):
    return "cache" if "cache" in inspect.signature(inspect.unwrap(function)).parameters else "past_key_values"


@dataclass
class Run:
    """One call of a standalone indexer: its inputs, its K after RoPE, its top-k (B, S, k)."""

    config: Any
    indexer: Any
    hidden: torch.Tensor
    q_resid: torch.Tensor
    cos_sin: tuple[torch.Tensor, torch.Tensor]
    rotated_k: torch.Tensor
    chosen: torch.Tensor

    def raw_q(self):
        heads = (self.config.index_n_heads, self.config.index_head_dim)
        return self.indexer.wq_b(self.q_resid).unflatten(-1, heads)

    def raw_k(self):
        return self.indexer.k_norm(self.indexer.wk(self.hidden))

    def raw_weights(self):
        return self.indexer.weights_proj(self.hidden)


@torch.no_grad()
def run_indexer(family, batch, length, seed, **changes):
    torch.manual_seed(seed)
    config = family.config(**(TINY | changes))
    indexer = family.part("Indexer")(config, layer_idx=0).float().eval()
    hidden = torch.randn(batch, length, config.hidden_size)
    q_resid = torch.randn(batch, length, config.q_lora_rank)
    positions = torch.arange(length).expand(batch, length)
    cos_sin = family.part("RotaryEmbedding")(config=config)(hidden, position_ids=positions)
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, -1, -1)
    tap = Tap()
    keyword = cache_keyword(family.part("Indexer").forward)
    chosen = indexer(hidden, q_resid, cos_sin, mask, positions, **{keyword: tap})
    return Run(config, indexer, hidden, q_resid, cos_sin, tap.k, chosen)


@torch.no_grad()
def exact_scores(family, config, raw_q, raw_k, raw_weights):
    """Our scores of one sequence without FP8, from what the projections give: (S, S) float64."""
    length, num_heads, head_dim = raw_q.shape
    positions = torch.arange(length)
    table = make_cos_sin(length, config.qk_rope_head_dim, theta=config.rope_parameters["rope_theta"])
    q = apply_rope(raw_q, positions, table, family.style)
    k = apply_rope(raw_k, positions, table, family.style)
    weights = raw_weights * num_heads**-0.5 * head_dim**-0.5
    return score_tile(q, k, torch.ones(length), weights, torch.float64)


def visible_set(row, position):
    """The oracle's choice without what lies in the future: it pads rows shorter than k with that."""
    return {index for index in row.tolist() if 0 <= index <= position}


def check_rows(scores, chosen, ours, topk):
    """Same sets, except for tokens whose score equals the k-th one up to float32 rounding."""
    for position in range(scores.shape[0]):
        theirs, mine = visible_set(chosen[position], position), visible_set(ours[position], position)
        assert len(theirs) == len(mine) == min(topk, position + 1)
        visible = scores[position, : position + 1]
        threshold = visible.sort(descending=True).values[len(mine) - 1]
        for index in theirs ^ mine:
            assert abs(visible[index] - threshold) <= 1e-5 * visible.abs().max()


def causal_topk(scores, topk):
    lengths = torch.arange(1, scores.shape[0] + 1, dtype=torch.int32)
    return ops.topk_indices(scores.contiguous(), lengths, topk)


@each_family
@pytest.mark.parametrize("length", [5, 8, 9, 60])
def test_exact_scores_choose_the_same_tokens(family, length, seed):
    run = run_indexer(family, 2, length, seed)
    for row in range(2):
        scores = exact_scores(family, run.config, run.raw_q()[row], run.raw_k()[row], run.raw_weights()[row])
        check_rows(scores, run.chosen[row], causal_topk(scores, 8), 8)


@each_family
def test_the_other_rope_style_would_be_seen(family, seed):
    run = run_indexer(family, 1, 60, seed)
    other = next(style for style in RopeStyle if style is not family.style)
    wrong = Family(family.module, family.prefix, family.config, other, family.num_heads)
    scores = exact_scores(wrong, run.config, run.raw_q()[0], run.raw_k()[0], run.raw_weights()[0])
    ours = causal_topk(scores, 8)
    differing = sum(visible_set(run.chosen[0, t], t) != visible_set(ours[t], t) for t in range(60))
    assert differing > 10


@each_family
def test_our_rope_is_theirs(family, seed):
    run = run_indexer(family, 1, 300, seed)
    rope_dim = run.config.qk_rope_head_dim
    table = make_cos_sin(300, rope_dim, theta=run.config.rope_parameters["rope_theta"])
    ours = apply_rope(run.raw_k()[0], torch.arange(300), table, family.style)
    if family.style is RopeStyle.INTERLEAVED:
        # They gather the first elements of all pairs in front; we leave the pairs where they are.
        pairs = torch.cat([ours[:, 0:rope_dim:2], ours[:, 1:rope_dim:2]], dim=-1)
        ours = torch.cat([pairs, ours[:, rope_dim:]], dim=-1)
    assert torch.allclose(ours, run.rotated_k[0], atol=1e-4)


@torch.no_grad()
@each_family
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_the_paged_path_at_real_sizes(family, scale_format, seed):
    length, next_n, topk = 700, 4, 256
    sizes = {"index_n_heads": family.num_heads, "index_head_dim": 128, "qk_rope_head_dim": 64}
    run = run_indexer(family, 2, length, seed, index_topk=topk, **sizes)
    raw_q = run.raw_q()
    q_rot, _ = family.rotate(raw_q[..., :64], raw_q[..., :64], *run.cos_sin)
    rotated_q = torch.cat([q_rot, raw_q[..., 64:]], dim=-1)

    layout = IndexKCacheLayout()
    pages_each = -(-length // layout.block_size)
    pages = torch.randperm(2 * pages_each).view(2, pages_each).int()
    cache = layout.allocate(2 * pages_each, "cpu", fill=0x7F)
    token = torch.arange(length)
    slots = pages.long()[:, token // layout.block_size] * layout.block_size + token % layout.block_size
    ops.store_index_k(run.rotated_k.flatten(0, 1), cache, slots.flatten(), scale_format=scale_format)
    last = slice(length - next_n, length)
    q, weights = ops.fold_q(
        rotated_q[:, last].flatten(0, 1), run.raw_weights()[:, last].flatten(0, 1), scale_format=scale_format
    )
    lens = torch.arange(length - next_n + 1, length + 1, dtype=torch.int32).expand(2, next_n)
    logits = ops.paged_mqa_logits(
        q.view(2, next_n, family.num_heads, 128), cache, weights, lens, pages, max_context_len=length
    )
    chosen = ops.topk_indices(logits, lens.flatten(), topk)

    scale = 128**-0.5 * family.num_heads**-0.5
    for row in range(2 * next_n):
        request, position = row // next_n, length - next_n + row % next_n
        values, scales = ops.gather_index_k(cache, pages[request], position + 1)
        k = dequantize_fp8(values, scales, torch.float64)
        per_head = (q[row].double() @ k.T).clamp(min=0)
        simulated = weights[row].double() @ per_head
        visible = logits[row, : position + 1].double()
        assert (visible - simulated).norm() <= 5e-6 * simulated.norm()
        assert (logits[row, position + 1 :] == float("-inf")).all()

        per_head = rotated_q[request, position].double() @ run.rotated_k[request, : position + 1].double().T
        exact = scale * run.raw_weights()[request, position].double() @ per_head.clamp(min=0)
        difference = 1 - 2 * (exact @ simulated) / (exact @ exact + simulated @ simulated)
        assert difference < 2e-3
        fp8_error = (exact - visible).abs().max()
        assert fp8_error < 0.5 * exact.std()
        theirs = visible_set(run.chosen[request, position], position)
        mine = set(chosen[row].tolist())
        assert len(mine) == len(theirs) == topk
        assert len(mine & theirs) >= 0.9 * topk
        threshold = exact.sort(descending=True).values[topk - 1]
        for index in mine ^ theirs:
            assert abs(exact[index] - threshold) <= 2 * fp8_error


def record_indexers(model):
    """Hook every indexer: by layer, the arguments and the top-k of each call."""
    calls: dict[int, list[tuple[dict[str, Any], torch.Tensor]]] = {}

    def hook_of(number, signature):
        def hook(module, args, kwargs, output):
            arguments = signature.bind(module, *args, **kwargs).arguments
            calls.setdefault(number, []).append((arguments, output.clone()))

        return hook

    for number, layer in enumerate(model.layers):
        indexer = layer.self_attn.indexer
        if indexer is not None:
            signature = inspect.signature(inspect.unwrap(type(indexer).forward))
            indexer.register_forward_hook(hook_of(number, signature), with_kwargs=True)
    return calls


def check_calls(family, model, calls):
    """Recompute each indexer from all the inputs it saw, and compare with all that it chose.

    The inputs of the very run are used: the order of ties is open in torch.topk, ties at zero are common, and a
    token chosen otherwise in one layer changes the K of the next, so prefill and decode of a model need not agree.
    """
    config = model.config
    for number, steps in calls.items():
        indexer = model.layers[number].self_attn.indexer
        hidden = torch.cat([arguments["hidden_states"] for arguments, _ in steps], dim=1)
        q_resid = torch.cat([arguments["q_resid"] for arguments, _ in steps], dim=1)
        chosen = torch.cat([output for _, output in steps], dim=1)
        heads = (config.index_n_heads, config.index_head_dim)
        for row in range(hidden.shape[0]):
            scores = exact_scores(
                family,
                config,
                indexer.wq_b(q_resid[row]).unflatten(-1, heads),
                indexer.k_norm(indexer.wk(hidden[row])),
                indexer.weights_proj(hidden[row]),
            )
            check_rows(scores, chosen[row], causal_topk(scores, config.index_topk), config.index_topk)


MODELS = {
    "v32": (FAMILIES["v32"], {}, [0, 1, 2]),
    "glm": (FAMILIES["glm"], {}, [0, 1, 2]),
    "glm_shared": (
        FAMILIES["glm"],
        {"num_hidden_layers": 4, "index_topk_pattern": "FSFS"},
        [0, 2],
    ),
}


@torch.no_grad()
@pytest.mark.parametrize(("family", "changes", "indexer_layers"), MODELS.values(), ids=MODELS)
def test_whole_models_in_prefill_and_decode(family, changes, indexer_layers, seed):
    torch.manual_seed(seed)
    config = family.config(**(TINY | changes))
    config._attn_implementation = "eager"
    model_class = family.part("Model")
    model = model_class(config).eval()
    calls = record_indexers(model)
    ids = torch.randint(0, config.vocab_size, (2, 40))

    model(input_ids=ids, use_cache=False)
    assert sorted(calls) == indexer_layers
    check_calls(family, model, calls)

    calls.clear()
    keyword = cache_keyword(model_class.forward)
    output = model(input_ids=ids[:, :36], use_cache=True)
    cache = getattr(output, keyword, None) or output.past_key_values
    for position in range(36, 40):
        model(input_ids=ids[:, position : position + 1], use_cache=True, **{keyword: cache})
    assert {len(steps) for steps in calls.values()} == {5}
    check_calls(family, model, calls)
