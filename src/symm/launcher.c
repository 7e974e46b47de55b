/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "symm/launcher.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "core/error.h"
#include "core/hash.h"

struct launcher {
    const char *name;
    const char *rank, *size; /* both set, or this is not the launcher */
    const char *only_with;   /* and this one, where given */
    const char *local_size;  /* ranks on this host, where it is set; else: */
    const char *n_hosts[2];  /* number of hosts, the first that is set */
    /* What names the job: all of job[], and what is set of job_too[]; or a function. */
    const char *job[2], *job_too[2];
    cof_status (*make_job)(const struct launcher *l, char *text, size_t bytes);
};

static cof_status make_own_job(const struct launcher *l, char *text, size_t bytes);
static cof_status make_pmi_job(const struct launcher *l, char *text, size_t bytes);

/* The first whose variables are there. A name that may come again while the processes of its last
 * use are alive needs a second part: torchrun's run id is "none" when nobody gives one, and Open
 * MPI's namespace a hash of 16 bits. Slurm: the shell of a batch script has SLURM_PROCID = 0 and
 * the job's SLURM_NTASKS, but no SLURM_STEP_ID; it is a world of one, as nobody has started the
 * others. */
static const struct launcher launchers[] = {
    {.name = "cofuse", .rank = "COFUSE_RANK", .size = "COFUSE_SIZE", .make_job = make_own_job},
    {.name = "torchrun", .rank = "RANK", .size = "WORLD_SIZE", .local_size = "LOCAL_WORLD_SIZE",
     .job = {"MASTER_ADDR", "MASTER_PORT"},
     .job_too = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
    {.name = "Open MPI", .rank = "OMPI_COMM_WORLD_RANK", .size = "OMPI_COMM_WORLD_SIZE",
     .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .job = {"PMIX_NAMESPACE"}, .job_too = {"PMIX_SERVER_TMPDIR"}},
    {.name = "PMI", .rank = "PMI_RANK", .size = "PMI_SIZE", .local_size = "MPI_LOCALNRANKS",
     .n_hosts = {"SLURM_STEP_NUM_NODES"}, .make_job = make_pmi_job},
    {.name = "Slurm", .rank = "SLURM_PROCID", .size = "SLURM_STEP_NUM_TASKS",
     .only_with = "SLURM_STEP_ID", .n_hosts = {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"},
     .job = {"SLURM_JOB_ID", "SLURM_STEP_ID"}, .job_too = {"SLURM_RESTART_COUNT"}},
    /* Last: only where no other row says how many ranks there are. */
    {.name = "PMIx", .rank = "PMIX_RANK"},
};
enum { N_LAUNCHERS = sizeof launchers / sizeof launchers[0] };

/* ---- variables ------------------------------------------------------------------------------ */

/* NULL when unset; an empty variable counts as unset. */
static const char *variable(const char *name)
{
    const char *text = name ? getenv(name) : NULL;
    return text && *text ? text : NULL;
}

/* An integer min .. max in plain digits. */
static cof_status read_int(const char *name, int min, int max, int *out)
{
    const char *text = variable(name);
    int64_t value = 0;
    size_t n = strspn(text, "0123456789");
    for (size_t i = 0; i < n && value <= max; i++)
        value = value * 10 + (text[i] - '0');
    COF_FAIL_IF(n == 0 || text[n] || value < min || value > max, COF_ERR_INVALID,
                "variable %s = \"%.80s\": wanted an integer %d .. %d", name, text, min, max);
    *out = (int)value;
    return COF_OK;
}

static cof_status read_rank_and_size(const struct launcher *l, struct cofi_identity *out)
{
    COF_FAIL_IF(!l->size, COF_ERR_INVALID,
                "variable %s = \"%.80s\", but no variable tells the number of ranks: set "
                "COFUSE_RANK, COFUSE_SIZE and COFUSE_JOB, or give rank, n_ranks and job",
                l->rank, variable(l->rank));
    const char *missing = !variable(l->size) ? l->size : !variable(l->rank) ? l->rank : NULL;
    const char *given = missing == l->rank ? l->size : l->rank;
    COF_FAIL_IF(missing, COF_ERR_INVALID,
                "variable %s = \"%.80s\", but %s is not set: wanted both or none", given,
                variable(given), missing);
    COF_TRY(read_int(l->size, 1, INT16_MAX, &out->n_ranks));
    return read_int(l->rank, 0, out->n_ranks - 1, &out->rank);
}

static cof_status check_one_host(const struct launcher *l, int n_ranks)
{
    if (variable(l->local_size)) {
        int n_local;
        COF_TRY(read_int(l->local_size, 1, n_ranks, &n_local));
        COF_FAIL_IF(n_local != n_ranks, COF_ERR_UNSUPPORTED,
                    "variable %s = %d, %s = %d: ranks on several hosts; wanted all on one host",
                    l->local_size, n_local, l->size, n_ranks);
        return COF_OK;
    }
    const char *name = variable(l->n_hosts[0]) ? l->n_hosts[0] : l->n_hosts[1];
    int n_hosts = 1;
    if (variable(name))
        COF_TRY(read_int(name, 1, INT32_MAX, &n_hosts));
    COF_FAIL_IF(n_hosts > 1 && n_ranks > 1, COF_ERR_UNSUPPORTED,
                "variable %s = %d: ranks on several hosts; wanted all on one host", name, n_hosts);
    return COF_OK;
}

/* ---- the job's name ------------------------------------------------------------------------- */

/* Too long a text keeps its beginning, for errors, and is told apart by its hash. */
static void shorten(const char *name, const char *text, char job[COFI_JOB_TOKEN_BYTES])
{
    int n = snprintf(job, COFI_JOB_TOKEN_BYTES, "%s:%s", name, text);
    if (n >= COFI_JOB_TOKEN_BYTES)
        snprintf(job, COFI_JOB_TOKEN_BYTES, "%s:%.32s~%016llx", name, text,
                 (unsigned long long)cofi_hash(COFI_HASH_SEED, text, strlen(text)));
}

static void add_part(char *text, size_t bytes, const char *part)
{
    size_t used = strlen(text);
    snprintf(text + used, bytes - used, "%s%s", used ? ":" : "", part);
}

static cof_status make_job(const struct launcher *l, char *text, size_t bytes)
{
    for (int i = 0; i < 2 && l->job[i]; i++) {
        COF_FAIL_IF(!variable(l->job[i]), COF_ERR_INVALID,
                    "variable %s is set, but not %s, which names the job: set it or COFUSE_JOB, "
                    "the same on all ranks", l->rank, l->job[i]);
        add_part(text, bytes, variable(l->job[i]));
    }
    for (int i = 0; i < 2 && l->job_too[i]; i++)
        add_part(text, bytes, variable(l->job_too[i]) ? variable(l->job_too[i]) : "");
    return COF_OK;
}

static cof_status make_own_job(const struct launcher *l, char *text, size_t bytes)
{
    (void)text;
    (void)bytes;
    /* Reached without COFUSE_JOB only. */
    COF_FAIL_IF(!variable("COFUSE_FDS"), COF_ERR_INVALID,
                "variable %s = %s, but neither COFUSE_FDS nor COFUSE_JOB is set: start the ranks "
                "with `cofuse launch`, or give rank, n_ranks and job", l->size, variable(l->size));
    return COF_OK;
}

/* "pid-start" of the process that made the socket behind a descriptor: with MPICH's launcher the
 * proxy that started all ranks of this host. False where the descriptor is something else, or the
 * process is not to be seen from here. */
static bool socket_maker(const char *fd_text, char *text, size_t bytes)
{
    struct ucred maker = {0};
    socklen_t maker_bytes = sizeof maker;
    char *end, path[64], stat[512] = "";
    long fd = strtol(fd_text, &end, 10);
    if (*end || fd < 0 || fd > INT32_MAX ||
        getsockopt((int)fd, SOL_SOCKET, SO_PEERCRED, &maker, &maker_bytes) || maker.pid <= 0)
        return false;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)maker.pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    size_t n = fread(stat, 1, sizeof stat - 1, file);
    fclose(file);
    stat[n] = '\0';
    /* "pid (name) state ppid ...": the start is the 22nd field, the 20th after the name. */
    char *field = strrchr(stat, ')');
    for (int i = 0; field && i < 20; i++)
        field = strchr(field + 1, ' ');
    if (!field)
        return false;
    snprintf(text, bytes, "%d-%llu", (int)maker.pid, strtoull(field, NULL, 10));
    return true;
}

/* Slurm's PMI names the job; MPICH's launcher does so only when asked through its socket, which
 * belongs to the MPI library: whose socket it is serves as well. */
static cof_status make_pmi_job(const struct launcher *l, char *text, size_t bytes)
{
    const char *id = variable("PMI_JOBID"), *fd = variable("PMI_FD");
    if (id) {
        add_part(text, bytes, id);
        return COF_OK;
    }
    COF_FAIL_IF(!fd || !socket_maker(fd, text, bytes), COF_ERR_INVALID,
                "variable %s is set, but PMI_JOBID is not and PMI_FD %s%.20s: nothing names the "
                "job; set COFUSE_JOB, the same on all ranks", l->rank,
                fd ? "is no socket of a process seen from here: " : "is not", fd ? fd : "");
    return COF_OK;
}

/* ---- identity ------------------------------------------------------------------------------- */

static bool is_present(const struct launcher *l)
{
    return (variable(l->rank) || variable(l->size)) && (!l->only_with || variable(l->only_with));
}

cof_status cofi_launcher_identity(struct cofi_identity *out)
{
    const struct launcher *l = launchers;
    while (l < launchers + N_LAUNCHERS && !is_present(l))
        l++;
    *out = (struct cofi_identity){.n_ranks = 1};
    if (l == launchers + N_LAUNCHERS)
        return COF_OK;
    out->launcher = l->name;
    COF_TRY(read_rank_and_size(l, out));
    COF_TRY(check_one_host(l, out->n_ranks));
    if (out->n_ranks == 1)
        return COF_OK;
    char text[4096] = "";
    if (variable("COFUSE_JOB")) /* also names the job of another launcher */
        add_part(text, sizeof text, variable("COFUSE_JOB"));
    else
        COF_TRY(l->make_job ? l->make_job(l, text, sizeof text)
                            : make_job(l, text, sizeof text));
    out->has_sockets = l->make_job == make_own_job && variable("COFUSE_FDS");
    if (*text)
        shorten(l->name, text, out->job);
    return COF_OK;
}
