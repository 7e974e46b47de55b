/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Two hops, and calls of all three algorithms in a row on one plan (allreduce_rmsnorm; the other
 * two alone: tagged_push.pml, chunk_flags.pml).
 *
 * TWO_SHOT: of T rows rank o owns row o. Everybody stores row o into the owner's first buffer, with
 * a flag; the owner waits for all, sums, and stores the sum into everybody's second buffer, with a
 * flag, for which all wait. CHUNKED: each rank stores a chunk of two words, with a flag, into
 * everybody's payload; it lies over the first and second buffers, and of other writers. TAGGED: a
 * tagged word in a place of its own. Buffers, flags and words come in halves, by the epoch's
 * parity. In all three each call sends every peer a signal word {epoch, digest}, and ends when
 * those of all peers are there as well: a rank may own no row, and another one may be in a call of
 * another algorithm. Each word arrives on its own, in any order, but a flag after its data
 * (AT_ONCE: all is there at once, fewer states). Data is looked at twice.
 *
 * The kind of each call, algorithm and T, is free and the same on all ranks, or each rank's own
 * (DISAGREE). No deadline passes, and nobody tells another of a failure. Ranks that agree never
 * fail; at a disagreement all fail, each by itself and in that call; nobody ends well with data of
 * another call or kind.
 *
 * Two hops keep ranks together by themselves: who has got the sums knows, through their owners,
 * that all have begun the call and that owners have left their first buffers. With no other
 * algorithm (ONLY_TWO_SHOT) one half is enough, and signal words matter only where ranks disagree.
 *
 * check: holds P=2 CALLS=3
 * check: holds AT_ONCE P=3 CALLS=3
 * check: holds DISAGREE P=2 CALLS=2
 * check: holds AT_ONCE DISAGREE P=3 CALLS=1
 * check: holds ONLY_TWO_SHOT TWO_SHOT_IN_ONE_HALF P=2 CALLS=5
 * check: holds AT_ONCE ONLY_TWO_SHOT TWO_SHOT_IN_ONE_HALF P=3 CALLS=3
 * check: holds AT_ONCE NO_SIGNAL_WORDS P=3 CALLS=3
 * check: refuted NO_SIGNAL_WORDS DISAGREE ONLY_TWO_SHOT P=3 CALLS=1
 * check: refuted NO_SIGNAL_WORDS DISAGREE P=2 CALLS=1
 * check: refuted NO_DIGEST DISAGREE P=2 CALLS=1
 * check: refuted TWO_SHOT_IN_ONE_HALF P=2 CALLS=3
 * check: refuted SECOND_IN_ONE_HALF P=2 CALLS=3
 * check: refuted CHUNKED_IN_ONE_HALF P=2 CALLS=2
 * check: refuted TAGGED_IN_ONE_HALF P=2 CALLS=2
 * check: refuted PUSH_BEFORE_FLAGS P=2 CALLS=1
 * check: refuted PUSH_BEFORE_FLAGS ONLY_TWO_SHOT P=3 CALLS=1
 * check: refuted RELAXED_SECOND_FLAG ONLY_TWO_SHOT P=2 CALLS=1 */

#define PEER(r, i) (((r) + (i)) % P)
#define CALL(r, c) ((r) * (CALLS + 1) + (c))

#define TAGGED 0
#define CHUNKED 1
#define TWO_SHOT(t) ((t) + 1)
#ifdef ONLY_TWO_SHOT
#define FIRST_KIND TWO_SHOT(1)
#else
#define FIRST_KIND TAGGED
#endif
#define N_ROWS(kind) ((kind) > CHUNKED -> (kind) - 1 : 0) /* of a two-shot */

#define HALF(e) ((e) & 1)
#define ONE(e) 0
#define HALF_OF_TAGGED HALF
#define HALF_OF_CHUNKED HALF
#define HALF_OF_FIRST HALF
#define HALF_OF_SECOND HALF
#ifdef TAGGED_IN_ONE_HALF
#undef HALF_OF_TAGGED
#define HALF_OF_TAGGED ONE
#endif
#ifdef CHUNKED_IN_ONE_HALF
#undef HALF_OF_CHUNKED
#define HALF_OF_CHUNKED ONE
#endif
#ifdef TWO_SHOT_IN_ONE_HALF
#undef HALF_OF_FIRST
#define HALF_OF_FIRST ONE
#endif
#if defined(TWO_SHOT_IN_ONE_HALF) || defined(SECOND_IN_ONE_HALF)
#undef HALF_OF_SECOND
#define HALF_OF_SECOND ONE
#endif

/* Words that one rank stores in a slab, by half; flags come after their data. */
#define SIGNAL 0
#define TAGGED_WORD 1
#define CHUNK_FLAG 2
#define FIRST_FLAG 3
#define SECOND_FLAG 4
#define N_WORDS 5
#define WORD(slab, writer, half, word) ((((slab) * P + (writer)) * 2 + (half)) * N_WORDS + (word))
/* Payload of a slab, by half: places of any writer. */
#define N_PLACES (2 * P)
#define PLACE(slab, half, place) (((slab) * 2 + (half)) * N_PLACES + (place))
#define SENT(slab, writer, half, place) (PLACE((slab) * P + (writer), half, place))
#define CHUNK_PLACE(writer) (2 * (writer)) /* and the one behind it */
#define FIRST_PLACE(writer) (writer)
#define SECOND_PLACE(owner) (P + (owner))

#define VALUE(e, kind) ((e) * 8 + (kind))
#define NONE 0
#define GARBAGE 255

byte word[P * P * 2 * N_WORDS], sent_word[P * P * 2 * N_WORDS];
byte payload[P * 2 * N_PLACES], sent_payload[P * P * 2 * N_PLACES];
byte kind_of[P * (CALLS + 1)];
byte failed[P]; /* the call in which each rank failed */
byte n_ended;
byte first_disagreement; /* a call; 0: none */

#ifdef AT_ONCE
#define SEND_WORD(slab, half, what, value) word[WORD(slab, r, half, what)] = value
#define SEND(slab, half, place, value) payload[PLACE(slab, half, place)] = value
#else
#define SEND_WORD(slab, half, what, value) sent_word[WORD(slab, r, half, what)] = value
#define SEND(slab, half, place, value) sent_payload[SENT(slab, r, half, place)] = value
#endif

#ifdef NO_DIGEST
#define DIFFERS(value_) false
#else
#define DIFFERS(value_) ((value_) != VALUE(e, kind))
#endif
#ifdef PUSH_BEFORE_FLAGS
#define MAY_PUSH_SUM true
#else
#define MAY_PUSH_SUM (n_first == P)
#endif

#define IS_THERE(value_) ((value_) / 8 == e)
#define OWNS_A_ROW (r < N_ROWS(kind))
#define TAKES_FIRST (kind <= CHUNKED || OWNS_A_ROW) /* something from each peer in the first hop */

#define OWNER PEER(r, n_second)

#define OWNS_NONE (n_second < P && OWNER >= N_ROWS(kind))

/* Past peers that own no row; P is 2 or 3. */
inline next_owner()
{
    n_second = (OWNS_NONE -> n_second + 1 : n_second);
    n_second = (OWNS_NONE -> n_second + 1 : n_second)
}

inline push()
{
    d_step {
        for (i : 1 .. P - 1) {
            SEND_WORD(PEER(r, i), HALF(e), SIGNAL, VALUE(e, kind));
            if
            :: kind == TAGGED ->
                SEND_WORD(PEER(r, i), HALF_OF_TAGGED(e), TAGGED_WORD, VALUE(e, kind))
            :: kind == CHUNKED ->
                SEND(PEER(r, i), HALF_OF_CHUNKED(e), CHUNK_PLACE(r), VALUE(e, kind));
                SEND(PEER(r, i), HALF_OF_CHUNKED(e), CHUNK_PLACE(r) + 1, VALUE(e, kind));
                SEND_WORD(PEER(r, i), HALF_OF_CHUNKED(e), CHUNK_FLAG, VALUE(e, kind))
            :: PEER(r, i) < N_ROWS(kind) ->
                SEND(PEER(r, i), HALF_OF_FIRST(e), FIRST_PLACE(r), VALUE(e, kind));
                SEND_WORD(PEER(r, i), HALF_OF_FIRST(e), FIRST_FLAG, VALUE(e, kind))
            :: else
            fi
        }
        i = 0;
        n_first = 1;
        n_second = 1;
        next_owner();
        has_pushed = false;
        wrong = false
    }
}

inline push_sum()
{
    d_step {
        sum = VALUE(e, kind);
        for (i : 1 .. P - 1) {
            sum = (payload[PLACE(r, HALF_OF_FIRST(e), FIRST_PLACE(PEER(r, i)))] == VALUE(e, kind) ->
                   sum : GARBAGE)
        }
        for (i : 1 .. P - 1) {
            SEND(PEER(r, i), HALF_OF_SECOND(e), SECOND_PLACE(r), sum);
            SEND_WORD(PEER(r, i), HALF_OF_SECOND(e), SECOND_FLAG, VALUE(e, kind))
        }
        i = 0;
        sum = 0;
        has_pushed = true
    }
}

/* ---- the way from r to p: each word on its own, a flag after its data ---- */

#define ARRIVE(half, place_)                                                                       \
    ::d_step                                                                                       \
    {                                                                                              \
        sent_payload[SENT(p, r, half, place_)] != NONE ->                                          \
        payload[PLACE(p, half, place_)] = sent_payload[SENT(p, r, half, place_)];                  \
        sent_payload[SENT(p, r, half, place_)] = NONE                                              \
    }
#define ARRIVE_WORD(half, what, condition)                                                         \
    ::d_step                                                                                       \
    {                                                                                              \
        sent_word[WORD(p, r, half, what)] != NONE && (condition) ->                                \
        word[WORD(p, r, half, what)] = sent_word[WORD(p, r, half, what)];                          \
        sent_word[WORD(p, r, half, what)] = NONE                                                   \
    }
#define HAS_ARRIVED(half, place) (sent_payload[SENT(p, r, half, place)] == NONE)
#ifdef RELAXED_SECOND_FLAG
#define SECOND_HAS_ARRIVED(half) true
#else
#define SECOND_HAS_ARRIVED(half) HAS_ARRIVED(half, SECOND_PLACE(r))
#endif
/* A flag in one half has its data there as well. */
#define ARRIVE_IN_HALF(half)                                                                       \
    ARRIVE(half, CHUNK_PLACE(r))                                                                   \
    ARRIVE(half, CHUNK_PLACE(r) + 1)                                                               \
    ARRIVE(half, FIRST_PLACE(r))                                                                   \
    ARRIVE(half, SECOND_PLACE(r))                                                                  \
    ARRIVE_WORD(half, SIGNAL, true)                                                                \
    ARRIVE_WORD(half, TAGGED_WORD, true)                                                           \
    ARRIVE_WORD(half, CHUNK_FLAG,                                                                  \
                HAS_ARRIVED(half, CHUNK_PLACE(r)) && HAS_ARRIVED(half, CHUNK_PLACE(r) + 1))        \
    ARRIVE_WORD(half, FIRST_FLAG, HAS_ARRIVED(half, FIRST_PLACE(r)))                               \
    ARRIVE_WORD(half, SECOND_FLAG, SECOND_HAS_ARRIVED(half))

proctype way(byte r; byte p)
{
end:
    do
        ARRIVE_IN_HALF(0)
        ARRIVE_IN_HALF(1)
    od
}

/* ---- a rank ---- */

#define FROM PEER(r, n_first)
#define FIRST_WORD                                                                                 \
    word[(kind == TAGGED    -> WORD(r, FROM, HALF_OF_TAGGED(e), TAGGED_WORD)                       \
          : (kind == CHUNKED -> WORD(r, FROM, HALF_OF_CHUNKED(e), CHUNK_FLAG)                      \
             : WORD(r, FROM, HALF_OF_FIRST(e), FIRST_FLAG)))]
#define SECOND_WORD word[WORD(r, OWNER, HALF_OF_SECOND(e), SECOND_FLAG)]
#define SIGNAL_WORD(i) word[WORD(r, PEER(r, i), HALF(e), SIGNAL)]
#ifdef NO_SIGNAL_WORDS
#define SIGNALS_SEEN true
#define SIGNALS_DIFFER false
#else
#define SIGNALS_SEEN (IS_THERE(SIGNAL_WORD(1)) && IS_THERE(SIGNAL_WORD(P - 1)) && !SIGNALS_DIFFER)
#define SIGNALS_DIFFER                                                                             \
    ((IS_THERE(SIGNAL_WORD(1)) && DIFFERS(SIGNAL_WORD(1))) ||                                      \
     (IS_THERE(SIGNAL_WORD(P - 1)) && DIFFERS(SIGNAL_WORD(P - 1))))
#endif

inline look(half, place)
{
    wrong = wrong || payload[PLACE(r, half, place)] != VALUE(e, kind)
}

inline look_at_first()
{
    if
    :: kind == TAGGED -> wrong = wrong || FIRST_WORD != VALUE(e, kind)
    :: kind == CHUNKED ->
        look(HALF_OF_CHUNKED(e), CHUNK_PLACE(FROM));
        look(HALF_OF_CHUNKED(e), CHUNK_PLACE(FROM) + 1)
    :: else -> look(HALF_OF_FIRST(e), FIRST_PLACE(FROM))
    fi
}

proctype rank(byte r)
{
    byte e = 1, kind, i, n_first, n_second, sum;
    bool has_pushed, wrong, differs;
    do
    :: e <= CALLS ->
        kind = kind_of[CALL(r, e)];
        push();
        do
        :: d_step {
                TAKES_FIRST && n_first < P && IS_THERE(FIRST_WORD) ->
                differs = kind != TAGGED && DIFFERS(FIRST_WORD);
                look_at_first()
            };
            if
            :: differs -> goto ended_badly
            :: else
            fi;
            d_step {
                if
                :: kind != TAGGED -> look_at_first()
                :: else
                fi;
                n_first++
            }
        :: OWNS_A_ROW && !has_pushed && MAY_PUSH_SUM -> push_sum()
        :: d_step {
                n_second < P && IS_THERE(SECOND_WORD) ->
                differs = DIFFERS(SECOND_WORD);
                look(HALF_OF_SECOND(e), SECOND_PLACE(OWNER))
            };
            if
            :: differs -> goto ended_badly
            :: else
            fi;
            d_step { look(HALF_OF_SECOND(e), SECOND_PLACE(OWNER)); n_second++; next_owner() }
        :: SIGNALS_DIFFER -> goto ended_badly
        :: (n_first == P || !TAKES_FIRST) && (has_pushed || !OWNS_A_ROW) && n_second == P &&
                SIGNALS_SEEN -> break
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
        :: r < P -> assert(failed[r] == first_disagreement); r++
        :: else -> break
        od
    }
}
