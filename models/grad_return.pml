/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Gradients home: the backward half of src/ops/attention/attention_ring.c.
 *
 * Step i = 1 .. P-1 of a call: rank r stores into slot (i-1) mod 2 of the owner r-i, and sums, as
 * an owner, what the writer r+i stored there; P-1 writers share two slots. S stores, C sums. Which
 * ranks contribute is free in every call. The epochs of the calls have a gap, where the arena did
 * something else in between.
 *
 * JOIN: the streams of a rank wait for each other as in the source. Without it they do not, which
 * allows more interleavings than the source does.
 *
 * check: holds P=2 CALLS=3
 * check: holds P=3 CALLS=2
 * check: holds JOIN P=3 CALLS=3
 * check: holds JOIN P=4 CALLS=1
 * check: full holds JOIN P=4 CALLS=2
 * check: refuted NO_ACK_WAIT P=2 CALLS=2
 * check: refuted CREDIT_OFF_BY_ONE P=2 CALLS=2
 * check: refuted LATER_STEPS_OF_LAST_CALL P=4 CALLS=1
 * check: refuted WAIT_EPOCH_BEFORE P=2 CALLS=2
 * check: refuted ACK_SUMMED_WRITER P=4 CALLS=1
 * check: refuted ACK_CONTRIBUTORS_ONLY P=2 CALLS=3
 * check: refuted NO_READY_WAIT P=2 CALLS=1 */

#define AT(slab, writer) ((slab) * P + (writer))
#define STEP(c, i) (((c) - 1) * (P - 1) + (i)) /* number of step i of call c, from 1 */
#define TAG(c, w, i) (((c) * P + (w)) * P + (i)) /* what writer w stores in step i of call c */
#define EPOCH(c) ((c) <= 1 -> (c) : (c) + 1)     /* 0 before the first call, then 1, 3, 4 */

#define OWNER(r, i) (((r) + P - (i)) % P)
#define WRITER(r, i) (((r) + (i)) % P)

#define FULL 0   /* who contributes: every writer */
#define CAUSAL 1 /* writers behind the owner */
#define LOW 2    /* writers before the owner */
#define CONTRIBUTES(c, w, o)                                                                       \
    (writers[c] == FULL || (writers[c] == CAUSAL && (w) >= (o)) ||                                 \
     (writers[c] == LOW && (w) < (o)))

#if defined(NO_ACK_WAIT)
#define CREDIT(c, i) 0
#elif defined(CREDIT_OFF_BY_ONE)
#define CREDIT(c, i) ((i) <= 2 -> EPOCH((c) - 2) : EPOCH(c))
#elif defined(LATER_STEPS_OF_LAST_CALL)
#define CREDIT(c, i) EPOCH((c) - 1)
#elif defined(WAIT_EPOCH_BEFORE)
#define CREDIT(c, i) ((i) <= 2 -> EPOCH(c) - 1 : EPOCH(c))
#else
#define CREDIT(c, i) ((i) <= 2 -> EPOCH((c) - 1) : EPOCH(c))
#endif

/* The step of the writer that the ack after step i goes to: the slot's next user. */
#ifdef ACK_SUMMED_WRITER
#define NEXT(i) (i)
#else
#define NEXT(i) ((i) + 2 < P -> (i) + 2 : (((i) - 1) & 1) + 1)
#endif

#ifdef NO_READY_WAIT
#define IS_READY(r, writer, c) true
#else
#define IS_READY(r, writer, c) (ready[AT(r, writer)] == EPOCH(c))
#endif

#ifdef JOIN
#define CALL_SUMMED(r, c) (summed[r] == STEP(c, P - 1))
#define MAY_SUM(r, c, i) (begun[r] >= (c) && ((i) + 2 >= P || stored[r] >= STEP(c, i)))
#else
#define CALL_SUMMED(r, c) true
#define MAY_SUM(r, c, i) true
#endif

byte writers[CALLS + 1];
byte slot[P * 2];
byte ready[P * P]; /* GRAD_READY, stored by the writer */
byte ack[P * P];   /* GRAD_ACK, stored by the owner */
byte begun[P], stored[P], summed[P]; /* events between the two streams of a rank */

proctype stream_s(byte r)
{
    byte c = 1, i = 1;
    do
    :: d_step {
            c <= CALLS && i < P && CONTRIBUTES(c, r, OWNER(r, i)) &&
                ack[AT(r, OWNER(r, i))] >= CREDIT(c, i) ->
            slot[OWNER(r, i) * 2 + ((i - 1) & 1)] = TAG(c, r, i)
        };
        d_step { ready[AT(OWNER(r, i), r)] = EPOCH(c); stored[r]++; i++ }
    :: d_step { c <= CALLS && i < P && !CONTRIBUTES(c, r, OWNER(r, i)) -> stored[r]++; i++ }
    :: d_step { c <= CALLS && i == P && CALL_SUMMED(r, c) -> i = 1; c++; begun[r] = c }
    :: c > CALLS -> break
    od
}

inline step_summed(r, c, i)
{
    ack[AT(WRITER(r, NEXT(i)), r)] = EPOCH(c);
    next_sum(r, c, i)
}

inline next_sum(r, c, i)
{
    summed[r]++;
    if
    :: i + 1 < P -> i++
    :: else -> i = 1; c++
    fi
}

proctype stream_c(byte r)
{
    byte c = 1, i = 1;
    do
    :: d_step {
            c <= CALLS && MAY_SUM(r, c, i) && CONTRIBUTES(c, WRITER(r, i), r) &&
                IS_READY(r, WRITER(r, i), c) ->
            assert(slot[r * 2 + ((i - 1) & 1)] == TAG(c, WRITER(r, i), i))
        };
        d_step {
            assert(slot[r * 2 + ((i - 1) & 1)] == TAG(c, WRITER(r, i), i));
            step_summed(r, c, i)
        }
    :: d_step {
            c <= CALLS && MAY_SUM(r, c, i) && !CONTRIBUTES(c, WRITER(r, i), r) ->
#ifdef ACK_CONTRIBUTORS_ONLY
            next_sum(r, c, i)
#else
            step_summed(r, c, i)
#endif
        }
    :: c > CALLS -> break
    od
}

init {
    byte r = 0, c = 1;
    atomic {
        do
        :: c <= CALLS ->
            if
            :: writers[c] = FULL
            :: writers[c] = CAUSAL
            :: writers[c] = LOW
            fi;
            c++
        :: c > CALLS -> break
        od;
        do
        :: r < P -> begun[r] = 1; run stream_s(r); run stream_c(r); r++
        :: r == P -> break
        od
    }
}
