/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Chunks of rows with a flag each, in two halves and without acknowledgements (the PIPELINE of
 * allreduce_rmsnorm).
 *
 * A call stores its chunks into each peer's half of the epoch's parity, as plain data, and after
 * each chunk its flag {epoch, digest of T} by a release. A chunk is two words that arrive on their
 * own, in any order, some after their writer has ended the call; its flag arrives after them
 * (AT_ONCE: all is there at once, fewer states). The reader takes the flag by an acquire, compares
 * the digest and looks at each word twice, so that a store in between shows. There is a first chunk
 * in each call: who has finished call n has seen that everybody began n, hence left n - 1, whose
 * half it writes next.
 *
 * Each rank's T, in chunks, is free in each call, and no deadline passes. Ranks that agree never
 * fail; at a disagreement all fail, each by itself and in that call; nobody takes data of another T
 * or call for its own.
 *
 * check: holds P=2 CALLS=3 CHUNKS=2
 * check: holds P=2 CALLS=5 CHUNKS=1
 * check: holds AT_ONCE P=3 CALLS=3 CHUNKS=2
 * check: holds AT_LEAST P=2 CALLS=3 CHUNKS=1
 * check: refuted ONE_HALF P=2 CALLS=2 CHUNKS=1
 * check: refuted FLAG_WITHOUT_HALF P=2 CALLS=2 CHUNKS=1
 * check: refuted DATA_WITHOUT_HALF P=2 CALLS=2 CHUNKS=1
 * check: refuted ONE_HALF AT_LEAST P=2 CALLS=2 CHUNKS=1
 * check: refuted FLAG_FIRST P=2 CALLS=1 CHUNKS=1
 * check: refuted RELAXED_STORE P=2 CALLS=1 CHUNKS=1
 * check: refuted RELAXED_LOAD P=2 CALLS=1 CHUNKS=1
 * check: refuted NO_DIGEST P=2 CALLS=1 CHUNKS=2
 * check: refuted NEXT_CALL_EARLY P=2 CALLS=3 CHUNKS=1 */

#define PEER(r, i) (((r) + (i)) % P)
#define CALL(r, c) ((r) * (CALLS + 2) + (c))

#ifdef ONE_HALF
#define HALF(e) 0
#else
#define HALF(e) ((e) & 1)
#endif
#if defined(FLAG_WITHOUT_HALF)
#define FLAG_HALF(e) 0
#define DATA_HALF(e) HALF(e)
#elif defined(DATA_WITHOUT_HALF)
#define FLAG_HALF(e) HALF(e)
#define DATA_HALF(e) 0
#else
#define FLAG_HALF(e) HALF(e)
#define DATA_HALF(e) HALF(e)
#endif

/* Chunks from 0; a chunk's flag and its two words. */
#define PLACE(slab, writer, half, chunk)                                                           \
    (((((slab) * P + (writer)) * 2 + (half)) * CHUNKS + (chunk)) * 3)
#define N_PLACES (P * P * 2 * CHUNKS * 3)
#define FLAG(slab, writer, e, chunk) PLACE(slab, writer, FLAG_HALF(e), chunk)
#define DATA(slab, writer, e, chunk) (PLACE(slab, writer, DATA_HALF(e), chunk) + 1)

#define VALUE(e, t) ((e) * 4 + (t)) /* of each word of a call, flag or data */
#define NONE 0

#ifdef AT_LEAST
#define IS_THERE(flag, e) (memory[flag] / 4 >= (e))
#else
#define IS_THERE(flag, e) (memory[flag] / 4 == (e))
#endif
#ifdef NO_DIGEST
#define DIFFERS(flag, t) false
#else
#define DIFFERS(flag, t) (memory[flag] % 4 != (t))
#endif

byte memory[N_PLACES];
byte sent[N_PLACES];        /* on its way */
byte size[P * (CALLS + 2)]; /* T in chunks, by rank and call */
byte failed[P];             /* the call in which each rank failed */
byte n_ended;
byte first_disagreement; /* a call; 0: none */

#ifdef AT_ONCE
#define STORE(place, value) memory[place] = value
#else
#define STORE(place, value) sent[place] = value
#endif

inline push_flags(epoch)
{
    for (i : 1 .. P - 1) {
        for (chunk : 0 .. size[CALL(r, epoch)] - 1) {
            STORE(FLAG(PEER(r, i), r, epoch, chunk), VALUE(epoch, size[CALL(r, epoch)]))
        }
    }
    i = 1;
    chunk = 0
}

inline push_data(epoch)
{
    for (i : 1 .. P - 1) {
        for (chunk : 0 .. size[CALL(r, epoch)] - 1) {
            STORE(DATA(PEER(r, i), r, epoch, chunk), VALUE(epoch, size[CALL(r, epoch)]));
            STORE(DATA(PEER(r, i), r, epoch, chunk) + 1, VALUE(epoch, size[CALL(r, epoch)]))
        }
    }
    i = 1;
    chunk = 0
}

#ifdef FLAG_FIRST
#define PUSH(epoch)                                                                                \
    d_step { push_flags(epoch) };                                                                  \
    d_step { push_data(epoch) }
#else
#define PUSH(epoch) d_step { push_data(epoch); push_flags(epoch) }
#endif

#define ON_ITS_WAY(half, chunk)                                                                    \
    (sent[PLACE(p, r, half, chunk) + 1] != NONE || sent[PLACE(p, r, half, chunk) + 2] != NONE)
#if defined(RELAXED_STORE)
#define MAY_COME(half, chunk) true
#elif defined(FLAG_WITHOUT_HALF)
#define MAY_COME(half, chunk) !(ON_ITS_WAY(0, chunk) || ON_ITS_WAY(1, chunk))
#else
#define MAY_COME(half, chunk) !ON_ITS_WAY(DATA_HALF(half), chunk)
#endif

#define ARRIVE(place, condition)                                                                   \
    d_step                                                                                         \
    {                                                                                              \
        sent[place] != NONE && (condition) -> memory[place] = sent[place];                         \
        sent[place] = NONE                                                                         \
    }
#define ARRIVE_CHUNK(half, chunk)                                                                  \
    ::ARRIVE(PLACE(p, r, half, chunk) + 1, true)                                                   \
    ::ARRIVE(PLACE(p, r, half, chunk) + 2, true)                                                   \
    ::ARRIVE(PLACE(p, r, half, chunk), MAY_COME(half, chunk))

/* The way from r to p. */
proctype way(byte r; byte p)
{
end:
    do
        ARRIVE_CHUNK(0, 0)
        ARRIVE_CHUNK(1, 0)
#if CHUNKS > 1
        ARRIVE_CHUNK(0, 1)
        ARRIVE_CHUNK(1, 1)
#endif
    od
}

inline look()
{
    assert(memory[DATA(r, PEER(r, i), e, chunk)] == VALUE(e, t));
    assert(memory[DATA(r, PEER(r, i), e, chunk) + 1] == VALUE(e, t))
}

proctype rank(byte r)
{
    byte e = 1, i, chunk, t, loaded;
    do
    :: e <= CALLS ->
#ifdef NEXT_CALL_EARLY
        if
        :: e == 1 -> PUSH(e)
        :: else -> skip
        fi;
#else
        PUSH(e);
#endif
        d_step { t = size[CALL(r, e)]; i = 1; chunk = 0 };
        do
        :: i < P ->
#ifdef RELAXED_LOAD
            d_step { loaded = memory[DATA(r, PEER(r, i), e, chunk)] };
#endif
            IS_THERE(FLAG(r, PEER(r, i), e, chunk), e);
            if
            :: DIFFERS(FLAG(r, PEER(r, i), e, chunk), t) -> goto ended_badly
            :: else
            fi;
            d_step { look() };
#ifdef NEXT_CALL_EARLY
            /* As with a dependent launch that is let go before the last read. */
            if
            :: i == P - 1 && chunk == t - 1 -> PUSH(e + 1); i = P - 1; chunk = t - 1
            :: else -> skip
            fi;
#endif
            d_step {
                look();
#ifdef RELAXED_LOAD
                assert(loaded == VALUE(e, t));
                loaded = NONE;
#endif
                i = (chunk == t - 1 -> i + 1 : i);
                chunk = (chunk == t - 1 -> 0 : chunk + 1)
            }
        :: i == P -> break
        od;
        e++
    :: e > CALLS -> goto ended
    od;
ended_badly:
    failed[r] = e;
ended:
    n_ended++
}

init {
    byte r, c = 1, t;
    atomic {
        do
        :: c <= CALLS ->
            r = 0;
            do
            :: r < P ->
                select (t : 1 .. CHUNKS);
                size[CALL(r, c)] = t;
                if
                :: first_disagreement == 0 && t != size[CALL(0, c)] -> first_disagreement = c
                :: else -> skip
                fi;
                r++
            :: r == P -> break
            od;
            c++
        :: c > CALLS -> break
        od;
        r = 0;
        do
        :: r < P ->
            size[CALL(r, CALLS + 1)] = 1;
            run rank(r);
            run way(r, PEER(r, 1));
            if
            :: P > 2 -> run way(r, PEER(r, P - 1))
            :: else -> skip
            fi;
            r++
        :: r == P -> break
        od;
        r = 0;
        t = 0
    };
    d_step {
        n_ended == P ->
        do
        :: r < P -> assert(failed[r] == first_disagreement); r++
        :: else -> break
        od
    }
}
