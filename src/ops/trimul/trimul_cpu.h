/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* trimul on CPUs: what its files share. trimul_cpu.c has the calls and their protocol, _cpu_plan.c
 * sizes and memory, _cpu_weights.c the weights, _cpu_ports.c where exchanged values go,
 * _cpu_tiles.c what both sides of the token work share, _cpu_front.c steps 1 to 5, _cpu_contract.c
 * step 6, _cpu_back.c steps 7 and 8, each with its backward, _cpu_grads.c the gradients of weights.
 *
 * Bits. Products are of fixed sizes, with operands that begin at multiples of their tiles in global
 * indices; what of a tile is another rank's, or past the end, is computed all the same, of zeros or
 * of whatever lies there, and dropped. All tile sizes follow from N, D and H alone. */
#ifndef COFI_TRIMUL_CPU_H
#define COFI_TRIMUL_CPU_H

#include "backend/cpu/cpu_stream.h"
#include "backend/cpu/gemm_failure.h"
#include "backend/cpu/vec.h"
#include "backend/cpu/vec_gate.h"
#include "ops/trimul/trimul.h"

#define COFI_TRI_MAX_CHUNKS 16
#define COFI_TRI_MAX_BLOCKS (COFI_TRI_MAX_WIDTH / COFI_TRI_GROUP)

/* Signal words: one for each chunk of a and b, then these. */
enum { COFI_TRI_WORD_TRI, COFI_TRI_WORD_DTRI, COFI_TRI_WORD_DAB, COFI_TRI_WORD_HASH,
       COFI_TRI_WORD_HASHED, COFI_TRI_WORD_PARTS, COFI_TRI_WORD_SUMS, COFI_TRI_WORDS };

/* What goes from rank to rank; each has a region in the arena.
 *   AB    a, b        to the owners of features, planes [half][feature][B][rows][pitch]
 *   TRI   tri         to the owners of tokens, blocks [feature][B][Ni][pitch]
 *   DTRI  d tri       planes, in the wide type
 *   DAB   d a, d b    blocks [half][feature][B][Ni][pitch], fp32 */
enum cofi_tri_exchange { COFI_TRI_AB, COFI_TRI_TRI, COFI_TRI_DTRI, COFI_TRI_DAB,
                         COFI_TRI_EXCHANGES };

/* d a and d b are fp32: gradients of weights are sums of many of them, where what bf16 drops does
 * not cancel. */
static inline enum cofi_elem cofi_tri_cpu_elem(const struct cofi_tri_plan *plan,
                                               enum cofi_tri_exchange e)
{
    return e == COFI_TRI_AB ? plan->elem : e == COFI_TRI_DAB ? COFI_ELEM_F32 : plan->wide;
}

/* Where the values of one exchange lie: at a rank's own region or saved copy, or on the way. */
struct cofi_tri_port {
    char *base;
    int64_t half, feature, batch, row, item; /* bytes from one to the next */
    int64_t feature0, row0, col0;            /* of what lies at the base */
};

static inline char *cofi_tri_port_at(const struct cofi_tri_port *p, int half, int64_t h, int64_t b,
                                     int64_t i, int64_t j)
{
    return p->base + half * p->half + (h - p->feature0) * p->feature + b * p->batch +
           (i - p->row0) * p->row + (j - p->col0) * p->item;
}

/* Sizes of a call. */
struct cofi_tri_shape {
    int64_t n, n_batch;
    int64_t tokens;     /* of a tile: so many columns of a row */
    int64_t tile;       /* rows and columns of a tile of the contraction */
    int64_t plane_rows; /* N, up to whole tiles */
    cof_trimul_block own;
};

/* Weights as products take them: matrices in the type of products, vectors in fp32. */
struct cofi_tri_cpu_weights {
    /* Blocks of features: rows [p a; p b; g a; g b], `block` of each, zero past H. */
    char *in;        /* [n_blocks][4 block][D] */
    float *in_bias;  /* [n_blocks][4 block] */
    char *out_t;     /* [H][D], p_out transposed */
    char *gate;      /* [D][D], g_out */
    float *out_bias, *gate_bias;          /* [D] */
    float *norm_in[2], *norm_out[2];      /* gain, bias: [D], [H] */
};

/* Gradients of weights, of some tokens, in the same forms. */
struct cofi_tri_cpu_grads {
    float *in, *in_bias, *out_t, *gate, *out_bias, *gate_bias, *norm_in[2], *norm_out[2];
};

/* Everything that is laid out, here and nowhere else. */
struct cofi_tri_cpu_sizes {
    int64_t block, n_blocks;         /* features of a block of p and g, and blocks */
    int64_t max_tokens;              /* of a tile */
    int64_t chunk;                   /* features of a rank in a chunk */
    int n_chunks;
    size_t offset[COFI_TRI_EXCHANGES], bytes[COFI_TRI_EXCHANGES]; /* in the arena's data */
    size_t hash_offset, parts_offset, sums_offset;
    int64_t n_grads, max_share;      /* floats of all gradients, and of a rank's share of them */
    int n_slices;                    /* of tokens, whose gradients are summed each by itself, at
                                        most */
    int64_t slice_floats;
    /* Local. */
    size_t weights, staging, stash, slices, grads;
};

struct cofi_tri_cpu_state {
    struct cofi_tri_cpu_sizes sizes;
    enum cofi_gemm_type type; /* of products */
    int type_bytes;
    bool is_staged;
    struct cofi_tri_cpu_weights weights;
    char *staging;               /* values on the way to peers that are not mapped */
    char *stash;                 /* backward: the gate's part of d xn, [tokens][D], wide */
    float *slices, *grads;
    struct cofi_tri_port *ports; /* [exchange][rank]: where to store */
    uint16_t owner[COFI_TRI_MAX_BLOCKS]; /* of a group of features */
    uint16_t round[COFI_TRI_MAX_BLOCKS]; /* of a block: the chunk before which it is computed */
    struct cofi_gemm_failure failure; /* of a product: the call ends with it */
    /* The calls in hand, in parts; the whole of them once their stream runs them. */
    struct cofi_tri_call call;
    struct cofi_tri_weights given;
    struct cofi_tri_shape shape;
    int64_t n_tiles, n_slices;
    struct cofi_tri_port inbox[COFI_TRI_EXCHANGES]; /* where to read */
    _Alignas(COFI_LINE) char memory[];
};

/* ---- _cpu_plan.c ---- */

cof_status cofi_tri_cpu_lay_out(struct cofi_tri_plan *plan);
void cofi_tri_cpu_describe(const struct cofi_tri_plan *plan, char *text, size_t bytes);
cof_status cofi_tri_cpu_open(struct cofi_tri_plan *plan);
void cofi_tri_cpu_close(struct cofi_tri_plan *plan);
struct cofi_tri_shape cofi_tri_cpu_shape(const struct cofi_tri_plan *plan, int64_t n,
                                         int64_t n_batch);
/* Bytes of a row of a plane; of a rank's block. */
int64_t cofi_tri_cpu_plane_pitch(int64_t plane_rows, int item);
int64_t cofi_tri_cpu_block_pitch(int64_t n_cols, int item);
/* Places in a block of floats; base = NULL: only counts them. */
int64_t cofi_tri_cpu_grads_at(const struct cofi_tri_plan *plan,
                              const struct cofi_tri_cpu_sizes *sizes, float *base,
                              struct cofi_tri_cpu_grads *grads_out);

/* The following run on a stream's dispatcher and return when the work is done. */

/* ---- _cpu_ports.c ---- */

/* Of the call in hand. */
void cofi_tri_cpu_set_ports(struct cofi_tri_plan *plan);
/* What was stored for features [begin, end): to peers that are not mapped. */
void cofi_tri_cpu_deliver(struct cofi_tri_plan *plan, enum cofi_tri_exchange exchange,
                          int64_t begin, int64_t end);
/* `bytes` of local memory to an offset of a peer's data. */
void cofi_tri_cpu_send(struct cofi_tri_plan *plan, int peer, size_t offset, const void *src,
                       size_t bytes);

/* ---- _cpu_weights.c ---- */

void cofi_tri_cpu_take_weights(struct cofi_tri_plan *plan);
uint64_t cofi_tri_cpu_hash_weights(const struct cofi_tri_plan *plan);

/* ---- _cpu_tiles.c ---- */

/* n_tiles and n_slices of the call in hand. */
void cofi_tri_cpu_set_tiles(struct cofi_tri_plan *plan);

/* ---- the steps ---- */

/* a and b of the blocks of a round, at their owners. */
void cofi_tri_cpu_front(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan, int round);
/* tri of own features [begin, end), at the owners of tokens. */
void cofi_tri_cpu_contract(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan, int64_t begin,
                           int64_t end);
void cofi_tri_cpu_back(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan);
/* d tri at the owners of features; what of d xn comes by the gate, in the stash. */
void cofi_tri_cpu_back_grad(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan);
/* d a and d b of all own features, at the owners of tokens. */
void cofi_tri_cpu_contract_grad(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan);
void cofi_tri_cpu_front_grad(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan);

/* ---- _cpu_grads.c ---- */

void cofi_tri_cpu_clear_slices(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan);
/* The sum over the slices, in state->grads, in the order of enum cofi_tri_weight. */
void cofi_tri_cpu_sum_slices(struct cofi_cpu_stream *s, struct cofi_tri_plan *plan);
void cofi_tri_cpu_store_grads(struct cofi_tri_plan *plan, const float *grads);

#endif
