/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The page of a world that its kernels look at while they wait: the teams' abort words and what is
 * known of the ranks. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "symm/engine_cuda.h"

/* Shared, so that fork does not part it from what the device reads. */
static cof_status map_page(cof_world *w, struct cofi_cuda_page *p)
{
    size_t words = COFI_CUDA_TEAMS * sizeof(uint64_t), page = (size_t)sysconf(_SC_PAGESIZE);
    p->bytes = cofi_round_up(words + (size_t)w->n_ranks * sizeof *w->state, page);
    void *at = mmap(NULL, p->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    COF_FAIL_IF(at == MAP_FAILED, COF_ERR_NOMEM, "world: no memory");
    p->host = at;
    COF_CUDA(cudaHostRegister(at, p->bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
    p->is_registered = true;
    void *device = NULL;
    COF_CUDA(cudaHostGetDevicePointer(&device, at, 0));
    p->device = device;
    _Atomic int *state = (_Atomic int *)(void *)(p->host + words);
    for (int r = 0; r < w->n_ranks; r++)
        atomic_store(&state[r], atomic_load(&w->state[r]));
    p->own_state = w->state;
    w->state = state;
    return COF_OK;
}

cof_status cofi_cuda_page_open(cof_world *w)
{
    w->device->page = calloc(1, sizeof *w->device->page);
    COF_FAIL_IF(!w->device->page, COF_ERR_NOMEM, "world: no memory");
    return map_page(w, w->device->page);
}

void cofi_cuda_page_leave(cof_world *w, bool is_child)
{
    const struct cofi_cuda_page *p = w->device->page;
    if (!p)
        return;
    if (p->own_state) {
        for (int r = 0; r < w->n_ranks && !is_child; r++)
            atomic_store(&p->own_state[r], atomic_load(&w->state[r]));
        w->state = p->own_state;
    }
    for (cof_team *t = w->teams; t; t = t->next)
        if (t->abort != &t->own_abort) {
            if (!is_child)
                atomic_store(&t->own_abort, atomic_load(t->abort));
            t->abort = &t->own_abort;
        }
}

void cofi_cuda_page_close(struct cofi_cuda_page *p, bool is_child)
{
    if (!p)
        return;
    if (p->is_registered && !is_child && cudaHostUnregister(p->host) != cudaSuccess)
        cudaGetLastError();
    if (p->host)
        munmap(p->host, p->bytes);
    free(p);
}

_Atomic uint64_t *cofi_cuda_take_abort_word(cof_world *w)
{
    struct cofi_cuda_page *p = w->device->page;
    for (int i = 0; i < COFI_CUDA_TEAMS; i++) {
        bool is_free = false;
        if (!atomic_compare_exchange_strong(&p->is_taken[i], &is_free, true))
            continue;
        _Atomic uint64_t *word = (_Atomic uint64_t *)(void *)p->host + i;
        atomic_store(word, 0);
        return word;
    }
    COF_FAIL(COF_ERR_NOMEM, "team: this world has %d teams, and takes no more", COFI_CUDA_TEAMS);
    return NULL;
}

void cofi_cuda_drop_abort_word(cof_world *w, _Atomic uint64_t *word)
{
    struct cofi_cuda_page *p = w->device->page;
    atomic_store(&p->is_taken[word - (_Atomic uint64_t *)(void *)p->host], false);
}
