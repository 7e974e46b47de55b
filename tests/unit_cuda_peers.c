/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What ranks on devices decide from what all of them told, with devices made up. */
#include "symm/device_peers.h"

#include "test.h"

#define N 4

/* Ranks 0 .. 3 on a device each, which has everything. */
static void make(struct cofi_device_info ranks[N])
{
    memset(ranks, 0, N * sizeof *ranks);
    for (int r = 0; r < N; r++) {
        struct cofi_device_info *i = &ranks[r];
        snprintf(i->id.name, sizeof i->id.name, "NVIDIA H200");
        memset(i->id.uuid, 0xa0 + r, sizeof i->id.uuid);
        i->n_sms = 132;
        i->has_vmm = i->has_ipc = 1;
    }
}

static void put_on(struct cofi_device_info *rank, const char *name, int uuid)
{
    snprintf(rank->id.name, sizeof rank->id.name, "%s", name);
    memset(rank->id.uuid, uuid, sizeof rank->id.uuid);
}

static void test_counts(void)
{
    struct cofi_device_info ranks[N];
    make(ranks);
    for (int r = 0; r < N; r++)
        CHECK(cofi_device_n_ranks(ranks, N, r) == 1, "rank %d", r);
    put_on(&ranks[3], "NVIDIA H200", 0xa1);
    ranks[2].n_sms = 78;
    CHECK(cofi_device_n_ranks(ranks, N, 0) == 1, "rank 0 is alone");
    CHECK(cofi_device_n_ranks(ranks, N, 1) == 2, "ranks 1 and 3 share one");
    CHECK(cofi_device_n_ranks(ranks, N, 3) == 2, "ranks 3 and 1 share one");
    CHECK(cofi_device_most_ranks(ranks, N) == 2, "for rank 0 as well");
    CHECK(cofi_device_n_sms(ranks, N) == 78, "the fewest");
    CHECK_OK(cofi_device_check_kinds(ranks, N));
}

static void test_mig(void)
{
    struct cofi_device_info ranks[N];
    make(ranks);
    put_on(&ranks[2], "NVIDIA H200 MIG 1g.18gb", 0xb0);
    CHECK_FAILS(cofi_device_check_kinds(ranks, N), COF_ERR_UNSUPPORTED,
                "rank 0 on GPU-a0a0a0a0 (NVIDIA H200) and rank 2 on MIG-b0b0b0b0 "
                "(NVIDIA H200 MIG 1g.18gb)");
    for (int r = 0; r < N; r++)
        put_on(&ranks[r], "NVIDIA H200 MIG 1g.18gb", 0xb0 + r);
    CHECK_FAILS(cofi_device_check_kinds(ranks, N), COF_ERR_UNSUPPORTED, "rank 1 on MIG-b1b1b1b1");
    for (int r = 0; r < N; r++)
        put_on(&ranks[r], "NVIDIA H200 MIG 1g.18gb", 0xb0);
    CHECK_OK(cofi_device_check_kinds(ranks, N));
    CHECK(cofi_device_n_ranks(ranks, N, 2) == N, "all in one instance");
}

static void test_access(void)
{
    struct cofi_device_info ranks[N];
    signed char can[N] = {1, 1, -1, -1};
    make(ranks);
    CHECK_OK(cofi_device_check_access(ranks, N, 1, can));
    can[3] = 0;
    CHECK_FAILS(cofi_device_check_access(ranks, N, 1, can), COF_ERR_UNSUPPORTED,
                "rank 1 on GPU-a1a1a1a1 (NVIDIA H200) and rank 3 on GPU-a3a3a3a3");
}

static void test_memory(void)
{
    struct cofi_device_info ranks[N];
    enum cofi_device_memory memory = COFI_MEMORY_ANY;
    make(ranks);
    CHECK_OK(cofi_device_choose_memory(ranks, N, &memory));
    CHECK(memory == COFI_MEMORY_VMM, "all have both: %d", memory);
    ranks[2].has_vmm = 0;
    CHECK_OK(cofi_device_choose_memory(ranks, N, &memory));
    CHECK(memory == COFI_MEMORY_IPC, "one has no vmm: %d", memory);
    ranks[1].wanted = COFI_MEMORY_VMM;
    CHECK_FAILS(cofi_device_choose_memory(ranks, N, &memory), COF_ERR_UNSUPPORTED,
                "(vmm) is not to be had of rank 2's device");
    ranks[3].wanted = COFI_MEMORY_IPC;
    CHECK_FAILS(cofi_device_choose_memory(ranks, N, &memory), COF_ERR_MISMATCH,
                "vmm on rank 1, ipc on rank 3");
    ranks[1].wanted = COFI_MEMORY_IPC;
    CHECK_OK(cofi_device_choose_memory(ranks, N, &memory));
    CHECK(memory == COFI_MEMORY_IPC, "two want it: %d", memory);
    ranks[0].has_ipc = 0;
    CHECK_FAILS(cofi_device_choose_memory(ranks, N, &memory), COF_ERR_UNSUPPORTED,
                "(ipc) is not to be had of rank 0's device");
}

static void check_match(const char *text, const struct cofi_device_id *ids, int wanted)
{
    int device = -1;
    cof_status status = cofi_device_match("device", text, ids, 3, &device);
    CHECK(status == COF_OK && device == wanted, "%s: %s, device %d", text,
          status == COF_OK ? "ok" : cof_last_error(), device);
}

static void test_match(void)
{
    struct cofi_device_id ids[3] = {{"NVIDIA H200", {0x1f, 0x2e, 0x3d, 0x4c, 0x55}},
                                    {"NVIDIA H200", {0x1f, 0x2e, 0x3d, 0x4c, 0x66}},
                                    {"NVIDIA H200", {0x12, 0x34, 0x56, 0x78}}};
    int device;
    check_match("0", ids, 0);
    check_match("2", ids, 2);
    check_match("GPU-1f2e3d4c-55", ids, 0);
    check_match("1F2E3D4C-66", ids, 1);
    check_match("12345678", ids, 2); /* eight digits: no number of a device */
    check_match("GPU-12345678-0000-0000-0000-000000000000", ids, 2);
    CHECK_FAILS(cofi_device_match("device", "3", ids, 3, &device), COF_ERR_INVALID,
                "device = \"3\": wanted 0 .. 2");
    CHECK_FAILS(cofi_device_match("device", "GPU-1f2e3d4c", ids, 3, &device), COF_ERR_INVALID,
                "devices 0 and 1 both begin so");
    CHECK_FAILS(cofi_device_match("device", "GPU-1f2e", ids, 3, &device), COF_ERR_INVALID,
                "at least 8 digits");
    CHECK_FAILS(cofi_device_match("device", "GPU-ffffffff", ids, 3, &device), COF_ERR_INVALID,
                "none of the 3 devices");
    CHECK_FAILS(cofi_device_match("device", "cuda:0", ids, 3, &device), COF_ERR_INVALID,
                "wanted a number, or a UUID");
    CHECK_FAILS(cofi_device_match("device", "", ids, 3, &device), COF_ERR_INVALID,
                "wanted a number, or a UUID");
    CHECK_FAILS(cofi_device_match("device", "-1", ids, 3, &device), COF_ERR_INVALID,
                "wanted a number, or a UUID");
}

/* Where no device can be used, and in a build without CUDA: an error that says so, on all ranks. */
static void test_no_device(int rank, int n_ranks, const char *job, void *arg)
{
    cof_world_options o = COF_WORLD_OPTIONS_INIT;
    cof_world *w = NULL;
    (void)arg;
    o.rank = rank;
    o.n_ranks = n_ranks;
    o.job = job;
    o.engine = COF_ENGINE_CUDA;
    o.init_timeout = 20;
    cof_status status = cof_world_create(&o, &w);
    if (status == COF_OK)
        CHECK(!strcmp(cof_world_engine(w), "cuda"), "engine %s", cof_world_engine(w));
    else
        CHECK(status == COF_ERR_UNSUPPORTED && strstr(cof_last_error(), "cuda"), "%s",
              cof_last_error());
    cof_world_destroy(w);
}

int main(void)
{
    test_counts();
    test_mig();
    test_access();
    test_memory();
    test_match();
    test_ranks(1, test_no_device, NULL);
    test_ranks(3, test_no_device, NULL);
    return test_done();
}
