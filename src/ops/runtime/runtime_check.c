/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* `cofuse check runtime`: the table of cases. */
#include "ops/runtime/runtime_check.h"

#include <stdio.h>

#define RESET(power, form) (((UINT64_C(power) << 30) + 1) << 1 | (form))
#define KILLS COFI_CAP_PROCESSES | COFI_CAP_SURVIVES_DEATH

static const struct cofi_runtime_case cases[] = {
    {"case=capabilities", cofi_runtime_capabilities, 0, 1, 0},
    {"case=zeroed form=fresh", cofi_runtime_zeroed, 0, 1, 0},
    {"case=zeroed form=flat", cofi_runtime_flat, 0, 1, 0},
    {"case=zeroed form=two", cofi_runtime_two_arenas, 0, 1, 0},
    {"case=two_phase form=refused", cofi_runtime_refused, 0, 1, 0},
    {"case=two_phase form=differ", cofi_runtime_differ, 0, 2, 0},
    {"case=two_phase form=peers", cofi_runtime_wrong_peers, 0, 2, 0},
    {"case=put_get bytes=0", cofi_runtime_put_get, 0, 1, 0},
    {"case=put_get bytes=1", cofi_runtime_put_get, 1, 1, 0},
    {"case=put_get bytes=3", cofi_runtime_put_get, 3, 1, 0},
    {"case=put_get bytes=64", cofi_runtime_put_get, 64, 1, 0},
    {"case=put_get bytes=4097", cofi_runtime_put_get, 4097, 1, 0},
    {"case=put_get bytes=1048581", cofi_runtime_put_get, 1048581, 1, 0},
    {"case=put_get form=ranges", cofi_runtime_ranges, 0, 1, 0},
    {"case=message_passing bytes=64", cofi_runtime_message_passing, 64, 2, 0},
    {"case=message_passing bytes=5001", cofi_runtime_message_passing, 5001, 2, 0},
    {"case=message_passing form=chain", cofi_runtime_causality, 0, 2, 0},
    {"case=signal_count form=ahead", cofi_runtime_signal_count, 0, 1, 0},
    {"case=signal_count form=next", cofi_runtime_next_signal, 0, 2, 0},
    {"case=calls form=pull arena=own", cofi_runtime_calls, COFI_RUNTIME_PULL, 1, 0},
    {"case=calls form=push arena=own", cofi_runtime_calls, COFI_RUNTIME_PUSH, 1, 0},
    {"case=calls form=pull arena=shared", cofi_runtime_calls, 2 | COFI_RUNTIME_PULL, 1, 0},
    {"case=calls form=push arena=shared", cofi_runtime_calls, 2 | COFI_RUNTIME_PUSH, 1, 0},
    {"case=skew form=pull", cofi_runtime_skew, COFI_RUNTIME_PULL, 2, 0},
    {"case=skew form=push", cofi_runtime_skew, COFI_RUNTIME_PUSH, 3, 0},
    {"case=wrap form=pull epoch=0x40000001", cofi_runtime_wrap, RESET(1, COFI_RUNTIME_PULL), 1, 0},
    {"case=wrap form=push epoch=0x80000001", cofi_runtime_wrap, RESET(2, COFI_RUNTIME_PUSH), 1, 0},
    {"case=wrap form=pull epoch=0xc0000001", cofi_runtime_wrap, RESET(3, COFI_RUNTIME_PULL), 1, 0},
    {"case=wrap form=push epoch=1", cofi_runtime_wrap, RESET(0, COFI_RUNTIME_PUSH), 1, 0},
    {"case=wrap form=pull epoch=all", cofi_runtime_lap, COFI_RUNTIME_PULL, 1, 0},
    {"case=wrap form=push epoch=all", cofi_runtime_lap, COFI_RUNTIME_PUSH, 1, 0},
    {"case=sharing plans=2", cofi_runtime_overlay, 2, 1, 0},
    {"case=sharing plans=3", cofi_runtime_overlay, 3, 1, 0},
    {"case=sharing form=rebind", cofi_runtime_rebind, 0, 2, 0},
    {"case=sharing form=late", cofi_runtime_late, 0, 1, 0},
    {"case=sharing form=reuse", cofi_runtime_words_reused, 0, 1, 0},
    {"case=sharing form=no_room", cofi_runtime_no_room, 0, 1, 0},
    {"case=digest form=sizes", cofi_runtime_digest, COFI_RUNTIME_SIZES, 2, 0},
    {"case=digest form=direction", cofi_runtime_digest, COFI_RUNTIME_DIRECTION, 2, 0},
    {"case=digest form=order", cofi_runtime_digest, COFI_RUNTIME_ORDER, 2, 0},
    {"case=empty ranks_with=one", cofi_runtime_digest, COFI_RUNTIME_EMPTY, 2, 0},
    {"case=empty ranks_with=all", cofi_runtime_empty, 0, 1, 0},
    {"case=poison away=last", cofi_runtime_poison, 0, 2, COFI_CAP_WORLDS},
    {"case=poison away=0", cofi_runtime_poison, 1, 3, COFI_CAP_WORLDS},
    {"case=poison form=signal", cofi_runtime_no_signal, 0, 2, COFI_CAP_WORLDS},
    {"case=worlds form=two", cofi_runtime_worlds, 0, 1, COFI_CAP_WORLDS},
    {"case=worlds form=teams", cofi_runtime_teams, 0, 1, 0},
    {"case=worlds form=again", cofi_runtime_reinit, 0, 1, COFI_CAP_WORLDS | COFI_CAP_REINIT},
    {"case=death in=call", cofi_runtime_death, COFI_RUNTIME_IN_CALL, 2, KILLS},
    {"case=death in=publish", cofi_runtime_death, COFI_RUNTIME_AT_PUBLISH, 2, KILLS},
    {"case=death in=wait", cofi_runtime_death, COFI_RUNTIME_IN_WAIT, 2, KILLS},
    {"case=death in=barrier", cofi_runtime_death, COFI_RUNTIME_IN_BARRIER, 2, KILLS},
    {"case=death in=create", cofi_runtime_death, COFI_RUNTIME_IN_CREATE, 2, KILLS},
    {"case=death in=call of=0", cofi_runtime_death, COFI_RUNTIME_IN_CALL | COFI_RUNTIME_RANK0, 2,
     KILLS},
    {"case=death in=create of=0", cofi_runtime_death, COFI_RUNTIME_IN_CREATE | COFI_RUNTIME_RANK0,
     2, KILLS},
    {"case=stop in=call", cofi_runtime_death, COFI_RUNTIME_IN_CALL | COFI_RUNTIME_STOPS, 2, KILLS},
    {"case=stop in=publish of=0", cofi_runtime_death,
     COFI_RUNTIME_AT_PUBLISH | COFI_RUNTIME_STOPS | COFI_RUNTIME_RANK0, 3, KILLS},
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

/* The idx-th case for so many ranks; NULL past the end. */
static const struct cofi_runtime_case *case_at(const struct cofi_check_options *options,
                                               int64_t idx)
{
    for (int i = 0; i < N_CASES; i++)
        if (cases[i].min_ranks <= options->n_ranks && idx-- == 0)
            return &cases[i];
    const struct cofi_runtime_device *more = options->cuda ? cofi_check_cuda()->runtime : NULL;
    for (int i = 0; more && i < more->n_cases; i++)
        if (more->cases[i].min_ranks <= options->n_ranks && idx-- == 0)
            return &more->cases[i];
    return NULL;
}

static int64_t n_cases(const struct cofi_check_options *options)
{
    int64_t n = 0;
    while (case_at(options, n))
        n++;
    return n;
}

static void case_line(const struct cofi_check_options *options, int64_t idx, char *line,
                      size_t bytes)
{
    snprintf(line, bytes, "runtime %s", case_at(options, idx)->line);
}

static size_t shared_bytes(const struct cofi_check_options *options)
{
    (void)options;
    return 0;
}

static void list_caps(unsigned caps, char *text, size_t bytes)
{
#define APPEND(symbol, value, name, about)                                                         \
    if (caps & (value))                                                                            \
        cofi_check_append(text, bytes, " %s", name);
    COFI_CAPS(APPEND)
#undef APPEND
}

static const struct cofi_engine_ops *engine_of(const struct cofi_job *job)
{
    const struct cofi_engine_ops *own = job->world->ops;
    return !job->attach ? own : own->device ? cofi_engine_cuda_attach() : &cofi_engine_attach;
}

/* Ranks of a device's engine may be threads here; the cases with processes of their own would be
 * the same as where they are not. */
static unsigned missing_caps(const struct cofi_job *job, const struct cofi_engine_ops *ops,
                             unsigned wanted)
{
    unsigned caps = ops->caps;
    if (cofi_runtime_are_threads(job->world))
        caps &= ~(unsigned)COFI_CAP_PROCESSES;
    return wanted & ~caps;
}

static cof_status run_case(struct cofi_job *job, const struct cofi_check_options *options,
                           int64_t idx, struct cofi_check_result *result)
{
    const struct cofi_runtime_case *one = case_at(options, idx);
    struct cofi_runtime rt = {.job = job, .options = options, .result = result, .arg = one->arg,
                              .rank = job->rank, .n_ranks = job->n_ranks,
                              .ops = engine_of(job)};
    unsigned missing = missing_caps(job, rt.ops, one->caps);
    *result = (struct cofi_check_result){COFI_PASSED, ""};
    COF_FAIL_IF(job->n_ranks > COFI_RUNTIME_MAX_RANKS, COF_ERR_INTERNAL, "check: %d ranks",
                job->n_ranks);
    if (missing) {
        result->verdict = COFI_SKIPPED;
        snprintf(result->text, sizeof result->text, "engine %s %s:", rt.ops->name,
                 missing & rt.ops->caps ? "has other ranks here than" : "does not have");
        list_caps(missing, result->text, sizeof result->text);
        return COF_OK;
    }
    COF_TRY(one->fn(&rt));
    cofi_runtime_wants(&rt, "the team after the case", cof_team_query(job->team), COF_OK, NULL);
    return cofi_check_agree(job->team, result);
}

static const struct cofi_op_check runtime_check = {
    .has_cuda = true,
    .n_cases = n_cases,
    .case_line = case_line,
    .shared_bytes = shared_bytes,
    .run_case = run_case,
};

extern const struct cofi_op_bench cofi_runtime_bench;

const struct cofi_op cofi_op_runtime = {
    .name = "runtime",
    .summary = "what every engine must keep",
    .check = &runtime_check,
    .bench = &cofi_runtime_bench,
};
