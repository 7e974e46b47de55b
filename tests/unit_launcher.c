/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What launchers tell by environment variables, and jobs of processes that follow one another under
 * one name. tests/scenario_launchers.sh has the launchers themselves. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "core/hash.h"
#include "symm/launcher.h"
#include "test.h"

static const char *const variables[] = {
    "COFUSE_RANK", "COFUSE_SIZE", "COFUSE_JOB", "COFUSE_FDS", "RANK", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_TMPDIR", "PMI_RANK",
    "PMI_SIZE", "PMI_JOBID", "PMI_FD", "MPI_LOCALNRANKS", "SLURM_PROCID", "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_ID",
    "SLURM_NTASKS", "SLURM_RESTART_COUNT"};

#define OWN "COFUSE_RANK=2 COFUSE_SIZE=5 COFUSE_JOB=j "
#define TORCHRUN                                                                                   \
    "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=29500 "                      \
    "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 "
#define OPEN_MPI                                                                                   \
    "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_SIZE=3 "                  \
    "PMIX_NAMESPACE=77 PMIX_RANK=0 PMIX_SERVER_TMPDIR=/t/9 "
#define PMI "PMI_RANK=1 PMI_SIZE=2 PMI_JOBID=12.0 "
#define SLURM_BATCH "SLURM_PROCID=0 SLURM_JOB_ID=88 SLURM_NNODES=1 SLURM_NTASKS=8 "
#define SLURM                                                                                      \
    "SLURM_PROCID=6 SLURM_JOB_ID=88 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=8 "                       \
    "SLURM_STEP_NUM_NODES=1 SLURM_NNODES=2 "

/* Exactly these variables: "NAME=value NAME=value". */
static void set_environment(const char *settings)
{
    char text[1024], *rest = text;
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++)
        unsetenv(variables[i]);
    snprintf(text, sizeof text, "%s", settings);
    for (char *word; (word = strtok_r(rest, " ", &rest));) {
        char *equals = strchr(word, '=');
        *equals = '\0';
        setenv(word, equals + 1, 1);
    }
}

static cof_status identity(const char *settings, struct cofi_identity *out)
{
    set_environment(settings);
    return cofi_launcher_identity(out);
}

static void expect(const char *settings, const char *launcher, int rank, int n_ranks,
                   const char *job)
{
    struct cofi_identity id;
    CHECK_OK(identity(settings, &id));
    CHECK(id.rank == rank && id.n_ranks == n_ranks, "%s: rank %d of %d", settings, id.rank,
          id.n_ranks);
    CHECK(!strcmp(id.job, job), "%s: job \"%s\"", settings, id.job);
    CHECK(!strcmp(id.launcher ? id.launcher : "none", launcher), "%s: launcher %s", settings,
          id.launcher);
}

static void refuse(const char *settings, cof_status status, const char *part)
{
    struct cofi_identity id;
    CHECK_FAILS(identity(settings, &id), status, part);
}

static void test_precedence(void)
{
    expect("", "none", 0, 1, "");
    expect(SLURM, "Slurm", 6, 8, "Slurm:88:3:");
    expect(SLURM PMI, "PMI", 1, 2, "PMI:12.0");
    expect(SLURM PMI OPEN_MPI, "Open MPI", 0, 3, "Open MPI:77:/t/9");
    expect(SLURM PMI OPEN_MPI TORCHRUN, "torchrun", 1, 4, "torchrun:h:29500:none:0");
    expect(SLURM PMI OPEN_MPI TORCHRUN OWN, "cofuse", 2, 5, "cofuse:j");
    /* srun --mpi=pmix gives PMIx's rank and its own size */
    expect(SLURM "PMIX_RANK=6 PMIX_NAMESPACE=slurm.pmix.88.3 ", "Slurm", 6, 8, "Slurm:88:3:");
    expect(OPEN_MPI "COFUSE_JOB=mine ", "Open MPI", 0, 3, "Open MPI:mine");
    expect(OWN "COFUSE_SIZE= COFUSE_RANK= ", "none", 0, 1, ""); /* empty counts as unset */
}

static void test_batch_shell_is_alone(void)
{
    expect(SLURM_BATCH, "none", 0, 1, "");
    expect(SLURM_BATCH TORCHRUN, "torchrun", 1, 4, "torchrun:h:29500:none:0");
    expect("SLURM_PROCID=0 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 SLURM_NNODES=4 ",
           "Slurm", 0, 1, ""); /* salloc's own step */
}

/* Jobs at the same time, and a job after a restart, have different names. */
static void test_job_names(void)
{
    expect(TORCHRUN "TORCHELASTIC_RESTART_COUNT=1 ", "torchrun", 1, 4, "torchrun:h:29500:none:1");
    expect(TORCHRUN "MASTER_PORT=29501 ", "torchrun", 1, 4, "torchrun:h:29501:none:0");
    expect(SLURM "SLURM_STEP_ID=4 ", "Slurm", 6, 8, "Slurm:88:4:");
    expect(SLURM "SLURM_RESTART_COUNT=2 ", "Slurm", 6, 8, "Slurm:88:3:2");
    char settings[1200], tail[301];
    struct cofi_identity a, b;
    memset(tail, 'x', 300);
    tail[300] = '\0';
    snprintf(settings, sizeof settings, TORCHRUN "TORCHELASTIC_RUN_ID=%s1 ", tail);
    CHECK_OK(identity(settings, &a));
    snprintf(settings, sizeof settings, TORCHRUN "TORCHELASTIC_RUN_ID=%s2 ", tail);
    CHECK_OK(identity(settings, &b));
    CHECK(strcmp(a.job, b.job) != 0 && strlen(a.job) < sizeof a.job, "%s and %s", a.job, b.job);
}

static void test_malformed(void)
{
    refuse(OWN "COFUSE_SIZE=x ", COF_ERR_INVALID,
           "variable COFUSE_SIZE = \"x\": wanted an integer 1 .. 32767");
    refuse(OWN "COFUSE_SIZE=0 COFUSE_RANK=0 ", COF_ERR_INVALID, "COFUSE_SIZE = \"0\"");
    refuse(OWN "COFUSE_RANK=5 ", COF_ERR_INVALID, "COFUSE_RANK = \"5\": wanted an integer 0 .. 4");
    refuse(TORCHRUN "WORLD_SIZE=40000 ", COF_ERR_INVALID, "WORLD_SIZE = \"40000\"");
    refuse(TORCHRUN "WORLD_SIZE=18446744073709551617 ", COF_ERR_INVALID, "WORLD_SIZE = \"1844");
    refuse(TORCHRUN "RANK=-1 ", COF_ERR_INVALID, "RANK = \"-1\"");
    refuse(TORCHRUN "RANK=+1 ", COF_ERR_INVALID, "RANK = \"+1\"");
    refuse(TORCHRUN "RANK=1.0 ", COF_ERR_INVALID, "RANK = \"1.0\"");
    refuse(TORCHRUN "LOCAL_WORLD_SIZE=5 ", COF_ERR_INVALID,
           "LOCAL_WORLD_SIZE = \"5\": wanted an integer 1 .. 4");
    refuse(OPEN_MPI "OMPI_COMM_WORLD_SIZE=3.5 ", COF_ERR_INVALID, "OMPI_COMM_WORLD_SIZE = \"3.5\"");
    refuse(PMI "PMI_RANK=2 ", COF_ERR_INVALID, "PMI_RANK = \"2\": wanted an integer 0 .. 1");
    refuse(PMI "MPI_LOCALNRANKS=two ", COF_ERR_INVALID, "MPI_LOCALNRANKS = \"two\"");
    refuse(SLURM "SLURM_PROCID=8 ", COF_ERR_INVALID, "SLURM_PROCID = \"8\"");
    refuse(SLURM "SLURM_STEP_NUM_NODES=0 ", COF_ERR_INVALID, "SLURM_STEP_NUM_NODES = \"0\"");
}

static void test_half_sets(void)
{
    refuse("COFUSE_RANK=0 ", COF_ERR_INVALID, "COFUSE_RANK = \"0\", but COFUSE_SIZE is not set");
    refuse("COFUSE_SIZE=2 ", COF_ERR_INVALID, "COFUSE_SIZE = \"2\", but COFUSE_RANK is not set");
    refuse("RANK=0 ", COF_ERR_INVALID, "RANK = \"0\", but WORLD_SIZE is not set");
    refuse("WORLD_SIZE=2 ", COF_ERR_INVALID, "but RANK is not set");
    refuse("OMPI_COMM_WORLD_RANK=0 ", COF_ERR_INVALID, "but OMPI_COMM_WORLD_SIZE is not set");
    refuse("PMI_SIZE=2 ", COF_ERR_INVALID, "but PMI_RANK is not set");
    refuse("SLURM_STEP_ID=0 SLURM_PROCID=1 ", COF_ERR_INVALID, "SLURM_STEP_NUM_TASKS is not set");
    refuse("PMIX_RANK=1 PMIX_NAMESPACE=n ", COF_ERR_INVALID, "no variable tells the number");
    refuse("COFUSE_RANK=0 COFUSE_SIZE=2 ", COF_ERR_INVALID,
           "COFUSE_SIZE = 2, but neither COFUSE_FDS nor COFUSE_JOB is set");
    refuse("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h ", COF_ERR_INVALID, "not MASTER_PORT, which names");
    refuse("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 ", COF_ERR_INVALID, "not PMIX_NAMESPACE");
    refuse("PMI_RANK=0 PMI_SIZE=2 ", COF_ERR_INVALID, "PMI_FD is not: nothing names the job");
    refuse("PMI_RANK=0 PMI_SIZE=2 PMI_FD=9999 ", COF_ERR_INVALID, "seen from here: 9999");
    refuse("PMI_RANK=0 PMI_SIZE=2 PMI_FD=1x ", COF_ERR_INVALID, "seen from here: 1x");
    expect("PMI_RANK=0 PMI_SIZE=2 COFUSE_JOB=j ", "PMI", 0, 2, "PMI:j");
}

static void test_several_hosts(void)
{
    refuse(TORCHRUN "LOCAL_WORLD_SIZE=2 ", COF_ERR_UNSUPPORTED,
           "LOCAL_WORLD_SIZE = 2, WORLD_SIZE = 4: ranks on several hosts; wanted all on one host");
    refuse(OPEN_MPI "OMPI_COMM_WORLD_LOCAL_SIZE=1 ", COF_ERR_UNSUPPORTED, "one host");
    refuse(PMI "MPI_LOCALNRANKS=1 ", COF_ERR_UNSUPPORTED, "MPI_LOCALNRANKS = 1, PMI_SIZE = 2");
    refuse(PMI "SLURM_STEP_NUM_NODES=2 ", COF_ERR_UNSUPPORTED, "SLURM_STEP_NUM_NODES = 2");
    expect(PMI "SLURM_STEP_NUM_NODES=2 MPI_LOCALNRANKS=2 ", "PMI", 1, 2, "PMI:12.0");
    refuse(SLURM "SLURM_STEP_NUM_NODES=2 ", COF_ERR_UNSUPPORTED, "SLURM_STEP_NUM_NODES = 2");
    refuse(SLURM "SLURM_STEP_NUM_NODES= ", COF_ERR_UNSUPPORTED, "SLURM_NNODES = 2");
}

/* The proxy of MPICH's launcher is the maker of every rank's PMI socket. */
static void test_pmi_socket(void)
{
    int one[2], two[2];
    char settings[100];
    struct cofi_identity a, b;
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, one) && !socketpair(AF_UNIX, SOCK_STREAM, 0, two),
          "socketpair");
    snprintf(settings, sizeof settings, "PMI_RANK=0 PMI_SIZE=2 PMI_FD=%d ", one[0]);
    CHECK_OK(identity(settings, &a));
    snprintf(settings, sizeof settings, "PMI_RANK=1 PMI_SIZE=2 PMI_FD=%d ", two[1]);
    CHECK_OK(identity(settings, &b));
    char wanted[40];
    snprintf(wanted, sizeof wanted, "PMI:%d-", (int)getpid());
    CHECK(!strcmp(a.job, b.job) && !strncmp(a.job, wanted, strlen(wanted)), "%s and %s", a.job,
          b.job);
    CHECK(strtoull(a.job + strlen(wanted), NULL, 10) > 0, "start of the process: %s", a.job);
    for (int i = 0; i < 2; i++) {
        close(one[i]);
        close(two[i]);
    }
}

/* ---- explicit options ----------------------------------------------------------------------- */

static void explicit_rank(int rank, int n_ranks, const char *job, void *arg)
{
    (void)arg;
    cof_world *w = test_world(rank, n_ranks, job, 10);
    CHECK(cof_world_rank(w) == rank && cof_world_size(w) == n_ranks, "rank %d of %d",
          cof_world_rank(w), cof_world_size(w));
    CHECK_OK(cof_team_barrier(cof_world_team(w)));
    cof_world_destroy(w);
}

static void test_explicit_options_win(void)
{
    set_environment(OWN TORCHRUN "WORLD_SIZE=nonsense COFUSE_FDS=-1,-1 PMI_RANK=1 ");
    test_ranks(3, explicit_rank, NULL);
    test_ranks(1, explicit_rank, NULL);
    set_environment("");
}

/* ---- processes ------------------------------------------------------------------------------ */

static cof_world *join_as_process(int rank, const char *job)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    o.n_ranks = 3;
    o.rank = rank;
    o.job = job;
    o.engine = COF_ENGINE_SHM;
    o.n_threads = 1;
    o.init_timeout = 30;
    cof_world *w;
    return cof_world_create(&o, &w) == COF_OK ? w : NULL;
}

/* Exit codes of ranks */
enum { JOINED = 0, NOT_JOINED = 10, OTHER = 11 };

/* Joins and leaves in order. */
static int join_and_leave(int rank, const char *job, int ready_fd)
{
    (void)ready_fd;
    cof_world *w = join_as_process(rank, job);
    if (!w)
        return NOT_JOINED;
    cof_status status = cof_team_barrier(cof_world_team(w));
    cof_world_destroy(w);
    return status == COF_OK ? JOINED : OTHER;
}

/* Rank 0 is killed: while joining, or while the others wait for it. */
static int outlive_rank0(int rank, const char *job, int ready_fd)
{
    cof_world *w = join_as_process(rank, job);
    if (!w)
        return rank && strstr(cof_last_error(), "went away") ? NOT_JOINED : OTHER;
    if (rank == 0) {
        if (write(ready_fd, "r", 1) == 1)
            pause();
        return OTHER;
    }
    cof_status status = cof_team_barrier(cof_world_team(w));
    cof_world_destroy(w);
    return status == COF_ERR_PEER_DEAD ? JOINED : OTHER;
}

static pid_t start(int rank, const char *job, int ready_fd,
                   int (*fn)(int rank, const char *job, int ready_fd))
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        int code = fn(rank, job, ready_fd);
        if (code != JOINED && code != NOT_JOINED)
            fprintf(stderr, "rank %d: %s\n", rank, cof_last_error());
        _exit(code);
    }
    return pid;
}

static int end_of(pid_t pid)
{
    int end = -1;
    waitpid(pid, &end, 0);
    return WIFEXITED(end) ? WEXITSTATUS(end) : -WTERMSIG(end);
}

static void whole_job(const char *job)
{
    pid_t pid[3];
    for (int r = 0; r < 3; r++)
        pid[r] = start(r, job, -1, join_and_leave);
    for (int r = 0; r < 3; r++) {
        int end = end_of(pid[r]);
        CHECK(end == JOINED, "rank %d of the next job: %d", r, end);
    }
}

/* Sockets at the job's address: the listener and every connection to it. */
static int sockets_of(const char *job)
{
    char name[64], line[512];
    uint64_t hash = cofi_hash_u64(COFI_HASH_SEED, (uint64_t)getuid());
    snprintf(name, sizeof name, "@cofuse-%016llx",
             (unsigned long long)cofi_hash(hash, job, strlen(job)));
    FILE *file = fopen("/proc/net/unix", "r");
    int n = 0;
    while (file && fgets(line, sizeof line, file))
        n += strstr(line, name) != NULL;
    if (file)
        fclose(file);
    return n;
}

static void test_rank0_killed_while_joining(void)
{
    char job[64];
    snprintf(job, sizeof job, "killed-joining-%d", (int)getpid());
    pid_t rank0 = start(0, job, -1, outlive_rank0), rank1 = start(1, job, -1, outlive_rank0);
    for (int i = 0; i < 3000 && sockets_of(job) < 2; i++)
        usleep(10000);
    CHECK(sockets_of(job) >= 2, "rank 1 has not connected");
    kill(rank0, SIGKILL);
    int end = end_of(rank0);
    CHECK(end == -SIGKILL, "rank 0: %d", end);
    end = end_of(rank1);
    CHECK(end == NOT_JOINED, "rank 1: %d", end);
    whole_job(job);
}

static void test_rank0_killed_while_running(void)
{
    char job[64], byte;
    int ready[2];
    pid_t pid[3];
    snprintf(job, sizeof job, "killed-running-%d", (int)getpid());
    CHECK(pipe(ready) == 0, "pipe");
    for (int r = 0; r < 3; r++)
        pid[r] = start(r, job, ready[1], outlive_rank0);
    close(ready[1]);
    CHECK(read(ready[0], &byte, 1) == 1, "rank 0 did not join");
    close(ready[0]);
    kill(pid[0], SIGKILL);
    whole_job(job); /* while the others of the killed job may be there still */
    for (int r = 0; r < 3; r++) {
        int end = end_of(pid[r]);
        CHECK(end == (r ? JOINED : -SIGKILL), "rank %d: %d", r, end);
    }
}

/* A world that rank 1 refuses by itself is none: its number is for the next one. */
static bool is_refused(void)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    cof_world *w;
    o.engine = (cof_engine)9;
    return cof_world_create(&o, &w) == COF_ERR_INVALID;
}

/* Two worlds at once from one environment: rank 1 comes to the second when it may. */
static int two_worlds(int rank, const char *job, int may_go_fd)
{
    char settings[120], byte;
    snprintf(settings, sizeof settings, "COFUSE_RANK=%d COFUSE_SIZE=2 COFUSE_JOB=%s ", rank, job);
    set_environment(settings);
    cof_world *first, *second;
    setenv("COFUSE_INIT_TIMEOUT", "30", 1);
    if (rank == 1 && !is_refused())
        return OTHER;
    if (cof_world_create(NULL, &first) != COF_OK)
        return OTHER;
    if (rank == 1 && read(may_go_fd, &byte, 1) != 1)
        return OTHER;
    if (cof_world_create(NULL, &second) != COF_OK)
        return OTHER;
    cof_status status = cof_team_barrier(cof_world_team(second));
    if (status == COF_OK)
        status = cof_team_barrier(cof_world_team(first));
    cof_world_destroy(second);
    cof_world_destroy(first);
    return status == COF_OK ? JOINED : OTHER;
}

static void test_worlds_are_numbered(void)
{
    char job[64], second[80];
    int may_go[2];
    snprintf(job, sizeof job, "numbered-%d", (int)getpid());
    snprintf(second, sizeof second, "cofuse:%s#1", job);
    CHECK(pipe(may_go) == 0, "pipe");
    pid_t rank0 = start(0, job, may_go[0], two_worlds);
    pid_t rank1 = start(1, job, may_go[0], two_worlds);
    for (int i = 0; i < 3000 && sockets_of(second) < 1; i++)
        usleep(10000);
    CHECK(sockets_of(second) >= 1, "rank 0 does not listen for world 1");
    CHECK(write(may_go[1], "g", 1) == 1, "pipe");
    int end0 = end_of(rank0), end1 = end_of(rank1);
    CHECK(end0 == JOINED && end1 == JOINED, "rank 0: %d, rank 1: %d", end0, end1);
    close(may_go[0]);
    close(may_go[1]);
}

int main(void)
{
    test_rank0_killed_while_joining(); /* processes first: no thread has been started yet */
    test_rank0_killed_while_running();
    test_worlds_are_numbered();
    test_precedence();
    test_batch_shell_is_alone();
    test_job_names();
    test_malformed();
    test_half_sets();
    test_several_hosts();
    test_pmi_socket();
    test_explicit_options_win();
    return test_done();
}
