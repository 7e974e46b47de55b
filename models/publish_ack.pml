/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Publish and acknowledge: the forward half of src/ops/attention/attention_ring.c.
 *
 * Every rank owns one buffer and reads those of the others. Two streams per rank: S opens a call
 * (waits for the acks of the last one, copies out, announces) and uses what was fetched; C fetches.
 * A fetch and a section look at their buffer twice, so that a store in between shows. Whether a
 * reader needs the rows of an owner is free in every call (ALL_NEEDED: it does); it acks all the
 * same. Calls are numbered by their epoch, from 1.
 *
 * Acks that are waited for one by one are one step here, and so are the stores of one word to every
 * peer: words only grow, and a peer may look late at any of them, so nobody can tell.
 *
 * check: holds P=2 CALLS=4
 * check: holds P=3 CALLS=3
 * check: refuted NO_ACK_WAIT P=2 CALLS=2
 * check: refuted CREDIT_OFF_BY_ONE P=2 CALLS=2
 * check: refuted ACK_BEFORE_GET P=2 CALLS=2
 * check: refuted ACK_CONTRIBUTORS_ONLY P=2 CALLS=2
 * check: refuted NO_READY_WAIT P=2 CALLS=1
 * check: refuted NO_ARRIVAL_WAIT P=2 CALLS=1
 * check: refuted NO_STAGING_WAIT P=4 CALLS=1 */

#define AT(slab, writer) ((slab) * P + (writer))
#define FETCH(e, i) (((e) - 1) * (P - 1) + (i)) /* number of fetch i of call e, from 1 */
#define OWNER(r, i) (((r) + P - (i)) % P)
#define SKIPPED 254 /* staging: no rows needed */
#define USED 255    /* staging: nothing there any more */

#if defined(NO_ACK_WAIT)
#define CREDIT(e) 0
#elif defined(CREDIT_OFF_BY_ONE)
#define CREDIT(e) ((e) - 2)
#else
#define CREDIT(e) ((e) - 1)
#endif

#ifdef NO_READY_WAIT
#define IS_READY(r, owner, e) true
#else
#define IS_READY(r, owner, e) (ready[AT(r, owner)] == (e))
#endif

#ifdef NO_ARRIVAL_WAIT
#define HAS_ARRIVED(r, e, i) true
#else
#define HAS_ARRIVED(r, e, i) (fetched[r] >= FETCH(e, i))
#endif

#ifdef NO_STAGING_WAIT
#define STAGING_FREE(r, e, i) true
#else
#define STAGING_FREE(r, e, i) ((i) <= 2 || used[r] >= FETCH(e, (i) - 2))
#endif

#ifdef ACK_BEFORE_GET
#define EARLY_ACK(r, e, i) ack[AT(OWNER(r, i), r)] = e
#else
#define EARLY_ACK(r, e, i) skip
#endif

#ifdef ACK_CONTRIBUTORS_ONLY
#define SKIPPING_ACK(r, e, i) skip
#else
#define SKIPPING_ACK(r, e, i) ack[AT(OWNER(r, i), r)] = e
#endif

byte published[P];   /* epoch of the keys that lie there */
byte ready[P * P];   /* KV_READY, stored by the owner */
byte ack[P * P];     /* KV_ACK, stored by the reader */
byte staging[P * 2]; /* epoch and owner of what was fetched */
byte opened[P], fetched[P], used[P]; /* events between the two streams of a rank */

#define ACKED_BY(r, q, epoch) ((q) >= P || (q) == (r) || ack[AT(r, (q) % P)] >= (epoch))
#define ALL_ACKED(r, epoch)                                                                        \
    (ACKED_BY(r, 0, epoch) && ACKED_BY(r, 1, epoch) && ACKED_BY(r, 2, epoch) &&                    \
     ACKED_BY(r, 3, epoch))

inline look_at_staging(r, e, i)
{
    assert(staging[r * 2 + ((i - 1) & 1)] == SKIPPED ||
           staging[r * 2 + ((i - 1) & 1)] == e * P + OWNER(r, i))
}

proctype stream_s(byte r)
{
    byte e = 1, i = 1;
    do
    :: d_step { e <= CALLS && ALL_ACKED(r, CREDIT(e)) -> published[r] = e };
        d_step {
            do
            :: i < P -> ready[AT((r + i) % P, r)] = e; i++
            :: else -> break
            od;
            opened[r] = e;
            i = 1
        };
        do
        :: d_step { i < P && HAS_ARRIVED(r, e, i) -> look_at_staging(r, e, i) };
            d_step {
                look_at_staging(r, e, i);
                staging[r * 2 + ((i - 1) & 1)] = USED;
                used[r]++;
                i++
            }
        :: d_step { i == P -> i = 1; e++ };
            break
        od
    :: e > CALLS -> break
    od
}

inline next_fetch(r, e, i)
{
    fetched[r]++;
    needed = false;
    if
    :: i + 1 < P -> i++
    :: else -> i = 1; e++
    fi
}

proctype stream_c(byte r)
{
    byte e = 1, i = 1;
    bool needed;
    do
    :: atomic {
            e <= CALLS && !needed && opened[r] >= e && STAGING_FREE(r, e, i) ->
            if
            :: needed = true; EARLY_ACK(r, e, i)
#ifndef ALL_NEEDED
            :: staging[r * 2 + ((i - 1) & 1)] = SKIPPED; SKIPPING_ACK(r, e, i); next_fetch(r, e, i)
#endif
            fi
        }
    :: d_step { needed && IS_READY(r, OWNER(r, i), e) -> assert(published[OWNER(r, i)] == e) };
        d_step {
            assert(published[OWNER(r, i)] == e);
            staging[r * 2 + ((i - 1) & 1)] = e * P + OWNER(r, i);
            ack[AT(OWNER(r, i), r)] = e;
            next_fetch(r, e, i)
        }
    :: e > CALLS -> break
    od
}

init {
    byte r = 0;
    atomic {
        do
        :: r < P -> run stream_s(r); run stream_c(r); r++
        :: r == P -> break
        od
    }
}
