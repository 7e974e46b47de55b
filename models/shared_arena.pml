/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Two plans whose payload overlays in one arena, while their words do not.
 *
 * A call of plan PULL copies into the own buffer, which the others read; a call of plan PUSH stores
 * into a slot of each other rank, which its owner reads. The buffer is slot 0. Each plan keeps its
 * own rule of reuse: it waits for the acks of its own last call. Every call ends with an end-ack to
 * all ranks; a call that finds that the last one on the arena was another plan's first waits for
 * every rank's end-ack of the last epoch. The order of the calls is free, the same on all ranks;
 * whether a reader needs what it was given is free too, in every call.
 *
 * check: holds P=2 CALLS=5
 * check: holds P=3 CALLS=4
 * check: refuted NO_END_ACK_WAIT P=2 CALLS=2
 * check: refuted END_ACK_OF_OWN_PLAN P=2 CALLS=3
 * check: refuted END_ACK_BEFORE_READ P=2 CALLS=2
 * check: refuted END_ACK_OF_ONE_PEER P=3 CALLS=2
 * check: refuted NO_PLAN_ACK_WAIT P=2 CALLS=2 */

#define AT(slab, writer) ((slab) * P + (writer))
#define PEER(r, i) (((r) + (i)) % P)
#define WORD(plan, slab, writer) ((plan) * P * P + (slab) * P + (writer))

#define PULL 0
#define PUSH 1
#define NO_PLAN 2

/* Where what `writer` gives `reader` lies: in the writer's buffer, or in the reader's slot. */
#define SLOT_OF(reader, writer) ((writer) - ((writer) > (reader) -> 1 : 0))
#define PLACE(plan, reader, writer)                                                                \
    ((plan) == PULL -> AT(writer, 0) : AT(reader, SLOT_OF(reader, writer)))
#define VALUE(e, writer) ((e) * P + (writer))

byte plan_of[CALLS + 1];
byte memory[P * P];        /* epoch and writer of what lies there */
byte ready[2 * P * P], ack[2 * P * P];
byte end_ack[P * P];

#define HAS_ACKED(plan, r, q, e) ((q) >= P || (q) == (r) || ack[WORD(plan, r, (q) % P)] >= (e))
#define HAS_ENDED(r, q, e) ((q) >= P || (q) == (r) || end_ack[AT(r, (q) % P)] >= (e))

#ifdef NO_PLAN_ACK_WAIT
#define SLOTS_FREE(plan, r, e) true
#else
#define SLOTS_FREE(plan, r, e)                                                                     \
    (HAS_ACKED(plan, r, 0, e) && HAS_ACKED(plan, r, 1, e) && HAS_ACKED(plan, r, 2, e))
#endif

#if defined(NO_END_ACK_WAIT)
#define ARENA_FREE(r, e, used) true
#elif defined(END_ACK_OF_OWN_PLAN)
#define ARENA_FREE(r, e, used) ALL_ENDED(r, used)
#elif defined(END_ACK_OF_ONE_PEER)
#define ARENA_FREE(r, e, used) HAS_ENDED(r, PEER(r, 1), (e) - 1)
#else
#define ARENA_FREE(r, e, used) ALL_ENDED(r, (e) - 1)
#endif
#define ALL_ENDED(r, e) (HAS_ENDED(r, 0, e) && HAS_ENDED(r, 1, e) && HAS_ENDED(r, 2, e))

/* P is 2 or 3. */
inline send_end_ack()
{
    d_step { end_ack[AT(PEER(r, 1), r)] = e; end_ack[AT(PEER(r, P - 1), r)] = e }
}

inline look(writer)
{
    assert(memory[PLACE(plan, r, writer)] == VALUE(e, writer))
}

proctype rank(byte r)
{
    byte e = 1, i = 1, plan = 0;
    byte last_plan = NO_PLAN, used[2];
    do
    :: d_step { e <= CALLS -> plan = plan_of[e] };
        last_plan == plan || last_plan == NO_PLAN || ARENA_FREE(r, e, used[plan]);
        SLOTS_FREE(plan, r, used[plan]);
#ifdef END_ACK_BEFORE_READ
        send_end_ack();
#endif
        do
        :: d_step { i < P -> memory[PLACE(plan, PEER(r, i), r)] = VALUE(e, r) };
            d_step { ready[WORD(plan, PEER(r, i), r)] = e; i++ }
        :: d_step { i == P -> i = 1 };
            break
        od;
        do
        :: i < P ->
            if
            :: true -> /* needed */
                d_step { ready[WORD(plan, r, PEER(r, i))] == e -> look(PEER(r, i)) };
                d_step { look(PEER(r, i)); ack[WORD(plan, PEER(r, i), r)] = e; i++ }
            :: d_step { true -> ack[WORD(plan, PEER(r, i), r)] = e; i++ }
            fi
        :: d_step { i == P -> i = 1 };
            break
        od;
#ifdef END_ACK_BEFORE_READ
        skip;
#else
        send_end_ack();
#endif
        d_step { used[plan] = e; last_plan = plan; e++ }
    :: e > CALLS -> break
    od
}

init {
    byte r = 0, c = 1;
    atomic {
        do
        :: c <= CALLS ->
            if
            :: plan_of[c] = PULL
            :: plan_of[c] = PUSH
            fi;
            c++
        :: c > CALLS -> break
        od;
        do
        :: r < P -> run rank(r); r++
        :: r == P -> break
        od
    }
}
