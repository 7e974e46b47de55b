/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Which instruction set this process uses, and its tables of vector kernels. */
#include "backend/cpu/vec.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "backend/cpu/vec_exact.h"
#include "backend/cpu/vec_gate.h"
#include "core/config.h"

static const char *const isa_names[] = {"scalar", "avx2", "avx512", "avx512_bf16"};

#define N_ISAS ((int)(sizeof isa_names / sizeof isa_names[0]))
#define ISA_UNKNOWN N_ISAS

static _Atomic int isa_in_force = ISA_UNKNOWN;

#if defined(__x86_64__)
/* Not every compiler's __builtin_cpu_supports knows the word. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* What both the processor and the operating system (which must save the registers) offer. */
static enum cofi_isa isa_of_processor(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !has_f16c())
        return COFI_ISA_SCALAR;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return COFI_ISA_AVX2;
    return __builtin_cpu_supports("avx512bf16") ? COFI_ISA_AVX512_BF16 : COFI_ISA_AVX512;
#else
    return COFI_ISA_SCALAR;
#endif
}

/* Without AMX, Intel's processors start a product of 32 bf16 pairs every second clock, and two of
 * 16 fp32 values each clock: bf16 tiles are faster as fp32 panels, by 1.6 to 2 (Emerald Rapids,
 * oneDNN 2.6.3, one core, tiles 128x512x128 and 128x128x512: 82 against 125-170 GFLOP/s; the
 * instruction alone reaches 84). AMD's do not differ so. */
static bool is_bf16_slow(void)
{
#if defined(__x86_64__)
    const unsigned amx_bf16 = 1u << 22;
    unsigned a, b, c, d;
    return __builtin_cpu_is("intel") &&
           !(__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & amx_bf16));
#else
    return false;
#endif
}

static enum cofi_isa isa_of_configuration(void)
{
    const char *text = cofi_config_text(COFI_VAR_CPU_ISA);
    for (int i = 0; i < N_ISAS; i++)
        if (!strcmp(text, isa_names[i]))
            return (enum cofi_isa)i;
    return is_bf16_slow() ? COFI_ISA_AVX512 : COFI_ISA_AVX512_BF16; /* auto */
}

enum cofi_isa cofi_isa(void)
{
    int isa = atomic_load_explicit(&isa_in_force, memory_order_relaxed);
    if (isa == ISA_UNKNOWN) {
        int found = (int)isa_of_processor(), wanted = (int)isa_of_configuration();
        cofi_isa_cap((enum cofi_isa)(found < wanted ? found : wanted));
        isa = atomic_load_explicit(&isa_in_force, memory_order_relaxed);
    }
    return (enum cofi_isa)isa;
}

void cofi_isa_cap(enum cofi_isa isa)
{
    int now = atomic_load_explicit(&isa_in_force, memory_order_relaxed);
    while ((int)isa < now &&
           !atomic_compare_exchange_weak_explicit(&isa_in_force, &now, (int)isa,
                                                  memory_order_relaxed, memory_order_relaxed))
        ;
}

const char *cofi_isa_name(enum cofi_isa isa)
{
    return isa_names[isa];
}

const struct cofi_vec_ops *cofi_vec(void)
{
#if defined(__x86_64__)
    switch (cofi_isa()) {
    case COFI_ISA_AVX512_BF16:
    case COFI_ISA_AVX512: return &cofi_vec_avx512;
    case COFI_ISA_AVX2: return &cofi_vec_avx2;
    case COFI_ISA_SCALAR: break;
    }
#endif
    return &cofi_vec_scalar;
}

const struct cofi_exact_ops *cofi_exact(void)
{
#if defined(__x86_64__)
    switch (cofi_isa()) {
    case COFI_ISA_AVX512_BF16:
    case COFI_ISA_AVX512: return &cofi_exact_avx512;
    case COFI_ISA_AVX2: return &cofi_exact_avx2;
    case COFI_ISA_SCALAR: break;
    }
#endif
    return &cofi_exact_scalar;
}

const struct cofi_gate_ops *cofi_gate(void)
{
#if defined(__x86_64__)
    switch (cofi_isa()) {
    case COFI_ISA_AVX512_BF16:
    case COFI_ISA_AVX512: return &cofi_gate_avx512;
    case COFI_ISA_AVX2: return &cofi_gate_avx2;
    case COFI_ISA_SCALAR: break;
    }
#endif
    return &cofi_gate_scalar;
}
