/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Calls of a triangle update without acknowledgements: what trimul_chunks has of one kind of call,
 * for all kinds in any order.
 *
 * A call is two exchanges: forward AB and TRI, backward (of what was saved) DTRI and DAB, a check
 * of weights HASH and HASHED. In an exchange a rank stores at every other rank, sends it a word,
 * waits by equality for the words of all, and then reads its own region: up to its first store of
 * the next exchange, or to the end of the call. Each exchange has a region and a word of its own
 * per writer. A rank begins a call after its last one has ended. Backward that computes a, b and
 * tri again is the two calls one after the other. What is read is looked at when reading begins and
 * when it ends. HASHED has no data.
 *
 * check: holds P=2 CALLS=4
 * check: holds P=3 CALLS=3
 * check: refuted ONE_EXCHANGE P=2 CALLS=2
 * check: refuted SAVE_AFTER_WORDS P=2 CALLS=2
 * check: refuted ONE_REGION P=2 CALLS=1
 * check: refuted ONE_WORD P=2 CALLS=1
 * check: refuted WORD_BEFORE_DATA P=2 CALLS=1
 * check: refuted NO_WAIT P=2 CALLS=1 */

/* ONE_EXCHANGE: a check of weights ends with HASH. SAVE_AFTER_WORDS: forward copies a and b to the
 * caller's buffer at its end, after its words of TRI. ONE_REGION, ONE_WORD: the exchanges of a call
 * share them. */

#define KINDS 3
#define CHECK 2
#ifdef ONE_EXCHANGE
#define LAST(kind) ((kind) == CHECK -> 0 : 1)
#else
#define LAST(kind) 1
#endif
#define HAS_DATA(kind, x) ((kind) != CHECK || (x) == 0)

#ifdef ONE_REGION
#define REGION(kind, x, r, w) (((kind) * 2 * P + (r)) * P + (w))
#else
#define REGION(kind, x, r, w) ((((kind) * 2 + (x)) * P + (r)) * P + (w))
#endif
#ifdef ONE_WORD
#define WORD(kind, x, r, w) (((kind) * 2 * P + (r)) * P + (w))
#else
#define WORD(kind, x, r, w) ((((kind) * 2 + (x)) * P + (r)) * P + (w))
#endif

/* Epochs; an exchange's own value is the epoch and its number. */
byte region[KINDS * 2 * P * P], word[KINDS * 2 * P * P];
byte kind_of[CALLS + 1];
#define VALUE(e, x) (2 * (e) + (x))
#ifdef ONE_WORD
#define SIGNAL(e, x) VALUE(e, x)
#else
#define SIGNAL(e, x) (e)
#endif

#ifdef NO_WAIT
#define IS_THERE(e, x, r, w) true
#else
#define IS_THERE(e, x, r, w)                                                                       \
    ((w) >= P || (w) == (r) || word[WORD(kind, x, r, (w) % P)] == SIGNAL(e, x))
#endif
#define ALL_ARE_THERE(e, x, r)                                                                     \
    (IS_THERE(e, x, r, 0) && IS_THERE(e, x, r, 1) && IS_THERE(e, x, r, 2))

inline store(e, x, r, to)
{
    if
    :: HAS_DATA(kind, x) -> region[REGION(kind, x, to, r)] = VALUE(e, x)
    :: else
    fi
}

inline look(e, x, r)
{
    for (w : 0 .. P - 1) {
        assert(!HAS_DATA(kind, x) || w == r || region[REGION(kind, x, r, w)] == VALUE(e, x))
    }
    w = 0
}

proctype rank(byte r)
{
    byte e = 1, x, i = 1, w, kind = kind_of[1];
    do
    :: e > CALLS -> break
    :: else ->
        do
        :: i == P -> break
        :: else ->
#ifdef WORD_BEFORE_DATA
            word[WORD(kind, x, (r + i) % P, r)] = SIGNAL(e, x);
            d_step { store(e, x, r, (r + i) % P) };
#else
            d_step { store(e, x, r, (r + i) % P) };
            word[WORD(kind, x, (r + i) % P, r)] = SIGNAL(e, x);
#endif
            i++
        od;
        i = 1;
        ALL_ARE_THERE(e, x, r);
        d_step { look(e, x, r) }; /* reading begins */
        d_step { look(e, x, r) }; /* and ends */
        if
        :: x < LAST(kind) -> x++
        :: else ->
#ifdef SAVE_AFTER_WORDS
            if
            :: kind == 0 -> d_step { look(e, 0, r) }
            :: else
            fi;
#endif
            x = 0;
            e++;
            if
            :: e <= CALLS -> kind = kind_of[e]
            :: else
            fi
        fi
    od
}

init {
    byte e, n;
    atomic {
        for (e : 1 .. CALLS) {
            select (n : 0 .. KINDS - 1);
            kind_of[e] = n
        }
        for (n : 0 .. P - 1) {
            run rank(n)
        }
        e = 0;
        n = 0
    }
}
