/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Sizes that are free per run travel as the digest of each ready word (cofi_arena_wait of
 * src/symm/arena_wait.c).
 *
 * Every rank publishes in its own buffer, announces {epoch, size}, reads the others and acks. It
 * takes what it reads for rows of its own size. Each rank's size is free in each call, and so is
 * whether a reader needs the rows of an owner (READ_ALL: it does). No deadline passes here: a rank
 * that is neither told nor sees the disagreement itself hangs, which shows as an invalid end state.
 *
 * Nobody takes rows of another size or call for its own; ranks that agree do not fail; with
 * READ_ALL a disagreement fails on all ranks, in that call.
 *
 * check: holds P=2 CALLS=3
 * check: holds P=3 CALLS=2
 * check: holds READ_ALL P=3 CALLS=2
 * check: full holds READ_ALL P=3 CALLS=3
 * check: refuted NO_DIGEST P=2 CALLS=1
 * check: refuted DIGEST_FIRST P=2 CALLS=2
 * check: refuted NO_POISON P=2 CALLS=2 */

#define AT(slab, writer) ((slab) * P + (writer))
#define PEER(r, i) (((r) + (i)) % P)
#define CALL(r, c) ((r) * (CALLS + 1) + (c))

#ifdef NO_DIGEST
#define DIGEST(size) 0
#else
#define DIGEST(size) (size)
#endif

byte size[P * (CALLS + 1)]; /* of each rank's rows, by call: 1 or 2 */
byte buffer_call[P], buffer_size[P];
byte ready_epoch[P * P], ready_digest[P * P];
byte ack[P * P];
bool poison[P];
byte failed[P];             /* the call in which each rank failed */
byte n_mismatches, n_ended;
byte first_disagreement;    /* a call; 0: none */

#define ACKED_BY(r, q, e) ((q) >= P || (q) == (r) || ack[AT(r, (q) % P)] >= (e))
#define ALL_ACKED(r, e) (ACKED_BY(r, 0, e) && ACKED_BY(r, 1, e) && ACKED_BY(r, 2, e))

#ifdef DIGEST_FIRST
#define IS_OVER(r, q, e) (ready_epoch[AT(r, q)] == (e) || DISAGREES(r, q, e))
#define DISAGREES(r, q, e)                                                                         \
    (ready_epoch[AT(r, q)] != 0 && ready_digest[AT(r, q)] != DIGEST(size[CALL(r, e)]))
#else
#define IS_OVER(r, q, e) (ready_epoch[AT(r, q)] == (e))
#define DISAGREES(r, q, e) (ready_digest[AT(r, q)] != DIGEST(size[CALL(r, e)]))
#endif

inline fail_on_mismatch()
{
    d_step {
        n_mismatches++;
#ifndef NO_POISON
        for (j : 0 .. P - 1) {
            poison[j] = true
        }
        j = 0
#endif
    };
    goto ended_badly
}

inline look(q)
{
    assert(buffer_call[q] == e && buffer_size[q] == size[CALL(r, e)])
}

proctype rank(byte r)
{
    byte e = 1, i, j;
    do
    :: e <= CALLS ->
        if
        :: d_step {
                ALL_ACKED(r, e - 1) -> buffer_call[r] = e; buffer_size[r] = size[CALL(r, e)]; i = 1
            }
        :: poison[r] -> goto ended_badly
        fi;
        d_step {
            do
            :: i < P ->
                ready_epoch[AT(PEER(r, i), r)] = e;
                ready_digest[AT(PEER(r, i), r)] = DIGEST(size[CALL(r, e)]);
                i++
            :: else -> i = 1; break
            od
        };
        do
        :: i < P ->
            if
            :: true -> /* rows are needed */
                if
                :: IS_OVER(r, PEER(r, i), e)
                :: poison[r] -> goto ended_badly
                fi;
                if
                :: DISAGREES(r, PEER(r, i), e) -> fail_on_mismatch()
                :: else -> look(PEER(r, i))
                fi;
                look(PEER(r, i))
#ifndef READ_ALL
            :: true -> skip
#endif
            fi;
            d_step { ack[AT(PEER(r, i), r)] = e; i++ }
        :: d_step { i == P -> i = 0 };
            break
        od;
#ifdef READ_ALL
        assert(first_disagreement == 0 || e < first_disagreement);
#endif
        e++
    :: e > CALLS -> goto ended
    od;
ended_badly:
    failed[r] = e;
ended:
    n_ended++
}

init {
    byte r, c = 1;
    bool any = false;
    atomic {
        do
        :: c <= CALLS ->
            r = 0;
            do
            :: r < P ->
                if
                :: size[CALL(r, c)] = 1
                :: size[CALL(r, c)] = 2
                fi;
                if
                :: first_disagreement == 0 && size[CALL(r, c)] != size[CALL(0, c)] ->
                    first_disagreement = c
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
        :: r < P -> run rank(r); r++
        :: r == P -> break
        od;
        r = 0
    };
    d_step {
        n_ended == P ->
        do
        :: r < P ->
            any = any || failed[r] != 0;
#ifdef READ_ALL
            assert(failed[r] == first_disagreement);
#endif
            r++
        :: else -> break
        od;
        assert(!any || first_disagreement != 0);
        assert(any == (n_mismatches > 0))
    }
}
