"""Every Triton kernel compiles for Hopper (and for SM100), in every variant, on a machine without a GPU."""

import os
import subprocess
import sys

import pytest

# Interpretation is decided when a kernel is decorated, so compiling takes a process of its own.
PROGRAM = """
import itertools, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_dsa.kernels import expand_decode, fold_q, schedule, store_index_k

def compile_kernel(kernel, pointers, constexprs, floats=(), absent=()):
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
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
    assert compiled.asm["cubin"]

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
"""


@pytest.mark.parametrize("capability", [90, 100])
def test_every_variant_compiles(capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", PROGRAM, str(capability)], check=True, env=environment)
