/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Tagged push: words that carry their own signal, in two halves and without acknowledgements (the
 * ONE_SHOT of allreduce_rmsnorm on CUDA devices).
 *
 * A call sends each peer a signal word {epoch, T} and T rows, of a tagged word each, into the half
 * of the epoch's parity. All of them are on their way at once and arrive in any order, some after
 * their writer has ended the call (AT_ONCE: they are there at once, fewer states). A call ends when
 * all peers' rows and all their signal words are there: who has finished call n has seen that
 * everybody began n, hence left n - 1, whose half it writes next.
 *
 * With CALLS each rank's T is free in each call, from 1 to ROWS, and no deadline passes. Ranks that
 * agree never fail; at a disagreement all fail, each by itself and in that call: nobody needs to be
 * told, and nobody ends well with rows of another T or call.
 *
 * So it is where units are 16-byte words, whose tag is the epoch alone. The tag of a 128-byte line
 * has T as well, and no signal words are sent (DIGEST_IN_UNITS): every call takes a row of every
 * peer, whose tag tells that the peer has begun, and with which T.
 *
 * With TURN all agree and calls go on for ever: epochs run from 1 to TURN - 1 (2^32 - 1 in the
 * source), and at the first epoch of a quarter all meet, set their words to 0 and meet again. The
 * tag of a row that a smaller T left out would otherwise be found a turn later. The last and the
 * first epoch of a turn have the same parity; there it is the meeting that keeps calls apart. Each
 * turn has a parity that no rank looks at; what is sent carries it.
 *
 * check: holds P=2 CALLS=4 ROWS=2
 * check: holds P=3 CALLS=2 ROWS=1
 * check: full holds P=3 CALLS=3 ROWS=1
 * check: holds AT_ONCE P=3 CALLS=2 ROWS=2
 * check: holds P=2 TURN=16 ROWS=2
 * check: holds AT_ONCE P=3 TURN=8 ROWS=2
 * check: holds DIGEST_IN_UNITS P=2 CALLS=4 ROWS=2
 * check: holds DIGEST_IN_UNITS P=3 CALLS=3 ROWS=1
 * check: holds AT_ONCE DIGEST_IN_UNITS P=3 CALLS=2 ROWS=2
 * check: holds DIGEST_IN_UNITS P=2 TURN=16 ROWS=2
 * check: refuted ONE_HALF P=2 CALLS=2 ROWS=1
 * check: refuted SIGNAL_WITHOUT_HALF P=2 CALLS=2 ROWS=1
 * check: refuted ONE_HALF AT_LEAST P=2 CALLS=2 ROWS=1
 * check: refuted NO_SIGNAL_WAIT P=2 CALLS=1 ROWS=2
 * check: refuted NO_DIGEST P=2 CALLS=1 ROWS=2
 * check: refuted NO_RESET P=2 TURN=16 ROWS=2
 * check: refuted RESET_SIGNALS_ONLY P=2 TURN=16 ROWS=2
 * check: refuted ONE_ROUND_RESET P=2 TURN=16 ROWS=2
 * check: refuted DIGEST_IN_UNITS ONE_HALF P=2 CALLS=2 ROWS=1
 * check: refuted DIGEST_IN_UNITS NO_DIGEST P=2 CALLS=1 ROWS=2
 * check: refuted DIGEST_IN_UNITS NO_RESET P=2 TURN=16 ROWS=2 */

#define PEER(r, i) (((r) + (i)) % P)
#define CALL(r, c) ((r) * (CALLS + 1) + (c))

#ifdef ONE_HALF
#define HALF(e) 0
#else
#define HALF(e) ((e) & 1)
#endif
#ifdef SIGNAL_WITHOUT_HALF
#define SIGNAL_HALF(e) 0
#else
#define SIGNAL_HALF(e) HALF(e)
#endif

/* The signal word, then the rows, from 1. */
#define WORD(slab, writer, half, w) ((((slab) * P + (writer)) * 2 + (half)) * (ROWS + 1) + (w))
#define N_WORDS (P * P * 2 * (ROWS + 1))
#define SIGNAL(slab, writer, e) WORD(slab, writer, SIGNAL_HALF(e), 0)
#define ROW(slab, writer, e, row) WORD(slab, writer, HALF(e), row)

#ifdef AT_LEAST
#define IS_THERE(w, e) (tag[w] >= (e))
#else
#define IS_THERE(w, e) (tag[w] == (e))
#endif
#ifdef NO_DIGEST
#define DIFFERS(t, other) false
#else
#define DIFFERS(t, other) ((t) != (other))
#endif

byte tag[N_WORDS], sent_tag[N_WORDS]; /* epochs: of what is there, of what is on its way; 0: none */
byte value[N_WORDS], sent_value[N_WORDS];

/* What a word of call e carries: T; in a row of CALLS the epoch too, in TURN the turn's parity. */
#ifdef TURN
#define SIGNAL_VALUE(e, t) ((t) + 4 * turn)
#define ROW_VALUE(e, t) SIGNAL_VALUE(e, t)
#else
#define SIGNAL_VALUE(e, t) (t)
#define ROW_VALUE(e, t) ((t) + 4 * (e))
#endif
#define T_OF(w) (value[w] & 3)
#ifdef DIGEST_IN_UNITS
#define ROW_DIFFERS(t, w) DIFFERS(t, T_OF(w))
#define FIRST_SIGNAL P /* there is none to wait for */
#else
#define ROW_DIFFERS(t, w) false
#define FIRST_SIGNAL 1
#endif

inline send(w, e_, value_)
{
#ifdef AT_ONCE
    tag[w] = e_;
    value[w] = value_
#else
    sent_tag[w] = e_;
    sent_value[w] = value_
#endif
}

inline push(e, t)
{
    d_step {
        for (i : 1 .. P - 1) {
#ifndef DIGEST_IN_UNITS
            send(SIGNAL(PEER(r, i), r, e), e, SIGNAL_VALUE(e, t));
#endif
            for (row : 1 .. t) {
                send(ROW(PEER(r, i), r, e, row), e, ROW_VALUE(e, t))
            }
        }
        i = 1;
        row = 1;
        n_signals = FIRST_SIGNAL;
        wrong = false
    }
}

#define ARRIVE(w)                                                                                  \
    d_step                                                                                         \
    {                                                                                              \
        sent_tag[w] != 0 -> tag[w] = sent_tag[w];                                                  \
        value[w] = sent_value[w];                                                                  \
        sent_tag[w] = 0;                                                                           \
        sent_value[w] = 0                                                                          \
    }

/* The way from r to p. */
proctype way(byte r; byte p)
{
end:
    do
    :: ARRIVE(WORD(p, r, 0, 0))
    :: ARRIVE(WORD(p, r, 1, 0))
    :: ARRIVE(WORD(p, r, 0, 1))
    :: ARRIVE(WORD(p, r, 1, 1))
#if ROWS > 1
    :: ARRIVE(WORD(p, r, 0, 2))
    :: ARRIVE(WORD(p, r, 1, 2))
#endif
    od
}

#ifdef TURN

#define AFTER(e) ((e) == TURN - 1 -> 1 : (e) + 1) /* epoch 0 is never used */
#define FIRST_OF_QUARTER(e) (((e) & (TURN / 4 - 1)) == 1)

/* T of each call, by epoch: made up by the first rank that comes to it, forgotten by the last.
 * Ranks are less than a turn apart. */
byte t_of[TURN];
byte n_know[TURN];
byte arrived[P * P], reset[P * P]; /* words of the two rounds */

/* P is 2 or 3. */
#define MEET(words)                                                                                \
    d_step { words[r * P + PEER(r, 1)] = e; words[r * P + PEER(r, P - 1)] = e };                   \
    words[PEER(r, 1) * P + r] == e && words[PEER(r, P - 1) * P + r] == e

inline reset_own_slab()
{
    d_step {
        for (w : WORD(r, 0, 0, 0) .. WORD(r, P - 1, 1, ROWS)) {
#ifdef RESET_SIGNALS_ONLY
            if
            :: w % (ROWS + 1) != 0 -> goto kept
            :: else -> skip
            fi;
#endif
            tag[w] = 0;
            value[w] = 0;
#ifdef RESET_SIGNALS_ONLY
kept:
            skip
#endif
        }
        w = 0
    }
}

proctype rank(byte r)
{
    byte e = 0, t, i, row, n_signals, w;
    bool turn, wrong, is_first = true;
    do
    :: atomic {
            turn = (e == TURN - 1 -> !turn : turn);
            e = AFTER(e);
            if
            :: t_of[e] == 0 ->
                select (t : 1 .. ROWS);
                t_of[e] = t
            :: else -> t = t_of[e]
            fi;
            n_know[e]++;
            if
            :: n_know[e] == P -> n_know[e] = 0; t_of[e] = 0
            :: else -> skip
            fi
        };
#ifndef NO_RESET
        if
        :: FIRST_OF_QUARTER(e) && !is_first ->
            MEET(arrived);
            reset_own_slab();
#ifndef ONE_ROUND_RESET
            MEET(reset)
#endif
        :: else -> skip
        fi;
#endif
        is_first = false;
        push(e, t);
        do
        :: d_step {
                i < P && IS_THERE(ROW(r, PEER(r, i), e, row), e) ->
                assert(value[ROW(r, PEER(r, i), e, row)] == ROW_VALUE(e, t));
                i = (row == t -> i + 1 : i);
                row = (row == t -> 1 : row + 1)
            }
        :: d_step {
                n_signals < P && IS_THERE(SIGNAL(r, PEER(r, n_signals), e), e) ->
                assert(value[SIGNAL(r, PEER(r, n_signals), e)] == SIGNAL_VALUE(e, t));
                n_signals++
            }
        :: i == P && n_signals == P -> break
        od
    od
}

init {
    byte r = 0;
    atomic {
        do
        :: r < P ->
            run rank(r);
            run way(r, PEER(r, 1));
#if P > 2
            run way(r, PEER(r, 2));
#endif
            r++
        :: r == P -> break
        od
    }
}

#else

byte size[P * (CALLS + 1)]; /* T, by rank and call */
byte failed[P]; /* the call in which each rank failed */
byte n_ended;
byte first_disagreement; /* a call; 0: none */

#ifdef NO_SIGNAL_WAIT
#define SIGNALS_SEEN true
#else
#define SIGNALS_SEEN (n_signals == P)
#endif

proctype rank(byte r)
{
    byte e = 1, i, row, n_signals;
    bool wrong, agree;
    do
    :: e <= CALLS ->
        push(e, size[CALL(r, e)]);
        do
        :: d_step {
                i < P && IS_THERE(ROW(r, PEER(r, i), e, row), e) ->
                agree = !ROW_DIFFERS(size[CALL(r, e)], ROW(r, PEER(r, i), e, row));
                wrong = wrong || value[ROW(r, PEER(r, i), e, row)] !=
                                     ROW_VALUE(e, size[CALL(r, e)]);
                i = (row == size[CALL(r, e)] -> i + 1 : i);
                row = (row == size[CALL(r, e)] -> 1 : row + 1)
            };
            if
            :: agree
            :: else -> goto ended_badly
            fi
        :: d_step {
                n_signals < P && IS_THERE(SIGNAL(r, PEER(r, n_signals), e), e) ->
                agree = !DIFFERS(size[CALL(r, e)], T_OF(SIGNAL(r, PEER(r, n_signals), e)));
                n_signals++
            };
            if
            :: agree
            :: else -> goto ended_badly
            fi
        :: i == P && SIGNALS_SEEN -> break
        od;
        assert(!wrong);
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
                select (t : 1 .. ROWS);
                size[CALL(r, c)] = t;
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
        :: r < P ->
            run rank(r);
            run way(r, PEER(r, 1));
#if P > 2
            run way(r, PEER(r, 2));
#endif
            r++
        :: r == P -> break
        od;
        r = 0;
        t = 0
    };
    d_step {
        n_ended == P ->
        do
        :: r < P ->
            assert(failed[r] == first_disagreement);
            r++
        :: else -> break
        od
    }
}

#endif
