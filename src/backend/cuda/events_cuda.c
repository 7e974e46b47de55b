/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Events without anything to destroy: each device has a ring of them, used in turn. A ticket names
 * device and turn, so that one whose event has been recorded again since is found out. */
#include <pthread.h>
#include <stdlib.h>

#include "backend/cuda/device_cuda.h"

#define N_EVENTS 1024
#define TURN_BITS 48

struct ring {
    cudaEvent_t event[N_EVENTS]; /* made when its turn comes first */
    uint64_t turn[N_EVENTS];     /* the last one that was recorded; 0: none, or it is on its way */
    bool is_busy[N_EVENTS];      /* a thread records it, out of the lock */
    uint64_t last;
};

/* Not held in calls that enqueue: where a stream's queue is full these wait, maybe for what another
 * thread has yet to enqueue. A child of fork, which may find it held, is refused before. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ring *rings[COFI_CUDA_MAX_DEVICES];

/* Under the lock. */
static cof_status ring_of(int device, struct ring **out)
{
    if (!rings[device])
        rings[device] = calloc(1, sizeof *rings[device]);
    *out = rings[device];
    COF_FAIL_IF(!*out, COF_ERR_NOMEM, "event: no memory");
    return COF_OK;
}

/* Under the lock, in the device's context: the next event that no other thread records. */
static cof_status take_event(int device, struct ring **ring_out, uint64_t *turn_out)
{
    struct ring *ring;
    COF_TRY(ring_of(device, &ring));
    uint64_t turn = ring->last + 1;
    while (ring->is_busy[turn % N_EVENTS] && turn < ring->last + N_EVENTS)
        turn++;
    const size_t i = turn % N_EVENTS;
    COF_FAIL_IF(ring->is_busy[i], COF_ERR_BUSY, "event: threads wait to record all %d of device %d",
                N_EVENTS, device);
    if (!ring->event[i])
        COF_CUDA(cudaEventCreateWithFlags(&ring->event[i], cudaEventDisableTiming));
    ring->last = turn;
    ring->turn[i] = 0;
    ring->is_busy[i] = true;
    *ring_out = ring;
    *turn_out = turn;
    return COF_OK;
}

/* In the device's context. */
static cof_status record(int device, cudaStream_t stream, uint64_t *ticket_out)
{
    struct ring *ring = NULL;
    uint64_t turn = 0;
    pthread_mutex_lock(&lock);
    cof_status status = take_event(device, &ring, &turn);
    pthread_mutex_unlock(&lock);
    COF_TRY(status);
    const size_t i = turn % N_EVENTS;
    cudaError_t error = cudaEventRecord(ring->event[i], stream);
    pthread_mutex_lock(&lock);
    ring->is_busy[i] = false;
    ring->turn[i] = error == cudaSuccess ? turn : 0;
    pthread_mutex_unlock(&lock);
    COF_CUDA(error);
    *ticket_out = (uint64_t)device << TURN_BITS | turn;
    return COF_OK;
}

cof_status cofi_cuda_event_record(void *stream, uint64_t *ticket_out)
{
    struct cofi_cuda_scope scope;
    int device;
    COF_TRY(cofi_cuda_enter_stream(stream, &scope, &device));
    cof_status status = record(device, stream, ticket_out);
    cofi_cuda_leave(&scope);
    return status;
}

/* Under the lock. */
static cof_status find_in_ring(uint64_t ticket, cudaEvent_t *event_out)
{
    uint64_t device = ticket >> TURN_BITS, turn = ticket & ((UINT64_C(1) << TURN_BITS) - 1);
    const struct ring *ring = device < COFI_CUDA_MAX_DEVICES ? rings[device] : NULL;
    COF_FAIL_IF(!ring || turn == 0 || turn > ring->last, COF_ERR_INVALID,
                "event: sequence %llu is of no event that was recorded",
                (unsigned long long)ticket);
    COF_FAIL_IF(ring->turn[turn % N_EVENTS] != turn, COF_ERR_INVALID,
                "event: sequence %llu was overwritten: wanted one of the last %d events recorded "
                "on its device", (unsigned long long)ticket, N_EVENTS);
    *event_out = ring->event[turn % N_EVENTS];
    return COF_OK;
}

static cof_status find_event(uint64_t ticket, cudaEvent_t *event_out)
{
    pthread_mutex_lock(&lock);
    cof_status status = find_in_ring(ticket, event_out);
    pthread_mutex_unlock(&lock);
    return status;
}

/* The event must still be the ticket's when the stream has it. */
static cof_status wait(cudaStream_t stream, uint64_t ticket)
{
    cudaEvent_t event;
    COF_TRY(find_event(ticket, &event));
    COF_CUDA(cudaStreamWaitEvent(stream, event, 0));
    return find_event(ticket, &event);
}

cof_status cofi_cuda_event_wait(void *stream, uint64_t ticket)
{
    struct cofi_cuda_scope scope;
    int device;
    COF_TRY(cofi_cuda_enter_stream(stream, &scope, &device));
    cof_status status = wait(stream, ticket);
    cofi_cuda_leave(&scope);
    return status;
}
