/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Failure: poison first, release second (cofi_arena_fail and take_poison of
 * src/symm/arena_failure.c, cofi_arena_wait of arena_wait.c, cofi_world_poll of world.c).
 *
 * Every call pushes data and a ready word to each peer, waits for theirs, reads, acks. DEADLINES
 * waits may run out, at any time and place; all other waits have no deadline here, so a rank that
 * is not told hangs, which shows as an invalid end state. DEATHS ranks (0 or 1) may stop between
 * any two steps; the hang-up is visible from then on. A rank that failed tells the others and only
 * then stores the ready words of its call, as a kernel that was already launched would, with no
 * data behind them.
 *
 * SILENT: it stores none, as the kernels of a device do not, for each first looks whether the arena
 * is dead (cofd_is_dead of src/device/spin.h). Then a word that is there needs no look at poison,
 * and one more look at the word may follow the last look at poison, as cofd_wait does it.
 * COPIES_GO_ON: a copy engine cannot look; the copies of later calls still come, over what is being
 * read, from ranks that failed and from ranks that were told. LOOK_AFTER_READ: readers therefore
 * look at poison again when they have read. PASS_ON: who is told tells all before its copies go on,
 * for who failed may not have come to them yet (cofd_pass_on). DEVICE: all that kernels do.
 *
 * check: holds P=2 CALLS=3 DEADLINES=2 DEATHS=1
 * check: holds P=3 CALLS=2 DEADLINES=1 DEATHS=0
 * check: holds P=3 CALLS=1 DEADLINES=2 DEATHS=0
 * check: holds P=3 CALLS=1 DEADLINES=0 DEATHS=1
 * check: full holds P=3 CALLS=1 DEADLINES=1 DEATHS=1
 * check: full holds P=3 CALLS=2 DEADLINES=0 DEATHS=1
 * check: holds SILENT LOOK_BEFORE_WORD WORD_AFTER_LOOK P=2 CALLS=3 DEADLINES=2 DEATHS=1
 * check: holds SILENT LOOK_BEFORE_WORD WORD_AFTER_LOOK P=3 CALLS=2 DEADLINES=1 DEATHS=0
 * check: holds SILENT COPIES_GO_ON LOOK_AFTER_READ PASS_ON P=2 CALLS=3 DEADLINES=2 DEATHS=1
 * check: holds SILENT COPIES_GO_ON LOOK_AFTER_READ PASS_ON P=3 CALLS=2 DEADLINES=1 DEATHS=0
 * check: full holds DEVICE P=3 CALLS=3 DEADLINES=1 DEATHS=0
 * check: full holds DEVICE P=3 CALLS=1 DEADLINES=2 DEATHS=0
 * check: full holds DEVICE P=3 CALLS=1 DEADLINES=1 DEATHS=1
 * check: refuted SILENT COPIES_GO_ON LOOK_AFTER_READ P=3 CALLS=2 DEADLINES=1 DEATHS=0
 * check: refuted SILENT COPIES_GO_ON P=2 CALLS=2 DEADLINES=1 DEATHS=0
 * check: refuted NO_POISON P=2 CALLS=2 DEADLINES=1 DEATHS=0
 * check: refuted RELEASE_BEFORE_POISON P=2 CALLS=2 DEADLINES=1 DEATHS=0
 * check: refuted LOOK_BEFORE_WORD P=2 CALLS=2 DEADLINES=1 DEATHS=0
 * check: refuted WORD_AFTER_LOOK P=3 CALLS=2 DEADLINES=0 DEATHS=1
 * check: refuted POISON_BEFORE_TEXT P=2 CALLS=1 DEADLINES=1 DEATHS=0
 * check: refuted NO_HANGUP_LOOK P=2 CALLS=1 DEADLINES=0 DEATHS=1 */

#ifdef DEVICE
#define SILENT
#define LOOK_BEFORE_WORD
#define WORD_AFTER_LOOK
#define COPIES_GO_ON
#define LOOK_AFTER_READ
#define PASS_ON
#endif

#define AT(slab, writer) ((slab) * P + (writer))
#define PEER(r, i) (((r) + (i)) % P)

#define RUNNING 0
#define GOOD 1
#define FAILED 2

#define HALF 1
#define WHOLE 2

byte data[P * P];   /* call whose data lie there */
byte ready[P * P];
byte ack[P * P];
byte poison[P];     /* rank that failed + 1 */
byte text[P];       /* in the failing rank's own control block */
byte status[P];
bool told[P];       /* a rank that stored every poison word */
bool dead[P];
byte n_ended;
byte deadlines = DEADLINES;

#define IS_THERE(r, q, is_ack, e)                                                                  \
    ((is_ack) && ack[AT(r, q)] >= (e) || !(is_ack) && ready[AT(r, q)] == (e))

#ifdef NO_HANGUP_LOOK
#define HUNG_UP false
#else
#define HUNG_UP (dead[0] || dead[1] || dead[P - 1])
#endif

inline write_text(r)
{
    text[r] = HALF;
    text[r] = WHOLE
}

/* A store: where two ranks fail, the later code stands, and has a text behind it too. */
inline poison_one(q, code)
{
    d_step { poison[q] = code; i++ }
}

inline poison_all(r, code)
{
    i = 0;
    do
    :: i < P -> poison_one(i, code)
    :: d_step { i == P -> i = 0; told[r] = true };
        break
    od
}

/* Copies of the next call; P is 2 or 3. */
inline copies_go_on(r, e)
{
    d_step { data[AT(PEER(r, 1), r)] = e + 1; data[AT(PEER(r, P - 1), r)] = e + 1 }
}

/* Words of the call in progress, whatever has become of their data. */
inline release(r, e)
{
#ifndef SILENT
    d_step { ready[AT(PEER(r, 1), r)] = e; ready[AT(PEER(r, P - 1), r)] = e }
#endif
#ifdef COPIES_GO_ON
    copies_go_on(r, e);
#endif
    skip
}

inline fail(r, e)
{
#if defined(NO_POISON)
    write_text(r);
#elif defined(RELEASE_BEFORE_POISON)
    write_text(r);
    release(r, e);
    poison_all(r, r + 1);
#elif defined(POISON_BEFORE_TEXT)
    poison_all(r, r + 1);
    write_text(r);
    release(r, e);
#else
    write_text(r);
    poison_all(r, r + 1);
    release(r, e);
#endif
    goto failed
}

/* The code is read once: a later one that comes meanwhile may be replaced. */
inline take_poison(r)
{
    assert(text[poison[r] - 1] == WHOLE);
#ifdef PASS_ON
    taken = poison[r];
    poison_all(r, taken);
#endif
#ifdef COPIES_GO_ON
    copies_go_on(r, e);
#endif
    goto failed
}

#ifdef LOOK_BEFORE_WORD
#define MUST_LOOK(seen) (!(seen))
#else
#define MUST_LOOK(seen) true
#endif

/* The word, the poison word and the hang-ups end a wait. What counts is the word as it was before
 * the poison word was looked at: a word that comes later may be one with no data behind it. */
inline wait_word(r, q, is_ack, want)
{
    seen = false;
    if
    :: d_step { IS_THERE(r, q, is_ack, want) -> seen = true }
    :: poison[r] != 0 || HUNG_UP
    :: d_step { !IS_THERE(r, q, is_ack, want) && deadlines > 0 -> deadlines-- }
    fi;
    if
    :: MUST_LOOK(seen) && poison[r] != 0 -> take_poison(r)
    :: else -> skip
    fi;
#ifdef WORD_AFTER_LOOK
    seen = IS_THERE(r, q, is_ack, want);
#endif
    if
    :: !seen -> fail(r, e)
    :: d_step { else -> seen = false }
    fi
}

/* A rank that has ended has one state, whatever it was doing. */
inline forget()
{
    e = 0;
    k = 0;
    i = 0;
#ifdef PASS_ON
    taken = 0;
#endif
    seen = false
}

proctype rank(byte r)
{
    byte e = 1, k = 1, i;
#ifdef PASS_ON
    byte taken;
#endif
    bool seen;
    {
        do
        :: e <= CALLS ->
            if
            :: poison[r] != 0 -> take_poison(r)
            :: else -> skip
            fi;
            do
            :: k < P -> wait_word(r, PEER(r, k), true, e - 1); k++
            :: d_step { k == P -> k = 1 };
                break
            od;
            do
            :: k < P -> data[AT(PEER(r, k), r)] = e; d_step { ready[AT(PEER(r, k), r)] = e; k++ }
            :: d_step { k == P -> k = 1 };
                break
            od;
            do
            :: k < P ->
                wait_word(r, PEER(r, k), false, e);
#ifdef LOOK_AFTER_READ
                seen = data[AT(r, PEER(r, k))] == e;
                if
                :: poison[r] != 0 -> take_poison(r)
                :: else -> skip
                fi;
#else
                d_step { seen = data[AT(r, PEER(r, k))] == e };
#endif
                d_step {
                    assert(seen);
                    seen = false;
                    ack[AT(PEER(r, k), r)] = e;
                    k++
                }
            :: d_step { k == P -> k = 1; e++ };
                break
            od
        :: e > CALLS -> break
        od;
        atomic { status[r] = GOOD; n_ended++ };
        goto ended;
failed:
        atomic { status[r] = FAILED; n_ended++; forget() };
ended:  skip
    } unless {
        atomic {
            dead[r] -> forget();
            if
            :: status[r] == RUNNING -> n_ended++
            :: else -> skip
            fi
        }
    }
}

/* Stops one rank at any time, or none. */
proctype reaper()
{
    if
    :: dead[0] = true
    :: dead[P - 1] = true
    :: skip
    fi
}

init {
    byte r = 0, q = 0;
    atomic {
        do
        :: r < P -> run rank(r); r++
        :: r == P -> break
        od;
#if DEATHS > 0
        run reaper();
#endif
        r = 0
    };
    /* All ranks end. Then: a rank that never got another's last data failed, and whoever failed by
     * itself and lived has told everyone. */
    d_step {
        n_ended == P ->
        do
        :: r < P ->
            q = 0;
            do
            :: q < P ->
#ifndef COPIES_GO_ON
                assert(q == r || status[q] != GOOD || data[AT(q, r)] == CALLS);
#endif
                assert(!told[r] || poison[q] != 0);
                q++
            :: else -> break
            od;
            r++
        :: else -> break
        od
    }
}
