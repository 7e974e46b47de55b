/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* A call that does nothing: the epoch stays, the count of empty calls goes on, and the digest of
 * the next call holds that count (design of the signal words; an all-reduce by pushed rows).
 *
 * A call pushes to each peer a signal word {epoch, count of empty calls} and a row tagged with the
 * epoch, both in the slot of the epoch's parity, with no acks: who has finished call n has seen
 * that all ranks started n, hence left n-1. Each rank's calls are empty or not as it likes. A
 * deadline passes when nothing else can happen.
 *
 * A call is good only if all ranks agreed on every call up to it and its rows are this call's; if
 * they agreed on all calls nobody fails, else somebody does.
 *
 * check: holds P=2 CALLS=5
 * check: holds P=3 CALLS=2
 * check: full holds P=3 CALLS=3
 * check: refuted NO_EMPTY_COUNT P=2 CALLS=2
 * check: refuted EMPTY_ADVANCES_EPOCH P=2 CALLS=3
 * check: refuted ONE_SLOT P=2 CALLS=2
 * check: refuted WORD_WITHOUT_SLOT P=2 CALLS=2 */

#define PEER(r, i) (((r) + (i)) % P)
#define CALL(r, c) ((r) * (CALLS + 1) + (c))

#ifdef ONE_SLOT
#define PARITY(e) 0
#else
#define PARITY(e) ((e) & 1)
#endif
#ifdef WORD_WITHOUT_SLOT
#define WORD(slab, writer, e) ((slab) * P + (writer))
#else
#define WORD(slab, writer, e) (PARITY(e) * P * P + (slab) * P + (writer))
#endif
#define ROW(slab, writer, e) (PARITY(e) * P * P + (slab) * P + (writer))

#ifdef NO_EMPTY_COUNT
#define DIGEST(n) 0
#else
#define DIGEST(n) (n)
#endif

bool is_empty[P * (CALLS + 1)];    /* by rank and call, from 1 */
byte word_epoch[2 * P * P], word_digest[2 * P * P];
byte row_epoch[2 * P * P];
byte row_call[2 * P * P];       /* the row's value: the number of its call */
bool poison[P];
bool failed[P];
byte n_ended;
bool disagree[CALLS + 1];       /* in a call up to this one */

/* Nobody learns of it in part: poison.pml shows how. */
inline fail(r)
{
    d_step {
        for (j : 0 .. P - 1) {
            poison[j] = true
        }
        j = 0
    };
    goto ended_badly
}

#define HAS_WORD(r, q, e) (word_epoch[WORD(r, q, e)] == (e))
#define HAS_ROW(r, q, e) (row_epoch[ROW(r, q, e)] == (e))

proctype rank(byte r)
{
    byte c = 1, e = 0, n_empty = 0, i = 1, j = 0;
    bool wrong = false;
    do
    :: d_step {
            c <= CALLS && is_empty[CALL(r, c)] -> n_empty++; c++;
#ifdef EMPTY_ADVANCES_EPOCH
            e++
#endif
        }
    :: d_step { c <= CALLS && !is_empty[CALL(r, c)] -> e++; i = 1; wrong = false };
        do
        :: d_step {
                i < P ->
                word_epoch[WORD(PEER(r, i), r, e)] = e;
                word_digest[WORD(PEER(r, i), r, e)] = DIGEST(n_empty)
            };
            d_step {
                row_epoch[ROW(PEER(r, i), r, e)] = e;
                row_call[ROW(PEER(r, i), r, e)] = c;
                i++
            }
        :: d_step { i == P -> i = 1 };
            break
        od;
        do
        :: i < P ->
            if
            :: d_step {
                    HAS_ROW(r, PEER(r, i), e) ->
                    wrong = wrong || row_call[ROW(r, PEER(r, i), e)] != c
                }
            :: poison[r] -> goto ended_badly
            :: timeout -> fail(r)
            fi;
            if
            :: HAS_WORD(r, PEER(r, i), e)
            :: poison[r] -> goto ended_badly
            :: timeout -> fail(r)
            fi;
            if
            :: word_digest[WORD(r, PEER(r, i), e)] != DIGEST(n_empty) -> fail(r) /* MISMATCH */
            :: else -> i++
            fi
        :: i == P -> break
        od;
        assert(!wrong && !disagree[c]);
        c++
    :: c > CALLS -> goto ended
    od;
ended_badly:
    failed[r] = true;
ended:
    n_ended++
}

init {
    byte r = 0, c = 1;
    bool any = false;
    atomic {
        do
        :: c <= CALLS ->
            disagree[c] = disagree[c - 1];
            r = 0;
            do
            :: r < P ->
                if
                :: is_empty[CALL(r, c)] = true
                :: is_empty[CALL(r, c)] = false
                fi;
                disagree[c] = disagree[c] || is_empty[CALL(r, c)] != is_empty[CALL(0, c)];
                r++
            :: r == P -> break
            od;
            c++
        :: c > CALLS -> break
        od;
        r = 0;
        do
        :: r < P -> run rank(r); r++
        :: r == P -> break
        od;
        r = 0
    };
    d_step {
        n_ended == P ->
        do
        :: r < P -> any = any || failed[r]; r++
        :: else -> break
        od;
        assert(any == disagree[CALLS])
    }
}
