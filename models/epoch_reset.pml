/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Epochs that wrap: at the first epoch of every quarter of a turn all ranks meet, reset their words
 * and meet again (design of the signal words).
 *
 * Epochs run from 1 to TURN - 1, which is 2^32 - 1 in the source. Two plans share the words of an
 * arena, each with payload of its own; which plan a call is of is free, the same on all ranks, and
 * so is whether a reader needs what it was given (ALL_NEEDED: it does). Calls go on for ever: the
 * states are finite because the epochs are. One plan may be left alone for any number of turns.
 *
 * Each turn has a parity that no rank looks at; a ready word and what it announces carry it, so
 * that one of an earlier turn is seen to be one. Words to all peers are one step, as is the wait
 * for words of all: a peer may look late at any of them.
 *
 * check: holds P=2 TURN=16
 * check: holds ALL_NEEDED P=3 TURN=8
 * check: refuted NO_RESET P=2 TURN=16
 * check: refuted KEEP_READY P=2 TURN=16
 * check: refuted KEEP_ACKS P=2 TURN=16
 * check: refuted KEEP_LAST P=2 TURN=16
 * check: refuted ONE_ROUND_RESET P=2 TURN=16
 * check: refuted RESET_OF_ROUND_TWO P=2 TURN=16
 * check: refuted PLAIN_COMPARE P=2 TURN=16 */

#define AT(slab, writer) ((slab) * P + (writer))
#define PEER(r, i) (((r) + (i)) % P)
#define WORD(plan, slab, writer) ((plan) * P * P + (slab) * P + (writer))

#define FIRST_OF_QUARTER(e) (((e) & (TURN / 4 - 1)) == 1)
#define AFTER(e) ((e) == TURN - 1 -> 1 : (e) + 1) /* epoch 0 is never used */
#define BEFORE(e) ((e) == 1 -> TURN - 1 : (e) - 1)
#ifdef PLAIN_COMPARE
#define AT_LEAST(word, e) ((word) >= (e))
#else
#define AT_LEAST(word, e) ((((word) - (e)) & (TURN - 1)) < TURN / 2)
#endif
#define NONE 0

byte buffer[2 * P];                /* by plan and owner: epoch of what lies there */
bool buffer_turn[2 * P];
byte ready[2 * P * P], ack[2 * P * P];
bool ready_turn[2 * P * P];
byte arrived[P * P], reset[P * P]; /* words of the two rounds */

/* The plan of each call, by epoch: made up by the first rank that comes to it, forgotten by the
 * last. Ranks are less than a turn apart. */
#define UNKNOWN 2
byte plan_of[TURN] = UNKNOWN;
byte n_know[TURN];

#define ALL(term) (term(0) && term(1) && (P == 2 || term(P - 1)))
#define SLOT_FREE(q)                                                                               \
    ((q) == r || used[plan] == NONE || AT_LEAST(ack[WORD(plan, r, q)], used[plan]))
#define HAS_ARRIVED(q) ((q) == r || arrived[AT(r, q)] == e)
#define HAS_RESET(q) ((q) == r || reset[AT(r, q)] == e)

/* P is 2 or 3. */
#define TELL_ALL(words) d_step { words[AT(PEER(r, 1), r)] = e; words[AT(PEER(r, P - 1), r)] = e }

inline reset_words(plan_, q)
{
#ifndef KEEP_READY
    ready[WORD(plan_, r, q)] = NONE;
#endif
#ifndef KEEP_ACKS
    ack[WORD(plan_, r, q)] = BEFORE(e);
#endif
#ifdef RESET_OF_ROUND_TWO
    reset[AT(r, q)] = NONE;
#endif
    skip
}

inline reset_own_slab()
{
    d_step {
        reset_words(0, PEER(r, 1));
        reset_words(0, PEER(r, P - 1));
        reset_words(1, PEER(r, 1));
        reset_words(1, PEER(r, P - 1));
#ifndef KEEP_LAST
        used[0] = NONE;
        used[1] = NONE
#endif
    }
}

inline meet_and_reset()
{
    TELL_ALL(arrived);
    ALL(HAS_ARRIVED);
    reset_own_slab();
#ifndef ONE_ROUND_RESET
    TELL_ALL(reset);
    ALL(HAS_RESET)
#endif
}

inline look(q)
{
    assert(buffer[plan * P + q] == e && buffer_turn[plan * P + q] == turn)
}

inline announce(q)
{
    ready[WORD(plan, q, r)] = e;
    ready_turn[WORD(plan, q, r)] = turn
}

proctype rank(byte r)
{
    byte e = 0, i = 1, plan = 0, used[2];
    bool turn = false, is_first = true;
    do
    :: true ->
        atomic {
            if
            :: e == TURN - 1 -> turn = !turn
            :: else -> skip
            fi;
            e = AFTER(e);
            if
            :: plan_of[e] == UNKNOWN -> plan_of[e] = 0
            :: plan_of[e] == UNKNOWN -> plan_of[e] = 1
            :: else -> skip
            fi;
            plan = plan_of[e];
            n_know[e]++;
            if
            :: n_know[e] == P -> n_know[e] = 0; plan_of[e] = UNKNOWN
            :: else -> skip
            fi
        };
#ifndef NO_RESET
        if
        :: FIRST_OF_QUARTER(e) && !is_first -> meet_and_reset()
        :: else -> skip
        fi;
#endif
        d_step {
            ALL(SLOT_FREE) ->
            is_first = false;
            buffer[plan * P + r] = e;
            buffer_turn[plan * P + r] = turn
        };
        d_step { announce(PEER(r, 1)); announce(PEER(r, P - 1)); used[plan] = e };
        do
        :: i < P ->
            if
            :: true -> /* needed */
                d_step {
                    ready[WORD(plan, r, PEER(r, i))] == e ->
                    assert(ready_turn[WORD(plan, r, PEER(r, i))] == turn);
                    look(PEER(r, i))
                };
                d_step { look(PEER(r, i)); ack[WORD(plan, PEER(r, i), r)] = e; i++ }
#ifndef ALL_NEEDED
            :: d_step { true -> ack[WORD(plan, PEER(r, i), r)] = e; i++ }
#endif
            fi
        :: d_step { i == P -> i = 1 };
            break
        od
    od
}

init {
    byte r = 0;
    atomic {
        do
        :: r < P -> run rank(r); r++
        :: r == P -> break
        od
    }
}
