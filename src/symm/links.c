/* SPDX-FileCopyrightText: The Cofuse authors
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "symm/links.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "core/clock.h"
#include "symm/fork.h"

/* ThreadSanitizer does not see that two descriptors are the ends of one socket when one of them was
 * handed over by another. */
#ifdef __SANITIZE_THREAD__
void __tsan_acquire(void *at);
void __tsan_release(void *at);
static char order;
#define BEFORE_SEND() __tsan_release(&order)
#define AFTER_RECEIVE() __tsan_acquire(&order)
#else
#define BEFORE_SEND() ((void)0)
#define AFTER_RECEIVE() ((void)0)
#endif

static const char bye[8] = {'c', 'o', 'f', 'B', 'y', 'e', '\r', '\n'};

/* ---- descriptors ---------------------------------------------------------------------------- */

int cofi_link_socket(int flags)
{
    cofi_fork_hold();
    int fd = cofi_fork_enter_fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
    cofi_fork_release();
    return fd;
}

int cofi_link_accept(int listener)
{
    cofi_fork_hold();
    int fd = cofi_fork_enter_fd(accept4(listener, NULL, NULL, SOCK_CLOEXEC));
    cofi_fork_release();
    return fd;
}

int cofi_link_pair(int pair_out[2])
{
    cofi_fork_hold();
    int made = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair_out);
    for (int i = 0; made == 0 && i < 2; i++)
        pair_out[i] = cofi_fork_enter_fd(pair_out[i]);
    cofi_fork_release();
    if (made == 0 && pair_out[0] >= 0 && pair_out[1] >= 0)
        return 0;
    for (int i = 0; made == 0 && i < 2; i++)
        cofi_link_close(pair_out[i]);
    return -1;
}

int cofi_link_adopt(int inherited_fd)
{
    cofi_fork_hold();
    fcntl(inherited_fd, F_SETFD, FD_CLOEXEC);
    int fd = cofi_fork_enter_fd(inherited_fd);
    cofi_fork_release();
    return fd;
}

void cofi_link_close(int fd)
{
    cofi_fork_close_fd(fd);
}

/* ---- transfers ------------------------------------------------------------------------------ */

/* Waits for `events`; a hang-up counts as ready, the transfer then reports it. */
static cof_status wait_for(int socket, short events, int64_t deadline)
{
    for (;;) {
        int ms = -1;
        if (deadline != COFI_NEVER) {
            int64_t left = (deadline - cofi_now() + 999999) / 1000000;
            ms = left <= 0 ? 0 : left > 1000000 ? 1000000 : (int)left;
        }
        struct pollfd p = {.fd = socket, .events = events};
        int n = poll(&p, 1, ms);
        if (n > 0)
            return COF_OK;
        if (n < 0 && errno != EINTR)
            return COF_ERR_SYSTEM;
        if (deadline != COFI_NEVER && cofi_now() >= deadline)
            return COF_ERR_TIMEOUT;
    }
}

static cof_status transfer_error(void)
{
    return errno == EPIPE || errno == ECONNRESET ? COF_ERR_PEER_DEAD : COF_ERR_SYSTEM;
}

/* Never while another thread looks for a bye. */
static ssize_t recv_now(int socket, void *data, size_t bytes, int flags)
{
    cofi_fork_hold();
    ssize_t n = recv(socket, data, bytes, flags | MSG_DONTWAIT);
    int error = errno;
    cofi_fork_release();
    errno = error;
    return n;
}

cof_status cofi_link_wait(int socket, int64_t deadline)
{
    char first[sizeof bye]; /* a bye comes whole; fewer bytes are the beginning of something else */
    for (;;) {
        ssize_t n = recv_now(socket, first, sizeof first, MSG_PEEK);
        if (n == 0 || (n == (ssize_t)sizeof bye && !memcmp(first, bye, sizeof bye)))
            return COF_ERR_PEER_DEAD;
        if (n > 0)
            return COF_OK;
        if (errno == EAGAIN) {
            cof_status status = wait_for(socket, POLLIN, deadline);
            if (status != COF_OK)
                return status;
        } else if (errno != EINTR) {
            return transfer_error();
        }
    }
}

size_t cofi_link_peek(int socket, void *data, size_t bytes)
{
    ssize_t n = recv_now(socket, data, bytes, MSG_PEEK);
    return n > 0 ? (size_t)n : 0;
}

cof_status cofi_link_send_on(int socket, const char **data, size_t *bytes, int64_t deadline)
{
    BEFORE_SEND();
    while (*bytes > 0) {
        ssize_t n = send(socket, *data, *bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n >= 0) {
            *data += n;
            *bytes -= (size_t)n;
        } else if (errno == EAGAIN) {
            cof_status status = wait_for(socket, POLLOUT, deadline);
            if (status != COF_OK)
                return status;
        } else if (errno != EINTR) {
            return transfer_error();
        }
    }
    return COF_OK;
}

cof_status cofi_link_send(int socket, const void *data, size_t bytes, int64_t deadline)
{
    const char *at = data;
    return cofi_link_send_on(socket, &at, &bytes, deadline);
}

cof_status cofi_link_recv(int socket, void *data, size_t bytes, int64_t deadline)
{
    char *at = data;
    while (bytes > 0) {
        ssize_t n = recv_now(socket, at, bytes, 0);
        if (n > 0) {
            at += n;
            bytes -= (size_t)n;
        } else if (n == 0) {
            return COF_ERR_PEER_DEAD;
        } else if (errno == EAGAIN) {
            cof_status status = wait_for(socket, POLLIN, deadline);
            if (status != COF_OK)
                return status;
        } else if (errno != EINTR) {
            return transfer_error();
        }
    }
    AFTER_RECEIVE();
    return COF_OK;
}

union fd_control {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
};

/* The first byte carries the descriptor, the rest follows as plain data. */
cof_status cofi_link_send_fd(int socket, int fd, const void *data, size_t bytes, int64_t deadline)
{
    union fd_control control = {{0}};
    struct iovec iov = {(void *)(uintptr_t)data, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes,
                         .msg_controllen = sizeof control.bytes};
    struct cmsghdr *head = CMSG_FIRSTHDR(&msg);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
    for (;;) {
        ssize_t n = sendmsg(socket, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n == 1)
            return cofi_link_send(socket, (const char *)data + 1, bytes - 1, deadline);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return transfer_error();
        cof_status status = wait_for(socket, POLLOUT, deadline);
        if (status != COF_OK)
            return status;
    }
}

/* One byte, and the descriptor with it. */
static ssize_t recv_first(int socket, char *byte, int *fd_out)
{
    union fd_control control;
    struct iovec iov = {byte, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes,
                         .msg_controllen = sizeof control.bytes};
    ssize_t n = recvmsg(socket, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr *head = n == 1 ? CMSG_FIRSTHDR(&msg) : NULL;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS)
        memcpy(fd_out, CMSG_DATA(head), sizeof(int));
    return n;
}

static cof_status recv_with_fd(int socket, bool is_ours, int *fd_out, void *data, size_t bytes,
                               int64_t deadline)
{
    *fd_out = -1;
    for (;;) {
        cofi_fork_hold();
        ssize_t n = recv_first(socket, data, fd_out);
        int error = errno;
        if (is_ours)
            *fd_out = cofi_fork_enter_fd(*fd_out);
        cofi_fork_release();
        errno = error;
        if (n == 0)
            return COF_ERR_PEER_DEAD;
        if (n == 1)
            return cofi_link_recv(socket, (char *)data + 1, bytes - 1, deadline);
        if (errno != EAGAIN && errno != EINTR)
            return transfer_error();
        cof_status status = wait_for(socket, POLLIN, deadline);
        if (status != COF_OK)
            return status;
    }
}

cof_status cofi_link_recv_fd(int socket, int *fd_out, void *data, size_t bytes, int64_t deadline)
{
    return recv_with_fd(socket, false, fd_out, data, bytes, deadline);
}

cof_status cofi_link_recv_socket(int socket, int *fd_out, void *data, size_t bytes,
                                 int64_t deadline)
{
    return recv_with_fd(socket, true, fd_out, data, bytes, deadline);
}

/* ---- hang-up and bye ------------------------------------------------------------------------ */

void cofi_link_say_bye(int socket)
{
    ssize_t ignored = send(socket, bye, sizeof bye, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)ignored; /* a full or dead socket: the peer then takes us for dead, which is as true */
    shutdown(socket, SHUT_RDWR);
}

/* The last eight unread bytes, looked at with a peek offset, which is the socket's and which a
 * reader would move: so no reader comes between. After the hang-up nothing is added either. */
static bool ends_with_bye(int socket)
{
    int unread = 0, none = -1;
    char tail[sizeof bye];
    if (ioctl(socket, FIONREAD, &unread) != 0 || unread < (int)sizeof bye)
        return false;
    int offset = unread - (int)sizeof bye;
    if (setsockopt(socket, SOL_SOCKET, SO_PEEK_OFF, &offset, sizeof offset) != 0)
        return false;
    ssize_t n = recv(socket, tail, sizeof tail, MSG_PEEK | MSG_DONTWAIT);
    setsockopt(socket, SOL_SOCKET, SO_PEEK_OFF, &none, sizeof none);
    return n == (ssize_t)sizeof bye && !memcmp(tail, bye, sizeof bye);
}

bool cofi_link_said_bye(int socket)
{
    cofi_fork_hold();
    bool said = ends_with_bye(socket);
    cofi_fork_release();
    return said;
}

bool cofi_link_hung_up(int socket)
{
    struct pollfd p = {.fd = socket, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL);
}
