/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Words that count (cof_signal and cof_wait), as a graph of put, signal, wait and get replays them.
 *
 * Each rank puts rows into two slots of the next one and signals; who has read a row signals back
 * on a word of its own, for which a slot's next put waits. The n-th wait on a word is released by
 * the n-th signal; both counts are kept in memory, so that they go on in each replay and in eager
 * calls between. The operations of one rank are in stream order; a signal's count is one store. Two
 * ranks that wait for each other's rows need no credits for two slots; three do.
 *
 * check: holds P=2 ROWS=6
 * check: holds P=3 ROWS=4
 * check: refuted COUNT_IN_GRAPH P=2 ROWS=4
 * check: refuted EQUAL_COUNT P=2 ROWS=4
 * check: refuted SIGNAL_BEFORE_PUT P=2 ROWS=2
 * check: refuted NO_CREDIT P=3 ROWS=4
 * check: refuted CREDIT_BEFORE_READ P=3 ROWS=4
 * check: refuted ONE_SLOT_MORE P=3 ROWS=4 */

#define SLOTS 2
#define NEXT(r) (((r) + 1) % P)
#define BEFORE(r) (((r) + P - 1) % P)
#define SLOT(reader, row) ((reader) * SLOTS + (row) % SLOTS)

/* Rows of one replay: as many as there are slots. */
#ifdef COUNT_IN_GRAPH
#define COUNT(n) (((n) - 1) % SLOTS + 1)
#else
#define COUNT(n) (n)
#endif

#ifdef EQUAL_COUNT
#define IS_THERE(word, n) ((word) == COUNT(n))
#else
#define IS_THERE(word, n) ((word) >= COUNT(n))
#endif

#ifdef ONE_SLOT_MORE
#define CREDITS (SLOTS + 1)
#else
#define CREDITS SLOTS
#endif

byte data[P * SLOTS]; /* the row that lies there */
byte filled[P], freed[P];

inline signal(word, n)
{
    d_step { n++; word = COUNT(n) }
}

proctype rank(byte r)
{
    byte row = 1, n_filled = 0, n_freed = 0, n_filled_awaited = 0, n_freed_awaited = 0;
    do
    :: row <= ROWS ->
#ifndef NO_CREDIT
        if
        :: row > CREDITS ->
            d_step { IS_THERE(freed[r], n_freed_awaited + 1) -> n_freed_awaited++ }
        :: else -> skip
        fi;
#endif
#ifdef SIGNAL_BEFORE_PUT
        signal(filled[NEXT(r)], n_filled);
        data[SLOT(NEXT(r), row)] = row;
#else
        data[SLOT(NEXT(r), row)] = row;
        signal(filled[NEXT(r)], n_filled);
#endif
        d_step { IS_THERE(filled[r], n_filled_awaited + 1) -> n_filled_awaited++ };
#ifdef CREDIT_BEFORE_READ
        signal(freed[BEFORE(r)], n_freed);
        assert(data[SLOT(r, row)] == row);
#else
        assert(data[SLOT(r, row)] == row);
        signal(freed[BEFORE(r)], n_freed);
#endif
        row++
    :: row > ROWS -> break
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
