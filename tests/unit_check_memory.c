/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* Buffers of checks: what was written where it should not be is found. */
#include "ops/check_memory.h"
#include "test.h"

enum { BYTES = 1001 };

static bool is_filled(const char *data, int byte, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)data[i] != byte)
            return false;
    return true;
}

static void check_copies(struct cofi_check_memory *m)
{
    CHECK(is_filled(m->data, 0xff, BYTES), "fresh memory is poison");
    memset(m->host, 7, BYTES);
    CHECK(is_filled(m->data, 0xff, BYTES), "the copy is a copy");
    CHECK_OK(cofi_check_memory_upload(m));
    CHECK(is_filled(m->data, 7, BYTES), "uploaded");
    memset(m->data, 9, BYTES);
    CHECK_OK(cofi_check_memory_download(m));
    CHECK(is_filled(m->host, 9, BYTES), "downloaded");
    CHECK(cofi_check_memory_intact(m), "nothing was written outside");
    CHECK_OK(cofi_check_memory_poison(m));
    CHECK(is_filled(m->data, 0xff, BYTES) && is_filled(m->host, 9, BYTES), "poisoned there alone");
}

static void check_red_zones(struct cofi_check_memory *m)
{
    const long places[] = {-1, -COFI_CHECK_RED_BYTES, BYTES, BYTES + COFI_CHECK_RED_BYTES - 1};
    for (int i = 0; i < 4; i++) {
        char *at = m->data + places[i], was = *at;
        *at = (char)0x5a;
        CHECK_OK(cofi_check_memory_upload(m)); /* leaves the zones alone */
        CHECK_OK(cofi_check_memory_download(m));
        CHECK(!cofi_check_memory_intact(m), "byte %ld was written to", places[i]);
        *at = was;
        CHECK_OK(cofi_check_memory_download(m));
        CHECK(cofi_check_memory_intact(m), "byte %ld is itself again", places[i]);
    }
}

int main(void)
{
    struct cofi_check_memory m;
    cof_world *world = test_world(0, 1, NULL, 5);
    CHECK_OK(cofi_check_memory_open(world, BYTES, &m));
    CHECK((uintptr_t)m.data % 128 == 0, "aligned");
    check_copies(&m);
    check_red_zones(&m);
    cofi_check_memory_close(&m);
    cofi_check_memory_close(&m);

    char *own = malloc(cofi_check_memory_span(BYTES));
    CHECK_OK(cofi_check_memory_open_at(world, own, BYTES, &m));
    CHECK(m.data == own + COFI_CHECK_RED_BYTES, "in the caller's memory");
    check_copies(&m);
    check_red_zones(&m);
    cofi_check_memory_close(&m);
    free(own);

    CHECK_OK(cofi_check_memory_open(world, 0, &m));
    CHECK_OK(cofi_check_memory_upload(&m));
    CHECK_OK(cofi_check_memory_download(&m));
    CHECK(cofi_check_memory_intact(&m), "of no bytes");
    cofi_check_memory_close(&m);
    CHECK(cofi_check_memory_device(world).device_type == COF_DEVICE_CPU, "device of the CPU");
    cof_world_destroy(world);
    return test_done();
}
