/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* grad_return from the inside: plan, back ends, transports of the CPU, calls. */
#ifndef COFI_GRAD_RETURN_H
#define COFI_GRAD_RETURN_H

#include "backend/cpu/cpu_stream.h"
#include "cofuse/grad_return.h"
#include "ops/grad_return/grad_return_exchange.h"
#include "ops/plan.h"

enum { COFI_GR_READY, COFI_GR_ACK, COFI_GR_PURPOSES };
enum { COFI_GR_MARK, COFI_GR_PREV_MARK };
#define COFI_GR_ACKS (1u << COFI_GR_ACK)

/* dK and dV as the caller has them: rows of [B][Hkv][dim]. */
struct cofi_gr_view {
    char *data[2];
    int64_t row_stride[2], batch_stride[2], head_stride[2]; /* elements */
};

/* Elements that are summed and rounded at a time. */
#define COFI_GR_PIECE 256

struct cofi_grad_return_plan;

/* How rows get to their owner. `to` and the buffers are in the wire's type; rows are local rows of
 * the owner of the step. */
struct cofi_gr_transport {
    const char *name;
    cof_status (*open)(struct cofi_grad_return_plan *plan, uint32_t epoch, int step, int64_t begin,
                       void *to[2]);
    cof_status (*close)(struct cofi_grad_return_plan *plan, uint32_t epoch, int step, int64_t begin,
                        int64_t end, void *const to[2]);
    cof_status (*sum)(struct cofi_grad_return_plan *plan, uint32_t epoch, int step, int64_t begin,
                      int64_t end);
};

extern const struct cofi_gr_transport cofi_gr_push, cofi_gr_pull, cofi_gr_caller;

struct cofi_gr_call;

/* What the devices do, each in its own way. */
struct cofi_gr_backend {
    const char *name; /* "cpu", "cuda" */
    /* n_purposes, acks, tagged_bytes, local_bytes and has_arena, when all other sizes are known.
     * Local; COF_ERR_UNSUPPORTED for what only the other one can. */
    cof_status (*lay_out)(struct cofi_grad_return_plan *plan);
    /* Words for the describe line. */
    void (*describe)(const struct cofi_grad_return_plan *plan, char *text, size_t bytes);
    cof_status (*open)(struct cofi_grad_return_plan *plan); /* local, before the plan is bound */
    /* Of a half-opened one too. False: work that nothing ends still uses what the plan has. */
    bool (*close)(struct cofi_grad_return_plan *plan);
    /* *is_made_out: something was enqueued, and the plan goes on to its next call. */
    cof_status (*run)(struct cofi_grad_return_plan *plan, const struct cofi_gr_call *call,
                      cof_stream stream, bool *is_made_out);
};

extern const struct cofi_gr_backend cofi_gr_cpu;
/* NULL in a build without CUDA. */
const struct cofi_gr_backend *cofi_gr_cuda(void);

/* The caller's memory, by rank. */
struct cofi_gr_peers {
    char **base[2];
    char **ready;
    size_t ready_stride;
};

struct cofi_grad_return_plan {
    struct cof_plan base;
    cof_grad_return_params params; /* defaults filled in */
    cof_layout layout;
    int rank, n_ranks;
    int64_t local_rows, max_rows;
    int64_t dim[2];
    enum cofi_elem elem, wire, partial; /* of outputs, on the way, of partials */
    const struct cofi_gr_backend *backend;
    const struct cofi_gr_transport *transport; /* of devices: its name */
    /* lay_out's. */
    size_t payload_bytes, tagged_bytes; /* in the arena */
    size_t local_bytes;
    int n_purposes;
    uint32_t acks;  /* bit per purpose */
    bool has_arena; /* on the CPU none with the caller's memory */
    struct cofi_binding binding;
    struct cofi_grad_exchange home;  /* push; of pull and the caller's memory: sums and ranks */
    struct cofi_kv_buffer published; /* pull: max_rows rows for every owner, in the arena */
    struct cofi_kv_buffer staging;   /* pull: what was read */
    struct cofi_gr_peers peers;
    struct cofi_cpu_stream *comm;    /* sums */
    void *memory;                    /* one block behind all local pointers */
    void *state;                     /* a device's */
    _Atomic bool is_closing;         /* ends waits in the caller's memory, which know no poison */
    /* Of the calls as they are made. */
    int section;         /* by_section: 0 .. P-1, of the next call */
    uint64_t whole;      /* hash of the writers of the whole in hand */
    uint32_t last_epoch; /* the caller's */
    uint64_t n_empty;
};

/* The steps first .. last of a call; step P is the own rows. */
struct cofi_gr_call {
    struct cofi_gr_view partial, out;
    const cof_grad_return_args *args;
    uint64_t writers; /* hash of them */
    int first, last;
};
/* grad_return_run.c */
cof_status cofi_gr_enqueue(struct cofi_grad_return_plan *plan, const struct cofi_gr_call *call,
                           struct cofi_cpu_stream *stream);

/* Rows in a block, as cofi_kv_take. */
struct cofi_kv_buffer cofi_gr_take_rows(const struct cofi_grad_return_plan *plan, char *base,
                                        size_t *used, int64_t rows);
/* Bytes from epoch word to epoch word. */
size_t cofi_gr_ready_stride(const cof_grad_return_peers *peers);

/* Bit h: `writer` contributes to half h of `owner`. */
unsigned cofi_gr_halves(const cof_layout *layout, const cof_grad_return_args *args, int writer,
                        int owner);

/* The owner's local rows of these halves, padding between them included. */
void cofi_gr_rows(const cof_layout *layout, int owner, unsigned halves, int64_t *begin,
                  int64_t *end);

#endif
