/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Attention plans that share an arena: the same bits as with arenas of their own, also where the
 * epoch comes round and on attached memory. Ranks are threads. */
#include "symm/arena.h"
#include "test.h"

enum { N_PLANS = 2, N_RANKS = 3, N_ROUNDS = 6, ATTACHED = 1 << 18 };

struct setting {
    uint32_t first_epoch;
    bool attach;
    char *block[N_RANKS];
};

struct problem {
    struct test_attention t;
    cof_plan *plan;
    float *wanted; /* o, dq, dk, dv, one after the other */
};

static size_t outputs(struct problem *p, float *to)
{
    const cof_tensor *out[] = {&p->t.o, &p->t.dq, &p->t.dk, &p->t.dv};
    size_t n = 0;
    for (int i = 0; i < 4; i++) {
        size_t count = 1;
        for (int d = 0; d < out[i]->ndim; d++)
            count *= (size_t)out[i]->shape[d];
        if (to)
            memcpy(to + n, out[i]->data, count * sizeof(float));
        n += count;
    }
    return n;
}

static void run_both(struct problem *p, cof_stream stream)
{
    for (int i = 0; i < N_PLANS; i++)
        CHECK_OK(cof_attention_forward(p[i].plan, &p[i].t.args, stream));
    for (int i = N_PLANS - 1; i >= 0; i--)
        CHECK_OK(cof_attention_backward(p[i].plan, &p[i].t.args, stream));
    CHECK_OK(cof_stream_sync(stream));
}

static void make_plans(cof_team *team, struct problem *p, cof_arena *arena)
{
    for (int i = 0; i < N_PLANS; i++)
        CHECK_OK(cof_attention_plan_create(team, &p[i].t.params, arena, &p[i].plan));
}

static cof_arena *make_arena(cof_team *team, struct problem *p, const struct setting *s)
{
    cof_workspace_sizes sizes = COF_WORKSPACE_SIZES_INIT;
    size_t largest = 0, words = 0;
    cof_arena *arena = NULL;
    for (int i = 0; i < N_PLANS; i++) {
        CHECK_OK(cof_attention_workspace(team, &p[i].t.params, &sizes));
        largest = sizes.symmetric > largest ? sizes.symmetric : largest;
        words += sizes.words;
    }
    struct cofi_arena_spec spec = {.bytes = largest + words, .first_epoch = s->first_epoch};
    void *base[N_RANKS];
    for (int r = 0; r < N_RANKS; r++)
        base[r] = s->block[r];
    if (s->attach) {
        spec.bytes = cof_arena_attach_bytes(team, largest + words, 0);
        spec.peers = base;
        CHECK(spec.bytes <= ATTACHED, "%zu bytes", spec.bytes);
    }
    CHECK_OK(cofi_arena_open(team, &spec, COF_OK, &arena));
    return arena;
}

static void shared(int rank, int n_ranks, const char *job, void *arg)
{
    const struct setting *s = arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w);
    struct problem p[N_PLANS] = {0};
    cof_stream stream;
    CHECK_OK(cof_stream_create(w, 1, &stream));
    for (int i = 0; i < N_PLANS; i++) {
        cof_attention_params params = test_attention_params(i ? 67 : 40);
        params.n_kv_heads = i ? 1 : 2;
        test_attention_make(&p[i].t, &params, rank, n_ranks, (unsigned)(10 * rank + 100 * i));
        p[i].wanted = malloc(outputs(&p[i], NULL) * sizeof(float));
    }
    make_plans(team, p, NULL);
    CHECK(strstr(cof_plan_describe(p[0].plan), "arena=own"), "%s", cof_plan_describe(p[0].plan));
    run_both(p, stream);
    for (int i = 0; i < N_PLANS; i++) {
        outputs(&p[i], p[i].wanted);
        cof_plan_destroy(p[i].plan);
    }
    cof_arena *arena = make_arena(team, p, s);
    make_plans(team, p, arena);
    CHECK(strstr(cof_plan_describe(p[0].plan), "arena=shared"), "%s", cof_plan_describe(p[0].plan));
    for (int round = 0; round < N_ROUNDS; round++) {
        if (rank == round % n_ranks)
            usleep(2000);
        run_both(p, stream);
        for (int i = 0; i < N_PLANS; i++) {
            float *got = malloc(outputs(&p[i], NULL) * sizeof(float));
            size_t n = outputs(&p[i], got);
            CHECK(!memcmp(got, p[i].wanted, n * sizeof(float)), "plan %d differs in round %d", i,
                  round);
            free(got);
        }
    }
    CHECK_OK(cof_team_barrier(team));
    for (int i = 0; i < N_PLANS; i++) {
        cof_plan_destroy(p[i].plan);
        test_attention_free(&p[i].t);
        free(p[i].wanted);
    }
    cof_stream_destroy(stream);
    cof_arena_destroy(arena);
    cof_world_destroy(w);
}

/* Too small an arena, and one of another team. */
static void refused(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 20);
    cof_team *team = cof_world_team(w), *other = NULL;
    cof_attention_params params = test_attention_params(40);
    cof_arena *arena;
    cof_plan *plan = NULL;
    int ranks[N_RANKS] = {2, 1, 0};
    CHECK_OK(cof_arena_create(team, 4096, 0, &arena));
    CHECK_FAILS(cof_attention_plan_create(team, &params, arena, &plan), COF_ERR_NOMEM, "no room");
    CHECK_OK(cof_team_create(w, ranks, N_RANKS, 1, &other));
    CHECK_FAILS(cof_attention_plan_create(other, &params, arena, &plan), COF_ERR_INVALID,
                "arena: made for another team");
    CHECK(!plan, "a plan came out");
    CHECK_OK(cof_team_barrier(team));
    cof_arena_destroy(arena);
    cof_team_destroy(other);
    cof_world_destroy(w);
}

int main(void)
{
    struct setting settings[] = {{.first_epoch = 1},
                                 {.first_epoch = UINT32_C(0x3ffffffa)},
                                 {.first_epoch = UINT32_C(0x7ffffff5)},
                                 {.first_epoch = UINT32_C(0xfffffff5)},
                                 {.attach = true}};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        for (int r = 0; r < N_RANKS; r++) {
            settings[i].block[r] = aligned_alloc(128, ATTACHED);
            memset(settings[i].block[r], 0x5a, ATTACHED);
        }
        test_ranks(N_RANKS, shared, &settings[i]);
        for (int r = 0; r < N_RANKS; r++)
            free(settings[i].block[r]);
    }
    test_ranks(N_RANKS, refused, NULL);
    return test_done();
}
