/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Limits of memory are found before anything is taken: the host's, the cgroup's and those above it,
 * in both versions, on trees of files made for it. */
#define _GNU_SOURCE /* nftw */
#include <ftw.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "symm/memory.h"
#include "test.h"

static char root[] = "/tmp/cof-memory-XXXXXX";

/* Writes a file below the root, with its directories. */
static void put(const char *path, const char *text)
{
    char full[256];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *at = full + strlen(root) + 1; (at = strchr(at, '/')); *at++ = '/') {
        *at = '\0';
        mkdir(full, 0700);
    }
    FILE *file = fopen(full, "w");
    CHECK(file != NULL, "%s", full);
    if (file) {
        fputs(text, file);
        fclose(file);
    }
}

static int forget(const char *path, const struct stat *info, int type, struct FTW *walk)
{
    (void)info, (void)type, (void)walk;
    return remove(path);
}

static void clear(void)
{
    char inside[64];
    snprintf(inside, sizeof inside, "%s/proc", root);
    nftw(inside, forget, 8, FTW_DEPTH | FTW_PHYS);
    snprintf(inside, sizeof inside, "%s/sys", root);
    nftw(inside, forget, 8, FTW_DEPTH | FTW_PHYS);
}

static void test_host(void)
{
    put("/proc/meminfo", "MemTotal: 8000 kB\nMemAvailable:    1000 kB\n");
    CHECK_OK(cofi_memory_check_below(root, 1000 * 1024));
    CHECK_FAILS(cofi_memory_check_below(root, 1000 * 1024 + 1), COF_ERR_NOMEM,
                "1024001 bytes wanted, 1024000 are available on this host");
    clear();
    CHECK_OK(cofi_memory_check_below(root, SIZE_MAX)); /* nothing is known */
}

static void test_version_2(void)
{
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/sys/fs/cgroup/a/b/memory.max", "max\n");
    put("/sys/fs/cgroup/a/b/memory.current", "70\n");
    CHECK_OK(cofi_memory_check_below(root, SIZE_MAX));
    put("/sys/fs/cgroup/a/memory.max", "100\n"); /* of the group above */
    put("/sys/fs/cgroup/a/memory.current", "80\n");
    CHECK_OK(cofi_memory_check_below(root, 20));
    CHECK_FAILS(cofi_memory_check_below(root, 21), COF_ERR_NOMEM, "20 are left in the cgroup");
    put("/sys/fs/cgroup/a/memory.stat", "anon 50\nfile 30\ninactive_file 10\nactive_file 5\n");
    CHECK_OK(cofi_memory_check_below(root, 35));
    CHECK_FAILS(cofi_memory_check_below(root, 36), COF_ERR_NOMEM, "35 are left in the cgroup");
    put("/sys/fs/cgroup/a/b/memory.max", "60\n"); /* used up */
    CHECK_FAILS(cofi_memory_check_below(root, 1), COF_ERR_NOMEM, "0 are left in the cgroup");
    clear();
}

static void test_version_1(void)
{
    put("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/pod/leaf\n0::/\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "1000\n"); /* a container sees its own here */
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "900\n");
    put("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 40\ninactive_file 7\n");
    CHECK_OK(cofi_memory_check_below(root, 140));
    CHECK_FAILS(cofi_memory_check_below(root, 141), COF_ERR_NOMEM, "140 are left in the cgroup");
    clear();
}

static void test_file_limit(void)
{
    struct rlimit old, low;
    getrlimit(RLIMIT_FSIZE, &old);
    low = old;
    low.rlim_cur = 1 << 20;
    setrlimit(RLIMIT_FSIZE, &low);
    cof_status fits = cofi_memory_check_file(1, 1 << 20);
    cof_status status = cofi_memory_check_file(1, (1 << 20) + 1);
    setrlimit(RLIMIT_FSIZE, &old);
    CHECK(fits == COF_OK, "%s", cof_last_error());
    CHECK(status == COF_ERR_NOMEM && strstr(cof_last_error(), "limited to 1048576"), "%s",
          cof_last_error());
}

int main(void)
{
    CHECK(mkdtemp(root) != NULL, "%s", root);
    test_host();
    test_version_2();
    test_version_1();
    test_file_limit();
    rmdir(root);
    return test_done();
}
