/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* What the documents of `cofuse bench` and `cofuse check` have in common: tables of fields by which
 * structs become objects and come back, and the head that tells what was run where. */
#ifndef COFI_JSON_DOCUMENT_H
#define COFI_JSON_DOCUMENT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "bench_harness.h"

enum cofi_json_kind { COFI_JSON_TEXT, COFI_JSON_INT, COFI_JSON_INT64, COFI_JSON_REAL,
                      COFI_JSON_BOOL };

/* A member of a struct: the same table writes and reads it. */
struct cofi_json_field {
    const char *name;
    enum cofi_json_kind kind;
    size_t offset, bytes;
    bool is_optional; /* documents of earlier versions do not have it */
};
#define COFI_JSON_FIELD(type, kind, name, member)                                                  \
    {name, COFI_JSON_##kind, offsetof(struct type, member), sizeof((struct type *)0)->member, false}
#define COFI_JSON_LATER(type, kind, name, member)                                                  \
    {name, COFI_JSON_##kind, offsetof(struct type, member), sizeof((struct type *)0)->member, true}
/* A table and its length, as arguments. */
#define COFI_JSON_ALL(fields) (fields), (int)(sizeof(fields) / sizeof(fields)[0])

/* A new object; NULL: no memory. */
json_t *cofi_json_object(const struct cofi_json_field *fields, int n, const void *from);
/* Adds to an object; false: no memory, or the object is NULL. */
bool cofi_json_put(json_t *object, const struct cofi_json_field *fields, int n, const void *from);
/* `what` names the object in messages; false after one. */
bool cofi_json_read(const char *path, const char *what, const json_t *object,
                    const struct cofi_json_field *fields, int n, void *to);

/* A new document: schema, date, version, command, machine. NULL: no memory. */
json_t *cofi_json_begin(int schema, const struct cofi_cli_run *run,
                        const struct cofi_bench_machine *machine);
/* False after a message. */
bool cofi_json_read_head(const char *path, const json_t *document, int schema,
                         struct cofi_cli_run *run, struct cofi_bench_machine *machine);

/* Writes the document as cofi_file_replace does, and gives it up; NULL is a lack of memory. False
 * after a message, which names --json. */
bool cofi_json_write(json_t *document, const char *path);

#endif
