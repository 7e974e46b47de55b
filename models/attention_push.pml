/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Keys by push: the ring of src/ops/attention/attention_schedule_cuda.c.
 *
 * Step i = 1 .. P-1 of a call: rank r puts its keys into slot (i-1) mod 2 of the reader r+i, and a
 * section reads what the owner r-i put into its own; that of the own keys, which nobody else
 * writes, is left out. S begins the call, and before each section has a turn, which signals and
 * waits; C has the puts. A put is two stores, and a section looks twice. Which keys are seen is
 * free in every call, and known to both ranks. The epochs of the calls have a gap, where the arena
 * did something else in between.
 *
 * AT_ONCE: a put and a section are one step each, for more ranks and calls.
 *
 * Words for all others are stored, and waited for, in one step: they only grow.
 *
 * check: holds P=2 CALLS=4
 * check: holds P=3 CALLS=2
 * check: full holds P=3 CALLS=3
 * check: holds AT_ONCE P=4 CALLS=1
 * check: full holds P=4 CALLS=1
 * check: full holds AT_ONCE P=4 CALLS=2
 * check: refuted NO_BEGIN_WAIT P=2 CALLS=2
 * check: refuted WAIT_EPOCH_BEFORE P=2 CALLS=2
 * check: refuted NO_SLOT_WAIT P=4 CALLS=1
 * check: refuted PUT_BEFORE_TURN P=4 CALLS=1
 * check: refuted NO_READY_WAIT P=2 CALLS=1
 * check: refuted NO_SENT_WAIT P=2 CALLS=1
 * check: refuted WAIT_BEFORE_SIGNAL P=2 CALLS=1
 * check: refuted ACK_BEFORE_SECTION P=4 CALLS=1
 * check: refuted LAST_ACK_OF_SEEN P=2 CALLS=3 */

#define AT(slab, writer) ((slab) * P + (writer))
#define STEP(c, i) (((c) - 1) * (P - 1) + (i)) /* number of step i of call c, from 1 */
#define TAG(c, w, i) (((c) * P + (w)) * P + (i)) /* what owner w puts in step i of call c */
#define EPOCH(c) ((c) <= 1 -> (c) : (c) + 1)     /* 0 before the first call, then 1, 3, 4 */
#define BUSY 255                                 /* slot: a put is at work */

#define OWNER(r, i) (((r) + P - (i)) % P)
#define READER(r, i) (((r) + (i)) % P)
#define SLOT(reader, i) ((reader) * 2 + (((i) - 1) & 1))

#define FULL 0   /* who sees what: every reader all owners */
#define CAUSAL 1 /* those before it */
#define LOW 2    /* those behind it */
#define SEES(c, r, w)                                                                              \
    (sight[c] == FULL || (sight[c] == CAUSAL && (w) < (r)) || (sight[c] == LOW && (w) > (r)))
#define COMES(c, r, i) ((i) < P && SEES(c, r, OWNER(r, i)))
#define GOES(c, r, i) ((i) < P && SEES(c, READER(r, i), r))

#if defined(NO_BEGIN_WAIT)
#define CREDIT(c) 0
#elif defined(WAIT_EPOCH_BEFORE)
#define CREDIT(c) (EPOCH(c) - 1)
#else
#define CREDIT(c) EPOCH((c) - 1)
#endif

#ifdef NO_SENT_WAIT
#define HAS_LEFT(r, c, i) true
#else
#define HAS_LEFT(r, c, i) (!GOES(c, r, i) || sent[r] >= STEP(c, i))
#endif

#ifdef NO_READY_WAIT
#define IS_READY(r, c, i) true
#else
#define IS_READY(r, c, i) (!COMES(c, r, i) || ready[AT(r, OWNER(r, i))] == EPOCH(c))
#endif

#ifdef NO_SLOT_WAIT
#define IS_FREE(r, c, next) true
#else
#define IS_FREE(r, c, next)                                                                        \
    ((next) <= 2 || !GOES(c, r, next) || ack[AT(r, READER(r, next))] >= EPOCH(c))
#endif

/* The owner of this step is told in the turn before, when the section before that one is done. */
#ifdef ACK_BEFORE_SECTION
#define FREED(i) ((i) + 2)
#else
#define FREED(i) ((i) + 1)
#endif

#ifdef PUT_BEFORE_TURN
#define MAY_PUT(r, c, i) (begun[r] >= (c))
#else
#define MAY_PUT(r, c, i) (begun[r] >= (c) && ((i) <= 2 || turned[r] >= STEP(c, (i) - 1)))
#endif

byte sight[CALLS + 1];
byte slot[P * 2];
byte ready[P * P]; /* KV_READY, stored by the owner */
byte ack[P * P];   /* KV_ACK, stored by the reader */
byte begun[P], turned[P], sent[P]; /* events between the two streams of a rank */

#define ALL_ACKED(r, c)                                                                            \
    (ack[AT(r, READER(r, 1))] >= CREDIT(c) && (P < 3 || ack[AT(r, READER(r, 2))] >= CREDIT(c)) &&  \
     (P < 4 || ack[AT(r, READER(r, 3))] >= CREDIT(c)) &&                                           \
     (P < 5 || ack[AT(r, READER(r, 4))] >= CREDIT(c)))

inline tell(r, c, i)
{
    if
    :: GOES(c, r, i) -> ready[AT(READER(r, i), r)] = EPOCH(c)
    :: else
    fi;
    if
    :: FREED(i) > 2 && COMES(c, r, FREED(i)) -> ack[AT(OWNER(r, FREED(i)), r)] = EPOCH(c)
    :: else
    fi
}

inline tell_all(r, c)
{
    o = 0;
    do
    :: o < P ->
        if
#ifdef LAST_ACK_OF_SEEN
        :: o != r && SEES(c, r, o) -> ack[AT(o, r)] = EPOCH(c)
#else
        :: o != r -> ack[AT(o, r)] = EPOCH(c)
#endif
        :: else
        fi;
        o++
    :: else -> break
    od;
    o = 0
}

inline next_put(r, c, i)
{
    sent[r]++;
    if
    :: i + 1 < P -> i++
    :: else -> i = 1; c++
    fi
}

inline look(r, c, i)
{
    if
    :: COMES(c, r, i) -> assert(slot[SLOT(r, i)] == TAG(c, OWNER(r, i), i))
    :: else
    fi
}

#ifdef WAIT_BEFORE_SIGNAL
#define SIGNAL 2
#define WAIT 1
#else
#define SIGNAL 1
#define WAIT 2
#endif
#define BEGIN 0
#define LOOK 3
#ifdef AT_ONCE
#define LOOK_AGAIN LOOK
#else
#define LOOK_AGAIN 4
#endif
#define FINISH 5

proctype stream_s(byte r)
{
    byte c = 1, i, o, at = BEGIN;
    do
    :: d_step { at == BEGIN && c <= CALLS && ALL_ACKED(r, c) -> begun[r] = c; i = 1; at = 1 }
    :: d_step { at == SIGNAL && HAS_LEFT(r, c, i) -> tell(r, c, i); at++ }
    :: d_step {
            at == WAIT && IS_READY(r, c, i) && IS_FREE(r, c, i + 1) ->
            turned[r]++;
            at++
        }
#ifndef AT_ONCE
    :: d_step { at == LOOK -> look(r, c, i); at = LOOK_AGAIN }
#endif
    :: d_step { at == LOOK_AGAIN -> look(r, c, i); i++; at = (i < P -> 1 : FINISH) }
    :: d_step { at == FINISH -> tell_all(r, c); c++; at = BEGIN }
    :: at == BEGIN && c > CALLS -> break
    od
}

proctype stream_c(byte r)
{
    byte c = 1, i = 1;
    bool busy;
    do
#ifdef AT_ONCE
    :: d_step {
            c <= CALLS && GOES(c, r, i) && MAY_PUT(r, c, i) ->
            slot[SLOT(READER(r, i), i)] = TAG(c, r, i);
            next_put(r, c, i)
        }
#else
    :: d_step {
            c <= CALLS && !busy && GOES(c, r, i) && MAY_PUT(r, c, i) ->
            slot[SLOT(READER(r, i), i)] = BUSY;
            busy = true
        }
    :: d_step {
            busy ->
            slot[SLOT(READER(r, i), i)] = TAG(c, r, i);
            busy = false;
            next_put(r, c, i)
        }
#endif
    :: d_step { c <= CALLS && !GOES(c, r, i) -> next_put(r, c, i) }
    :: c > CALLS -> break
    od
}

init {
    byte r = 0, c = 1;
    atomic {
        do
        :: c <= CALLS ->
            if
            :: sight[c] = FULL
            :: sight[c] = CAUSAL
            :: sight[c] = LOW
            fi;
            c++
        :: c > CALLS -> break
        od;
        do
        :: r < P -> run stream_s(r); run stream_c(r); r++
        :: r == P -> break
        od
    }
}
