// wgmma of FP8 (e4m3) operands in shared memory with float32 accumulators, one specialisation per N.
#pragma once

#include "sm90_ptx.cuh"

// The 64 x N tile of a warpgroup is N / 2 registers a thread: the operand list grows by eight for each 16 of
// N.
#define REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_32 REGISTERS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_48 REGISTERS_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_64 REGISTERS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_80 REGISTERS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_96 REGISTERS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGISTERS_112 REGISTERS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS_128 REGISTERS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_144 REGISTERS_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REGISTERS_160 REGISTERS_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define REGISTERS_176 REGISTERS_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define REGISTERS_192 REGISTERS_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_208 REGISTERS_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define REGISTERS_224 REGISTERS_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define REGISTERS_240 REGISTERS_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define REGISTERS_256 REGISTERS_240 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define EIGHT(i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define OPERANDS_16 EIGHT(0)
#define OPERANDS_32 OPERANDS_16, EIGHT(8)
#define OPERANDS_48 OPERANDS_32, EIGHT(16)
#define OPERANDS_64 OPERANDS_48, EIGHT(24)
#define OPERANDS_80 OPERANDS_64, EIGHT(32)
#define OPERANDS_96 OPERANDS_80, EIGHT(40)
#define OPERANDS_112 OPERANDS_96, EIGHT(48)
#define OPERANDS_128 OPERANDS_112, EIGHT(56)
#define OPERANDS_144 OPERANDS_128, EIGHT(64)
#define OPERANDS_160 OPERANDS_144, EIGHT(72)
#define OPERANDS_176 OPERANDS_160, EIGHT(80)
#define OPERANDS_192 OPERANDS_176, EIGHT(88)
#define OPERANDS_208 OPERANDS_192, EIGHT(96)
#define OPERANDS_224 OPERANDS_208, EIGHT(104)
#define OPERANDS_240 OPERANDS_224, EIGHT(112)
#define OPERANDS_256 OPERANDS_240, EIGHT(120)

// d = a * b^T for the first 32 columns of K (`accumulates` false), d += a * b^T after.
template <int N>
__device__ __forceinline__ void wgmma_fp8(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulates);

#define DEFINE_WGMMA(N, A, B, P)                                                                \
    template <>                                                                                 \
    __device__ __forceinline__ void wgmma_fp8<N>(float (&d)[N / 2], uint64_t a, uint64_t b,     \
                                                 int accumulates) {                             \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P                                      \
                     ", 0;\n"                                                                   \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS_##N \
                     "}, " A ", " B ", p, 1, 1;\n}\n"                                           \
                     : OPERANDS_##N                                                             \
                     : "l"(a), "l"(b), "r"(accumulates));                                       \
    }

DEFINE_WGMMA(16, "%8", "%9", "%10")
DEFINE_WGMMA(32, "%16", "%17", "%18")
DEFINE_WGMMA(48, "%24", "%25", "%26")
DEFINE_WGMMA(64, "%32", "%33", "%34")
DEFINE_WGMMA(80, "%40", "%41", "%42")
DEFINE_WGMMA(96, "%48", "%49", "%50")
DEFINE_WGMMA(112, "%56", "%57", "%58")
DEFINE_WGMMA(128, "%64", "%65", "%66")
DEFINE_WGMMA(160, "%80", "%81", "%82")
DEFINE_WGMMA(192, "%96", "%97", "%98")
DEFINE_WGMMA(224, "%112", "%113", "%114")
DEFINE_WGMMA(256, "%128", "%129", "%130")
