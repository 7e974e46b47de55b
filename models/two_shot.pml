/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Two hops, and calls of both algorithms in a row on one plan and the same memory (the TWO_SHOT and
 * the AUTO of allreduce_rmsnorm on CUDA devices; one hop alone: tagged_push.pml).
 *
 * A row is UNITS units, each of which arrives as a whole, data and tag; nothing orders one unit
 * after another. TWO_SHOT: of T rows rank o owns row o. Everybody stores row o of x into its place
 * for rows of x at the owner; the owner, as soon as it has a unit of all ranks, stores the sum of
 * that unit into everybody's place for its sums. ONE_SHOT: everybody stores a row into the same
 * place for rows of x, of all others. All places come in halves, by the epoch's parity. Each call
 * sends every peer a signal word {epoch, digest} as well, and ends when those of all peers are
 * there: a rank may own no row, and another one may be in a call of the other algorithm.
 *
 * Whatever is sent is on its way for as long as it likes, beyond the end of the call even, and
 * arrives in any order (AT_ONCE: it is there at once, fewer states). A row is looked at twice, unit
 * by unit (LOOK_ONCE: fewer states): who has waited long for a unit looks at all of the row again,
 * and may push what it has pushed once more (PUSH_AGAIN: in one call of each rank, whichever).
 *
 * DIGEST_IN_UNITS is the code where units are 128-byte lines: the tag of each has the digest too,
 * and calls of ONE_SHOT, or in which every rank owns a row, send no signal words: every rank has a
 * row of every peer. A rank that expects
 * words from one that sends none is told of the disagreement by it: the poison of an arena.
 *
 * The kind of each call, algorithm and T, is free and the same on all ranks, or each rank's own
 * (DISAGREE). No deadline passes, and nobody tells another of a failure (but see above). Ranks that
 * agree never fail; at a disagreement all fail, each by itself and in that call; nobody ends well
 * with data of another call or kind.
 *
 * Sums need no second half: who stores those of call n + 1 has the x of all ranks, so all have
 * begun n + 1, and have left n with its sums (SUMS_IN_ONE_HALF; with AT_ONCE, where data is there
 * with its signal, it is also the CPUs' form). Two hops keep ranks together by themselves: who has
 * got the sums knows, through their owners, that all have begun the call and that owners have
 * looked at their rows of x. With no other algorithm (ONLY_TWO_SHOT) one half would be enough if
 * that were the only look, and signal words matter only where ranks disagree.
 *
 * check: holds P=2 CALLS=3
 * check: holds AT_ONCE LOOK_ONCE P=3 CALLS=3
 * check: holds LOOK_ONCE PUSH_AGAIN P=2 CALLS=2
 * check: full holds AT_ONCE LOOK_ONCE PUSH_AGAIN P=2 CALLS=3
 * check: holds AT_ONCE LOOK_ONCE PUSH_AGAIN P=3 CALLS=2
 * check: holds DISAGREE SUMS_IN_ONE_HALF P=2 CALLS=2
 * check: holds DISAGREE P=2 CALLS=2
 * check: holds AT_ONCE LOOK_ONCE DISAGREE P=3 CALLS=1
 * check: holds SUMS_IN_ONE_HALF P=2 CALLS=3
 * check: holds AT_ONCE LOOK_ONCE SUMS_IN_ONE_HALF P=3 CALLS=3
 * check: holds LOOK_ONCE ONLY_TWO_SHOT X_IN_ONE_HALF SUMS_IN_ONE_HALF P=2 CALLS=5
 * check: holds AT_ONCE LOOK_ONCE NO_SIGNAL_WORDS P=3 CALLS=3
 * check: holds DIGEST_IN_UNITS P=2 CALLS=3
 * check: holds AT_ONCE LOOK_ONCE DIGEST_IN_UNITS P=3 CALLS=3
 * check: holds AT_ONCE DIGEST_IN_UNITS P=3 CALLS=2
 * check: holds LOOK_ONCE DIGEST_IN_UNITS PUSH_AGAIN P=2 CALLS=2
 * check: holds AT_ONCE LOOK_ONCE DIGEST_IN_UNITS PUSH_AGAIN P=3 CALLS=2
 * check: holds DIGEST_IN_UNITS DISAGREE P=2 CALLS=2
 * check: holds AT_ONCE LOOK_ONCE DIGEST_IN_UNITS DISAGREE P=3 CALLS=1
 * check: refuted NO_SIGNAL_WORDS DISAGREE ONLY_TWO_SHOT P=3 CALLS=1
 * check: refuted NO_SIGNAL_WORDS DISAGREE P=2 CALLS=1
 * check: refuted NO_DIGEST DISAGREE P=2 CALLS=1
 * check: refuted X_IN_ONE_HALF P=2 CALLS=2
 * check: refuted ONLY_TWO_SHOT X_IN_ONE_HALF P=2 CALLS=2
 * check: refuted DIGEST_IN_UNITS X_IN_ONE_HALF P=2 CALLS=2
 * check: refuted DIGEST_IN_UNITS NO_DIGEST DISAGREE P=2 CALLS=1
 * check: refuted DIGEST_IN_UNITS NO_POISON DISAGREE P=2 CALLS=1
 * check: refuted SIGNAL_IN_ONE_HALF P=2 CALLS=2
 * check: refuted PUSH_BEFORE_UNITS P=2 CALLS=1
 * check: refuted PUSH_BEFORE_UNITS ONLY_TWO_SHOT P=3 CALLS=1
 * check: refuted TAG_OF_FIRST_UNIT P=2 CALLS=1 */

#define UNITS 2
#ifdef LOOK_ONCE
#define LOOKS 1
#else
#define LOOKS 2
#endif
#define PEER(r, i) (((r) + (i)) % P)
#define CALL(r, c) ((r) * (CALLS + 1) + (c))

#define ONE_SHOT 0
#define TWO_SHOT(t) (t)
#ifdef ONLY_TWO_SHOT
#define FIRST_KIND TWO_SHOT(1)
#else
#define FIRST_KIND ONE_SHOT
#endif
#define N_OWNED(kind) (kind) /* rows that have an owner */

#define HALF(e) ((e) & 1)
#define ONE(e) 0
#define HALF_OF_SIGNAL HALF
#define HALF_OF_X HALF
#define HALF_OF_SUM HALF
#ifdef SIGNAL_IN_ONE_HALF
#undef HALF_OF_SIGNAL
#define HALF_OF_SIGNAL ONE
#endif
#ifdef X_IN_ONE_HALF
#undef HALF_OF_X
#define HALF_OF_X ONE
#endif
#ifdef SUMS_IN_ONE_HALF
#undef HALF_OF_SUM
#define HALF_OF_SUM ONE
#endif

/* What one rank stores in a slab, by half: the signal word, a row of x, a row of sums. */
#define N_PLACES (1 + 2 * UNITS)
#define AT(slab, writer, half, place) ((((slab) * P + (writer)) * 2 + (half)) * N_PLACES + (place))
#define SIGNAL(slab, writer, e) AT(slab, writer, HALF_OF_SIGNAL(e), 0)
#define X(slab, writer, e, unit) AT(slab, writer, HALF_OF_X(e), 1 + (unit))
#define SUM(slab, writer, e, unit) AT(slab, writer, HALF_OF_SUM(e), 1 + UNITS + (unit))

/* A unit: its tag, and of whose call its data is. */
#define VALUE(e, kind) ((e) * 8 + (kind))
#define GARBAGE 7
#define NONE 0
#define HAS_TAG(at, e) (there[at] / 8 == (e))

byte there[P * P * 2 * N_PLACES], sent[P * P * 2 * N_PLACES];
byte kind_of[P * (CALLS + 1)];
byte failed[P]; /* the call in which each rank failed */
byte n_ended, n_failed;
byte first_disagreement; /* a call; 0: none */

#ifdef AT_ONCE
#define SEND(at, value) there[at] = value
#else
#define SEND(at, value) sent[at] = value
#endif

#ifdef NO_DIGEST
#define DIFFERS(at) false
#else
#define DIFFERS(at) (there[at] != VALUE(e, kind))
#endif
#ifdef TAG_OF_FIRST_UNIT
#define IS_THERE(at, unit) ((unit) != 0 || HAS_TAG(at, e))
#else
#define IS_THERE(at, unit) HAS_TAG(at, e)
#endif

#ifdef DIGEST_IN_UNITS
#define HAS_WORDS(kind) ((kind) != ONE_SHOT && N_OWNED(kind) < P)
#define UNIT_DIFFERS(at) (HAS_TAG(at, e) && DIFFERS(at))
#else
#define HAS_WORDS(kind) true
#define UNIT_DIFFERS(at) false
#endif
#if defined(DIGEST_IN_UNITS) && !defined(NO_POISON)
#define IS_TOLD (n_failed > 0)
#else
#define IS_TOLD false
#endif

#define OWNS_A_ROW (r < N_OWNED(kind))
#define TAKES_X (kind == ONE_SHOT || OWNS_A_ROW)

/* Looks at units of x: at each of all peers, whereupon its owner pushes the sum; then at all once
 * more. */
#define ALL_X (LOOKS * (P - 1) * UNITS)
#define X_UNIT (n_x / (P - 1) % UNITS)
#define NEXT_X X(r, PEER(r, 1 + n_x % (P - 1)), e, X_UNIT)
#define MAY_PUSH_SUM (OWNS_A_ROW && n_pushed < UNITS && HAS_UNIT(n_pushed))
#ifdef PUSH_BEFORE_UNITS
#define HAS_UNIT(unit) true
#else
#define HAS_UNIT(unit) (n_x >= ((unit) + 1) * (P - 1))
#endif
/* Looks at the sums of one owner, then of the next. */
#define OWNER PEER(r, 1 + n_sum / (LOOKS * UNITS))
#define NEXT_SUM SUM(r, OWNER, e, n_sum % UNITS)
#define ALL_SUMS (LOOKS * (P - 1) * UNITS)
#define OWNS_NONE (n_sum < ALL_SUMS && OWNER >= N_OWNED(kind))

/* Past peers that own no row; P is 2 or 3. */
inline next_owner()
{
    n_sum = (OWNS_NONE -> n_sum + LOOKS * UNITS : n_sum);
    n_sum = (OWNS_NONE -> n_sum + LOOKS * UNITS : n_sum)
}

inline send_x()
{
    for (i : 1 .. P - 1) {
        if
        :: kind == ONE_SHOT || PEER(r, i) < N_OWNED(kind) ->
            for (unit : 0 .. UNITS - 1) {
                SEND(X(PEER(r, i), r, e, unit), VALUE(e, kind))
            }
        :: else
        fi
    }
    i = 0;
    unit = 0
}

inline push()
{
    d_step {
        for (i : 1 .. P - 1) {
            if
            :: HAS_WORDS(kind) -> SEND(SIGNAL(PEER(r, i), r, e), VALUE(e, kind))
            :: else
            fi
        }
        send_x();
        n_x = 0;
        n_sum = 0;
        next_owner();
        n_pushed = 0;
        wrong = false
    }
}

/* Of what lies there now. */
inline send_sum(of_unit)
{
    sum = VALUE(e, kind);
    for (i : 1 .. P - 1) {
        sum = (there[X(r, PEER(r, i), e, of_unit)] == VALUE(e, kind) -> sum : VALUE(e, GARBAGE))
    }
    for (i : 1 .. P - 1) {
        SEND(SUM(PEER(r, i), r, e, of_unit), sum)
    }
    i = 0;
    sum = 0
}

inline push_again()
{
    send_x();
    for (unit : 0 .. UNITS - 1) {
        if
        :: unit < n_pushed -> send_sum(unit)
        :: else
        fi
    }
    unit = 0;
    has_pushed_again = true
}

/* The way from r to p: each unit on its own. */
#define ARRIVE(half, place)                                                                        \
    :: d_step                                                                                      \
    {                                                                                              \
        sent[AT(p, r, half, place)] != NONE ->                                                     \
        there[AT(p, r, half, place)] = sent[AT(p, r, half, place)];                                \
        sent[AT(p, r, half, place)] = NONE                                                         \
    }

proctype way(byte r; byte p)
{
end:
    do
        ARRIVE(0, 0)
        ARRIVE(0, 1)
        ARRIVE(0, 2)
        ARRIVE(0, 3)
        ARRIVE(0, 4)
        ARRIVE(1, 0)
        ARRIVE(1, 1)
        ARRIVE(1, 2)
        ARRIVE(1, 3)
        ARRIVE(1, 4)
    od
}

/* ---- a rank ---- */

#define SIGNAL_OF(i) SIGNAL(r, PEER(r, i), e)
#ifdef NO_SIGNAL_WORDS
#define SIGNALS_SEEN true
#define SIGNALS_DIFFER false
#else
#define SIGNALS_SEEN                                                                               \
    (!HAS_WORDS(kind) ||                                                                           \
     (HAS_TAG(SIGNAL_OF(1), e) && HAS_TAG(SIGNAL_OF(P - 1), e) && !SIGNALS_DIFFER))
#define SIGNALS_DIFFER                                                                             \
    ((HAS_TAG(SIGNAL_OF(1), e) && DIFFERS(SIGNAL_OF(1))) ||                                        \
     (HAS_TAG(SIGNAL_OF(P - 1), e) && DIFFERS(SIGNAL_OF(P - 1))))
#endif

proctype rank(byte r)
{
    byte e = 1, kind, i, unit, n_x, n_sum, n_pushed, sum;
    bool has_pushed_again, wrong;
    do
    :: e <= CALLS ->
        kind = kind_of[CALL(r, e)];
        push();
        do
        :: d_step {
                TAKES_X && n_x < ALL_X && IS_THERE(NEXT_X, X_UNIT) && !UNIT_DIFFERS(NEXT_X) &&
                    !MAY_PUSH_SUM ->
                wrong = wrong || there[NEXT_X] != VALUE(e, kind);
                n_x++
            }
#ifdef PUSH_AGAIN
        :: d_step { !has_pushed_again -> push_again() }
#endif
        :: d_step { MAY_PUSH_SUM -> send_sum(n_pushed); n_pushed++ }
        :: d_step {
                n_sum < ALL_SUMS && IS_THERE(NEXT_SUM, n_sum % UNITS) &&
                    !UNIT_DIFFERS(NEXT_SUM) ->
                wrong = wrong || there[NEXT_SUM] != VALUE(e, kind);
                n_sum++;
                next_owner()
            }
        :: SIGNALS_DIFFER -> goto ended_badly
        :: TAKES_X && n_x < ALL_X && UNIT_DIFFERS(NEXT_X) -> goto ended_badly
        :: n_sum < ALL_SUMS && UNIT_DIFFERS(NEXT_SUM) -> goto ended_badly
        :: IS_TOLD -> goto ended_badly
        :: (n_x == ALL_X || !TAKES_X) && (n_pushed == UNITS || !OWNS_A_ROW) && n_sum == ALL_SUMS &&
                SIGNALS_SEEN -> break
        od;
        assert(!wrong);
        e++
    :: e > CALLS -> goto ended
    od;
ended_badly:
    failed[r] = e;
    n_failed++;
ended:
    n_ended++
}

init {
    byte r, c = 1, kind;
    atomic {
        do
        :: c <= CALLS ->
            r = 0;
            do
            :: r < P ->
#ifndef DISAGREE
                if
                :: r == 0 -> select (kind : FIRST_KIND .. TWO_SHOT(P))
                :: else
                fi;
#else
                select (kind : FIRST_KIND .. TWO_SHOT(P));
#endif
                kind_of[CALL(r, c)] = kind;
                if
                :: first_disagreement == 0 && kind != kind_of[CALL(0, c)] -> first_disagreement = c
                :: else
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
#ifndef AT_ONCE
            run way(r, PEER(r, 1));
            if
            :: P > 2 -> run way(r, PEER(r, P - 1))
            :: else
            fi;
#endif
            r++
        :: r == P -> break
        od;
        r = 0;
        kind = 0
    };
    d_step {
        n_ended == P ->
        do
        :: r < P ->
            /* Who is told may still be in a call before that one. */
            assert(failed[r] == first_disagreement ||
                   (IS_TOLD && failed[r] > 0 && failed[r] < first_disagreement));
            r++
        :: else -> break
        od
    }
}
