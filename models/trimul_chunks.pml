/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Chunked hand-over of a triangle update: tokens to features, contraction, features to tokens.
 *
 * Three streams per rank. F projects chunk by chunk and stores the tiles of a and b at the owners
 * of the chunk's features; E contracts a chunk when those of all writers are there and stores tiles
 * of tri at the owners of their tokens; B reads tri when that of all chunks is there. A ready word
 * for each writer and chunk follows its tiles and is waited for by equality. After its last read of
 * a and b in call e each rank tells all ab_free = e, after that of tri tri_free = e; tiles and
 * words of call e + 1 go to a peer only then. What is read is looked at when reading begins and
 * when it ends, so that a store in between shows.
 *
 * How many chunks a rank has features in, and whether it has tokens, is free (TOKENS_PER_CALL: in
 * each call, and tiles lie elsewhere; ALL_WORK: all have all). Rank 0 has features in all chunks:
 * ranks are alike. Ranks that have none send all words and wait for all the same (ONLY_WITH_DATA:
 * words are sent and waited for only where there are tiles). Calls are numbered by their epoch,
 * from 1.
 *
 * The streams do not wait for each other, which allows more than a source does. JOIN: a rank begins
 * a call after its last one has ended. ONE_STREAM: nor are two steps of a rank at work at once; the
 * order is free, but who has begun a step waits in it. AT_ONCE: a tile is there together with its
 * word, fewer states.
 *
 * JOIN makes tri_free needless: whoever gets tiles of tri has sent tiles of a and b in that call,
 * after its last one. Where in addition the words of tri wait for the last read of their chunk
 * (WORDS_AFTER_CHUNK), ab_free is needless too: who ends a call has the last words of all. That is
 * not so with ONLY_WITH_DATA, where a rank without tokens ends at once. To wait for tri_free before
 * front tiles are sent (TRI_FREE_BEFORE_FRONT) is no circle of waits, only later than need be.
 *
 * check: holds P=2 CALLS=3
 * check: holds TOKENS_PER_CALL AT_ONCE P=2 CALLS=3
 * check: holds AT_ONCE CHUNKS=1 P=3 CALLS=2
 * check: holds AT_ONCE ALL_WORK P=3 CALLS=3
 * check: holds JOIN AT_ONCE ALL_WORK P=3 CALLS=3
 * check: holds ONE_STREAM TOKENS_PER_CALL P=2 CALLS=3
 * check: holds ONE_STREAM ALL_WORK P=3 CALLS=3
 * check: holds JOIN ONLY_WITH_DATA TOKENS_PER_CALL AT_ONCE P=2 CALLS=2
 * check: holds TRI_FREE_BEFORE_FRONT P=2 CALLS=3
 * check: holds ONE_STREAM TRI_FREE_BEFORE_FRONT ALL_WORK P=3 CALLS=3
 * check: holds JOIN NO_TRI_FREE_WAIT TOKENS_PER_CALL P=2 CALLS=3
 * check: holds JOIN NO_TRI_FREE_WAIT AT_ONCE ALL_WORK P=3 CALLS=3
 * check: holds JOIN ONLY_WITH_DATA NO_TRI_FREE_WAIT TOKENS_PER_CALL AT_ONCE P=2 CALLS=2
 * check: holds JOIN WORDS_AFTER_CHUNK NO_AB_FREE_WAIT NO_TRI_FREE_WAIT TOKENS_PER_CALL P=2 CALLS=3
 * check: holds JOIN WORDS_AFTER_CHUNK NO_AB_FREE_WAIT NO_TRI_FREE_WAIT AT_ONCE ALL_WORK P=3 CALLS=3
 * check: holds JOIN WORDS_AFTER_CHUNK NO_AB_FREE_WAIT NO_TRI_FREE_WAIT AT_ONCE CHUNKS=1 P=3 CALLS=2
 * check: refuted NO_AB_FREE_WAIT P=2 CALLS=2
 * check: refuted ONE_STREAM NO_AB_FREE_WAIT ALL_WORK P=2 CALLS=2
 * check: refuted NO_TRI_FREE_WAIT P=2 CALLS=2
 * check: refuted JOIN ONLY_WITH_DATA WORDS_AFTER_CHUNK NO_AB_FREE_WAIT TOKENS_PER_CALL P=2 CALLS=2
 * check: refuted WORDS_AFTER_CHUNK NO_AB_FREE_WAIT P=2 CALLS=2
 * check: refuted ONE_STREAM AB_FREE_BEFORE_READ ALL_WORK P=2 CALLS=2
 * check: refuted TRI_FREE_BEFORE_READ ALL_WORK P=2 CALLS=2
 * check: refuted ONE_STREAM AB_READY_BEFORE_DATA ALL_WORK P=2 CALLS=1
 * check: refuted ONE_STREAM TRI_READY_BEFORE_DATA ALL_WORK P=2 CALLS=1
 * check: refuted ONE_STREAM SHARED_CHUNK_WORDS ALL_WORK P=2 CALLS=1
 * check: refuted ONE_STREAM NO_FEATURES_NO_FREE P=2 CALLS=2
 * check: refuted NO_TOKENS_NO_FREE P=2 CALLS=2
 * check: refuted WORDS_AT_ONCE_WITHOUT_DATA P=2 CALLS=2 */

#ifndef CHUNKS
#define CHUNKS 2
#endif
#define PEER(r, i) (((r) + 1 + (i)) % P) /* i = P - 1: the rank itself */
#define AT(slab, writer) ((slab) * P + (writer))
#ifdef TOKENS_PER_CALL
#define N_TOKENS CALLS
#else
#define N_TOKENS 1
#endif
#define HAS_TOKENS(e, r) ((tokens[(N_TOKENS == 1 -> 0 : (e) - 1)] >> (r)) & 1)
#define HAS_CHUNK(r, c) ((c) < n_chunks[r])

#ifdef SHARED_CHUNK_WORDS
#define WORD(slab, writer, c) (AT(slab, writer) * CHUNKS)
#else
#define WORD(slab, writer, c) (AT(slab, writer) * CHUNKS + (c))
#endif
/* Where sizes change, a tile lies where one of another writer or chunk lay in the last call. */
#ifdef TOKENS_PER_CALL
#define TILE(e, slab, writer, c)                                                                   \
    ((slab) * P * CHUNKS + ((writer) * CHUNKS + (c) + (e)) % (P * CHUNKS))
#else
#define TILE(e, slab, writer, c) (AT(slab, writer) * CHUNKS + (c))
#endif

byte ab[P * P * CHUNKS], tri[P * P * CHUNKS]; /* epoch of the tiles that lie there */
byte ab_ready[P * P * CHUNKS], tri_ready[P * P * CHUNKS];
byte ab_free[P * P], tri_free[P * P];
byte n_chunks[P];
byte tokens[N_TOKENS]; /* by call: a bit for each rank that has some */
byte n_fronts[P], n_contracted[P], n_calls[P]; /* chunks and calls done, counted for JOIN */

/* ---- who sends words to whom ---- */

#define AB_TILES(e, owner, writer, c) (HAS_TOKENS(e, writer) && HAS_CHUNK(owner, c))
#define TRI_TILES(e, owner, writer, c) (HAS_TOKENS(e, owner) && HAS_CHUNK(writer, c))
#ifdef ONLY_WITH_DATA
#define AB_WORD(e, owner, writer, c) AB_TILES(e, owner, writer, c)
#define TRI_WORD(e, owner, writer, c) TRI_TILES(e, owner, writer, c)
#else
#define AB_WORD(e, owner, writer, c) true
#define TRI_WORD(e, owner, writer, c) true
#endif

/* ---- waits ---- */

#ifdef NO_AB_FREE_WAIT
#define AB_IS_FREE(e, r, owner) true
#else
#define AB_IS_FREE(e, r, owner) (ab_free[AT(r, owner)] >= (e) - 1)
#endif
#ifdef NO_TRI_FREE_WAIT
#define TRI_IS_FREE(e, r, owner) true
#else
#define TRI_IS_FREE(e, r, owner) (tri_free[AT(r, owner)] >= (e) - 1)
#endif
#ifdef TRI_FREE_BEFORE_FRONT
#define FRONT_MAY_GO(e, r, owner) (AB_IS_FREE(e, r, owner) && TRI_IS_FREE(e, r, owner))
#else
#define FRONT_MAY_GO(e, r, owner) AB_IS_FREE(e, r, owner)
#endif
#ifdef WORDS_AT_ONCE_WITHOUT_DATA
#define MAY_SEND_AB(e, r, owner, c) (FRONT_MAY_GO(e, r, owner) || !AB_TILES(e, owner, r, c))
#else
#define MAY_SEND_AB(e, r, owner, c) (FRONT_MAY_GO(e, r, owner) || !AB_WORD(e, owner, r, c))
#endif
#define MAY_SEND_TRI(e, r, owner, c) (TRI_IS_FREE(e, r, owner) || !TRI_WORD(e, owner, r, c))

#define AB_FROM(e, r, w, c)                                                                        \
    ((w) >= P || !AB_WORD(e, r, (w) % P, c) || ab_ready[WORD(r, (w) % P, c)] == (e))
#define AB_IS_THERE(e, r, c) (AB_FROM(e, r, 0, c) && AB_FROM(e, r, 1, c) && AB_FROM(e, r, 2, c))
#define TRI_FROM(e, r, w, c)                                                                       \
    ((w) >= P || !TRI_WORD(e, r, (w) % P, c) || tri_ready[WORD(r, (w) % P, c)] == (e))
#define TRI_CHUNK_IS_THERE(e, r, c)                                                                \
    (TRI_FROM(e, r, 0, c) && TRI_FROM(e, r, 1, c) && TRI_FROM(e, r, 2, c))
#define TRI_IS_THERE(e, r) (TRI_CHUNK_IS_THERE(e, r, 0) && TRI_CHUNK_IS_THERE(e, r, CHUNKS - 1))

/* ---- whose turn it is ---- */

#define ANYBODY 0
#define FRONT 1
#define CONTRACTION 2
#define BACK 3
#ifdef ONE_STREAM
#define JOIN
byte turn[P];
#define MAY_WORK(r, who) (turn[r] == (who))
#define END_OF_STEP(r) turn[r] = ANYBODY
#else
#define MAY_WORK(r, who) true
#define END_OF_STEP(r) skip
#endif

#ifdef JOIN
#define MAY_BEGIN(e, r)                                                                            \
    (n_calls[r] + 1 >= (e) && n_fronts[r] >= ((e) - 1) * CHUNKS &&                                 \
     n_contracted[r] >= ((e) - 1) * CHUNKS)
#define COUNT(counter) counter++
#else
#define MAY_BEGIN(e, r) true
#define COUNT(counter) skip
#endif

/* ---- F ---- */

inline store_ab(e, r, owner, c)
{
    if
    :: AB_TILES(e, owner, r, c) -> ab[TILE(e, owner, r, c)] = e
    :: else
    fi
}

inline announce_ab(e, r, owner, c)
{
    if
    :: AB_WORD(e, owner, r, c) -> ab_ready[WORD(owner, r, c)] = e
    :: else
    fi
}

inline next_front()
{
    i++;
    if
    :: i == P ->
        i = 0;
        c++;
        COUNT(n_fronts[r]);
        END_OF_STEP(r)
    :: else
    fi;
    if
    :: c == CHUNKS -> c = 0; e++
    :: else
    fi
}

proctype front(byte r)
{
    byte e = 1, c, i;
#ifndef AT_ONCE
    bool half_done;
#endif
    do
#ifdef AT_ONCE
    :: d_step {
            e <= CALLS && MAY_WORK(r, FRONT) && MAY_BEGIN(e, r) &&
                MAY_SEND_AB(e, r, PEER(r, i), c) ->
            store_ab(e, r, PEER(r, i), c);
            announce_ab(e, r, PEER(r, i), c);
            next_front()
        }
#else
    :: d_step {
            e <= CALLS && !half_done && MAY_WORK(r, FRONT) && MAY_BEGIN(e, r) &&
                MAY_SEND_AB(e, r, PEER(r, i), c) ->
#ifdef AB_READY_BEFORE_DATA
            announce_ab(e, r, PEER(r, i), c);
#else
            store_ab(e, r, PEER(r, i), c);
#endif
            half_done = true
        }
    :: d_step {
            half_done ->
#ifdef AB_READY_BEFORE_DATA
            store_ab(e, r, PEER(r, i), c);
#else
            announce_ab(e, r, PEER(r, i), c);
#endif
            half_done = false;
            next_front()
        }
#endif
    :: e > CALLS -> break
    od
}

/* ---- E ---- */

inline look_at_ab(e, r, c)
{
    for (w : 0 .. P - 1) {
        assert(!AB_TILES(e, r, w, c) || ab[TILE(e, r, w, c)] == e)
    }
    w = 0
}

inline tell_ab_free(e, r)
{
#ifdef NO_FEATURES_NO_FREE
    if
    :: n_chunks[r] == 0
    :: else ->
#endif
        for (w : 0 .. P - 1) {
            ab_free[AT(w, r)] = e
        }
#ifdef NO_FEATURES_NO_FREE
    fi;
#endif
    w = 0
}

inline store_tri(e, r, owner, c)
{
    if
    :: TRI_TILES(e, owner, r, c) -> tri[TILE(e, owner, r, c)] = e
    :: else
    fi
}

inline announce_tri(e, r, owner, c)
{
    if
    :: TRI_WORD(e, owner, r, c) -> tri_ready[WORD(owner, r, c)] = e
    :: else
    fi
}

inline announce_tri_of_tile(e, r, owner, c)
{
#ifdef WORDS_AFTER_CHUNK
    if
    :: i == P - 1 ->
        for (w : 0 .. P - 1) {
            announce_tri(e, r, w, c)
        }
        w = 0
    :: else
    fi
#else
    announce_tri(e, r, owner, c)
#endif
}

inline next_tile()
{
    i++;
    if
    :: i == P ->
        i = 0;
        reads = false;
        c++;
        COUNT(n_contracted[r]);
        END_OF_STEP(r)
    :: else
    fi;
    if
    :: c == CHUNKS -> c = 0; e++
    :: else
    fi
}

/* The last look of a tile is one step with the store of its result. */
inline end_of_reading()
{
    look_at_ab(e, r, c);
#ifndef AB_FREE_BEFORE_READ
    if
    :: c == CHUNKS - 1 && i == P - 1 -> tell_ab_free(e, r)
    :: else
    fi
#endif
}

proctype contraction(byte r)
{
    byte e = 1, c, i, w;
    bool reads;
#ifndef AT_ONCE
    bool half_done;
#endif
    do
    :: d_step {
            e <= CALLS && !reads && MAY_WORK(r, CONTRACTION) && MAY_BEGIN(e, r) &&
                AB_IS_THERE(e, r, c) ->
            look_at_ab(e, r, c);
#ifdef AB_FREE_BEFORE_READ
            if
            :: c == CHUNKS - 1 -> tell_ab_free(e, r)
            :: else
            fi;
#endif
            reads = true
        }
#ifdef AT_ONCE
    :: d_step {
            reads && MAY_SEND_TRI(e, r, PEER(r, i), c) ->
            end_of_reading();
            store_tri(e, r, PEER(r, i), c);
            announce_tri_of_tile(e, r, PEER(r, i), c);
            next_tile()
        }
#else
    :: d_step {
            reads && !half_done && MAY_SEND_TRI(e, r, PEER(r, i), c) ->
            end_of_reading();
#ifdef TRI_READY_BEFORE_DATA
            announce_tri_of_tile(e, r, PEER(r, i), c);
#else
            store_tri(e, r, PEER(r, i), c);
#endif
            half_done = true
        }
    :: d_step {
            half_done ->
#ifdef TRI_READY_BEFORE_DATA
            store_tri(e, r, PEER(r, i), c);
#else
            announce_tri_of_tile(e, r, PEER(r, i), c);
#endif
            half_done = false;
            next_tile()
        }
#endif
    :: e > CALLS -> break
    od
}

/* ---- B ---- */

inline look_at_tri(e, r)
{
    for (w : 0 .. P - 1) {
        for (c : 0 .. CHUNKS - 1) {
            assert(!TRI_TILES(e, r, w, c) || tri[TILE(e, r, w, c)] == e)
        }
    }
    w = 0;
    c = 0
}

inline tell_tri_free(e, r)
{
#ifdef NO_TOKENS_NO_FREE
    if
    :: !HAS_TOKENS(e, r)
    :: else ->
#endif
        for (w : 0 .. P - 1) {
            tri_free[AT(w, r)] = e
        }
#ifdef NO_TOKENS_NO_FREE
    fi;
#endif
    w = 0
}

proctype back(byte r)
{
    byte e = 1, c, w;
    bool reads;
    do
    :: d_step {
            e <= CALLS && !reads && MAY_WORK(r, BACK) && MAY_BEGIN(e, r) && TRI_IS_THERE(e, r) ->
            look_at_tri(e, r);
#ifdef TRI_FREE_BEFORE_READ
            tell_tri_free(e, r);
#endif
            reads = true
        }
    :: d_step {
            reads ->
            look_at_tri(e, r);
#ifndef TRI_FREE_BEFORE_READ
            tell_tri_free(e, r);
#endif
            reads = false;
            COUNT(n_calls[r]);
            END_OF_STEP(r);
            e++
        }
    :: e > CALLS -> break
    od
}

#ifdef ONE_STREAM
/* Who is next: chunks in order, each projected before it is contracted. */
proctype order(byte r)
{
    do
    :: atomic {
            turn[r] == ANYBODY && n_calls[r] < CALLS ->
            if
            :: n_fronts[r] < (n_calls[r] + 1) * CHUNKS -> turn[r] = FRONT
            :: n_contracted[r] < n_fronts[r] -> turn[r] = CONTRACTION
            :: n_contracted[r] == (n_calls[r] + 1) * CHUNKS -> turn[r] = BACK
            fi
        }
    :: n_calls[r] == CALLS -> break
    od
}
#endif

init {
    byte r, e, n;
    atomic {
        n_chunks[0] = CHUNKS;
        for (r : 1 .. P - 1) {
#ifdef ALL_WORK
            n = CHUNKS;
#else
            select (n : 0 .. CHUNKS);
#endif
            n_chunks[r] = n
        }
        for (e : 0 .. N_TOKENS - 1) {
#ifdef ALL_WORK
            n = (1 << P) - 1;
#else
            select (n : 1 .. (1 << P) - 1);
#endif
            tokens[e] = n
        }
        for (r : 0 .. P - 1) {
            run front(r);
            run contraction(r);
            run back(r);
#ifdef ONE_STREAM
            run order(r);
#endif
        }
        r = 0;
        e = 0;
        n = 0
    }
}
