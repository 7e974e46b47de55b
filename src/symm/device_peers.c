/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#include "symm/device_peers.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- names ---------------------------------------------------------------------------------- */

#define UUID_DIGITS 32
#define MIN_DIGITS 8 /* of a UUID that is cut short */

static int digit_of(char c)
{
    const char *digits = "0123456789abcdef";
    const char *at = c ? strchr(digits, tolower((unsigned char)c)) : NULL;
    return at ? (int)(at - digits) : -1;
}

/* The digits of a UUID as numbers; -1 where the text is none. */
static int read_digits(const char *text, unsigned char digits[UUID_DIGITS])
{
    int n = 0;
    for (; *text; text++) {
        if (*text == '-')
            continue;
        if (digit_of(*text) < 0 || n == UUID_DIGITS)
            return -1;
        digits[n++] = (unsigned char)digit_of(*text);
    }
    return n;
}

static bool begins_with(const unsigned char uuid[16], const unsigned char *digits, int n)
{
    for (int i = 0; i < n; i++)
        if ((i % 2 ? uuid[i / 2] & 15 : uuid[i / 2] >> 4) != digits[i])
            return false;
    return true;
}

static cof_status match_uuid(const char *what, const char *text, const struct cofi_device_id *ids,
                             int n, int *device_out)
{
    bool has_prefix = !strncmp(text, "GPU-", 4) || !strncmp(text, "MIG-", 4);
    unsigned char digits[UUID_DIGITS];
    int n_digits = read_digits(has_prefix ? text + 4 : text, digits), found = -1;
    COF_FAIL_IF(n_digits < MIN_DIGITS, COF_ERR_INVALID,
                "%s = \"%s\": wanted a number, or a UUID of at least %d digits", what, text,
                MIN_DIGITS);
    for (int i = 0; i < n; i++) {
        if (!begins_with(ids[i].uuid, digits, n_digits))
            continue;
        COF_FAIL_IF(found >= 0, COF_ERR_INVALID,
                    "%s = \"%s\": devices %d and %d both begin so; wanted more digits", what, text,
                    found, i);
        found = i;
    }
    COF_FAIL_IF(found < 0, COF_ERR_INVALID,
                "%s = \"%s\": none of the %d devices of this process has this UUID", what, text, n);
    *device_out = found;
    return COF_OK;
}

cof_status cofi_device_match(const char *what, const char *text, const struct cofi_device_id *ids,
                             int n, int *device_out)
{
    size_t n_digits = strspn(text, "0123456789");
    if (n_digits == 0 || text[n_digits] || n_digits >= MIN_DIGITS)
        return match_uuid(what, text, ids, n, device_out);
    long device = strtol(text, NULL, 10);
    COF_FAIL_IF(device >= n, COF_ERR_INVALID, "%s = \"%s\": wanted 0 .. %d, as CUDA counts here",
                what, text, n - 1);
    *device_out = (int)device;
    return COF_OK;
}

bool cofi_device_is_mig(const struct cofi_device_id *id)
{
    return strstr(id->name, " MIG ") != NULL;
}

bool cofi_device_is_same(const struct cofi_device_id *a, const struct cofi_device_id *b)
{
    return !memcmp(a->uuid, b->uuid, sizeof a->uuid);
}

void cofi_device_name(const struct cofi_device_id *id, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s-%02x%02x%02x%02x", cofi_device_is_mig(id) ? "MIG" : "GPU",
             id->uuid[0], id->uuid[1], id->uuid[2], id->uuid[3]);
}

/* ---- counts --------------------------------------------------------------------------------- */

int cofi_device_n_ranks(const struct cofi_device_info *ranks, int n, int rank)
{
    int here = 0;
    for (int r = 0; r < n; r++)
        here += cofi_device_is_same(&ranks[r].id, &ranks[rank].id);
    return here;
}

int cofi_device_most_ranks(const struct cofi_device_info *ranks, int n)
{
    int most = 0;
    for (int r = 0; r < n; r++) {
        int here = cofi_device_n_ranks(ranks, n, r);
        most = here > most ? here : most;
    }
    return most;
}

int cofi_device_n_sms(const struct cofi_device_info *ranks, int n)
{
    int least = ranks[0].n_sms;
    for (int r = 1; r < n; r++)
        least = ranks[r].n_sms < least ? ranks[r].n_sms : least;
    return least;
}

/* ---- who reaches whom ----------------------------------------------------------------------- */

static cof_status unreachable(const struct cofi_device_info *ranks, int a, int b, const char *why)
{
    char first[32], second[32];
    cofi_device_name(&ranks[a].id, first, sizeof first);
    cofi_device_name(&ranks[b].id, second, sizeof second);
    return COF_FAIL(COF_ERR_UNSUPPORTED,
                    "engine cuda: rank %d on %s (%s) and rank %d on %s (%s): %s", a, first,
                    ranks[a].id.name, b, second, ranks[b].id.name, why);
}

/* Instances of one device, or of two, share no memory; ranks within one do. So where any rank is in
 * an instance all must be in that one, and rank 0 against each of the others shows it. */
cof_status cofi_device_check_kinds(const struct cofi_device_info *ranks, int n)
{
    for (int r = 1; r < n; r++)
        if (!cofi_device_is_same(&ranks[0].id, &ranks[r].id) &&
            (cofi_device_is_mig(&ranks[0].id) || cofi_device_is_mig(&ranks[r].id)))
            return unreachable(ranks, 0, r, "a MIG instance reaches no other device's memory");
    return COF_OK;
}

cof_status cofi_device_check_access(const struct cofi_device_info *ranks, int n, int rank,
                                    const signed char *can)
{
    for (int r = 0; r < n; r++)
        if (can[r] == 0)
            return unreachable(ranks, rank, r, "no peer access between these devices");
    return COF_OK;
}

/* ---- kinds of memory ------------------------------------------------------------------------ */

static const char *memory_name(enum cofi_device_memory memory)
{
    return memory == COFI_MEMORY_VMM ? "vmm" : "ipc";
}

/* A rank without it; -1: all have it. */
static int rank_without(const struct cofi_device_info *ranks, int n, enum cofi_device_memory memory)
{
    for (int r = 0; r < n; r++)
        if (!(memory == COFI_MEMORY_VMM ? ranks[r].has_vmm : ranks[r].has_ipc))
            return r;
    return -1;
}

cof_status cofi_device_choose_memory(const struct cofi_device_info *ranks, int n,
                                     enum cofi_device_memory *memory_out)
{
    int chooser = -1;
    for (int r = 0; r < n; r++) {
        if (ranks[r].wanted == COFI_MEMORY_ANY)
            continue;
        COF_FAIL_IF(chooser >= 0 && ranks[r].wanted != ranks[chooser].wanted, COF_ERR_MISMATCH,
                    "variable COFUSE_CUDA_MEMORY = %s on rank %d, %s on rank %d",
                    memory_name(ranks[chooser].wanted), chooser, memory_name(ranks[r].wanted), r);
        chooser = chooser < 0 ? r : chooser;
    }
    enum cofi_device_memory memory = chooser < 0 ? COFI_MEMORY_VMM : ranks[chooser].wanted;
    if (chooser < 0 && rank_without(ranks, n, COFI_MEMORY_VMM) >= 0)
        memory = COFI_MEMORY_IPC;
    int lacks = rank_without(ranks, n, memory);
    COF_FAIL_IF(lacks >= 0, COF_ERR_UNSUPPORTED,
                "engine cuda: memory that ranks can share (%s) is not to be had of rank %d's "
                "device (%s)", memory_name(memory), lacks, ranks[lacks].id.name);
    *memory_out = memory;
    return COF_OK;
}
