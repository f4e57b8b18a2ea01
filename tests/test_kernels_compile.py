"""Every Triton kernel compiles for Hopper (and for SM100), in every variant, on a machine without a GPU."""

import os
import subprocess
import sys

import pytest

# Interpretation is decided when a kernel is decorated, so compiling takes a process of its own.
PROGRAM = """
import itertools, sys
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_dsa.kernels import dcp_metadata, dcp_slots, expand_decode, fold_q, merge_lse, merge_topk
from vllm_dsa.kernels import mla_combine, mla_decode, mla_tiles, schedule, store_index_k

def compile_kernel(kernel, pointers, constexprs, floats=(), absent=(), aligned=(), **options):
    names = kernel.arg_names
    signature = {}
    for name in names:
        if name in constexprs or name in absent:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = pointers[name]
        else:
            signature[name] = "fp32" if name in floats else "i32"
    constants = {**constexprs, **{name: None for name in absent}}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
    assert compiled.asm["cubin"]
    return compiled

I32 = "*i32"
for group, copies in itertools.product((1, 2, 4), (False, True)):
    pointers = dict.fromkeys(expand_decode._POINTERS, I32)
    constexprs = dict(GROUP=group, GROUP_BLOCK=group, REQ_BLOCK=256, COPIES_TABLE=copies, COLUMNS=1024, TAIL=256)
    compile_kernel(expand_decode._expand_kernel, pointers, constexprs)
rules = ((1, False, False), (2, False, False), (4, False, False), (1, True, True), (3, True, False))
for next_n, sm100, varlen in rules:
    pointers = dict(lens_ptr=I32, indices_ptr=I32, out_ptr=I32)
    constexprs = dict(NEXT_N=next_n, SM100_RULE=sm100, VARLEN=varlen, SPLIT=256, BLOCK_ROWS=256, SLOTS=16)
    compile_kernel(schedule._schedule_kernel, pointers, constexprs)
common = dict(D=128, BLOCK_D=128, AMAX_FLOOR=1e-4, HARDWARE_CASTS=True)
for rope, interleaved, hadamard, ue8m0 in ((0, False, False, False), (64, False, False, False), (64, True, True, True)):
    variant = dict(common, ROPE_DIM=rope, INTERLEAVED=interleaved, HADAMARD=hadamard, POWER_OF_TWO_SCALE=ue8m0)
    absent = () if rope else ("positions_ptr", "cos_sin_ptr")
    pointers = dict(positions_ptr="*i64", cos_sin_ptr="*fp32", slot_mapping_ptr="*i64", k_ptr="*bf16", cache_ptr="*u8")
    compile_kernel(
        store_index_k._store_index_k_kernel, pointers, dict(variant, TOKENS=4, BLOCK_SIZE=64), absent=absent
    )
    pointers = dict(
        q_ptr="*bf16", weights_ptr="*bf16", positions_ptr="*i64", cos_sin_ptr="*fp32", row_to_token_ptr=I32,
        q_out_ptr="*u8", weights_out_ptr="*fp32",
    )
    compile_kernel(
        fold_q._fold_q_kernel, pointers, dict(variant, NUM_HEADS=64, HEADS=16),
        floats=("softmax_scale", "head_scale"), absent=absent,
    )
is_hopper = sys.argv[1] == "90"
mla_variants = (
    (16, False, False, True, True), (64, True, True, False, False), (16, True, True, True, False),
    (32, False, False, True, False), (64, False, False, True, True), (64, True, False, True, False),
)
# Its tiles are made for Hopper's shared memory; elsewhere it need only compile.
for rows, sparse, fp8, split, ragged in mla_variants if is_hopper else mla_variants[:2]:
    tile = mla_tiles.choose_tile(rows, is_sparse=sparse, is_fp8=fp8)
    row = 656 if fp8 else 576
    pointers = dict(
        q_ptr="*bf16", cache_ptr="*u8" if fp8 else "*bf16", lens_ptr=I32, starts_ptr=I32, source_ptr=I32,
        out_ptr="*fp32" if split else "*bf16", lse_ptr="*fp32",
    )
    constexprs = dict(
        HEADS=rows, BLOCKS=1, BLOCK_SIZE=64, PAGE_STRIDE=64 * row, TOKEN_STRIDE=row, SPARSE=sparse, FP8=fp8,
        SPLIT=split, ROWS=tile.rows, TOKENS=tile.tokens, STAGES=tile.num_stages, FACTOR=tl.bfloat16,
    )
    compiled = compile_kernel(
        mla_decode._attend_kernel, pointers, constexprs, floats=("scale_log2",),
        absent=() if ragged else ("starts_ptr",),
        aligned=("q_ptr", "cache_ptr", "out_ptr", "q_token_stride", "q_head_stride"), num_warps=tile.num_warps,
    )
    # What a Hopper SM has, less what each of its programs takes for itself.
    assert not is_hopper or compiled.metadata.shared + 1024 <= 228 * 1024 // tile.per_sm, compiled.metadata
for dims in (128, 512):
    pointers = dict(partial_out_ptr="*fp32", partial_lse_ptr="*fp32", out_ptr="*bf16", lse_ptr="*fp32")
    compile_kernel(mla_combine._combine_kernel, pointers, dict(DIMS=dims, SPLITS=16))
for from_slots, wide in itertools.product((False, True), (I32, "*i64")):
    pointers = dict.fromkeys(dcp_metadata._POINTERS, I32)
    pointers |= dict(seq_lens_ptr=wide, table_ptr=wide, req_pool_indices_ptr=wide)
    constexprs = dict(FROM_SLOTS=from_slots, ROWS_BLOCK=4, COLUMNS=1024)
    compile_kernel(dcp_metadata._dcp_metadata_kernel, pointers, constexprs)
    pointers = dict(slot_mapping_ptr=wide, out_ptr=wide)
    compile_kernel(dcp_slots._localize_slots_kernel, pointers, dict(BLOCK=256))
for out, v_dim in (("*bf16", 512), ("*fp16", 128), ("*fp32", 96)):
    lses = dict.fromkeys(("lse_ptr", "lses_ptr"), "*fp32")
    block = dict(V=v_dim, HEADS=4, BLOCK_V=512 if v_dim > 128 else 128)
    pointers = dict(lses, out_ptr=out, scaled_ptr=out)
    compile_kernel(merge_lse._scale_kernel, pointers, dict(block, NUM_SHARDS=3))
    pointers = dict(lses, out_ptr=out, outs_ptr=out)
    compile_kernel(merge_lse._pack_kernel, pointers, block, floats=("to_natural",))
    compile_kernel(merge_lse._combine_kernel, pointers, dict(block, NUM_SHARDS=3))
for size in (2, 3):
    pointers = dict.fromkeys(("candidates_ptr", "values_ptr", "ids_ptr", "lengths_ptr"), I32)
    compile_kernel(merge_topk._order_kernel, pointers, dict(SIZE=size, STEPS=12, BLOCK=256))
pointers = dict.fromkeys(("indices_ptr", "local_ptr", "counts_ptr"), I32)
compile_kernel(merge_topk._localize_kernel, pointers, dict(BLOCK=1024))
"""


@pytest.mark.parametrize("capability", [90, 100])
def test_every_variant_compiles(capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", PROGRAM, str(capability)], check=True, env=environment)
