/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
/* The subcommands of the program `cofuse`. argv[0] is the subcommand; returns the exit code. */
#ifndef COFI_COMMANDS_H
#define COFI_COMMANDS_H

int cofi_cmd_info(int argc, char **argv);
int cofi_cmd_launch(int argc, char **argv);
int cofi_cmd_run(int argc, char **argv);
int cofi_cmd_check(int argc, char **argv);
int cofi_cmd_bench(int argc, char **argv);

#endif
