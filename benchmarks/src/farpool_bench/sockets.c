/* The limit that the remote benchmark compares with: bytes over TCP loopback by plain sockets, one process to another. Compiled
 * with -DTLS: the same over TLS 1.3 of OpenSSL, with the certificate, key and authority in the folder that SOCKETS_TLS names.
 *
 *   sockets serve NBYTES RING                                    print the port, then answer connections in turn
 *   sockets get|put PORT NBYTES RING WINDOW SECONDS spin|block   print the seconds that an object took
 *
 * A get is a request of 64 bytes that is answered with the object; a put is a request and the object, answered with 64
 * bytes. Up to WINDOW requests are unanswered. With two ports (PORT,PORT) and without TLS, each object is put to one server
 * after the other: the second gets it when the first has answered. Objects come from and go to RING buffers in turn, written before on both
 * sides. Once the time has been taken, the bytes that arrived are compared with the sent ones. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#ifdef TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
#endif

enum { GET, PUT };

struct request {
    uint32_t op, spin;
    uint64_t index;
    char zero[48];
};
_Static_assert(sizeof(struct request) == 64, "as long as a header of farpool's");

static void fail(const char* what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static char** make_ring(size_t nbytes, size_t ring) {
    char** buffers = malloc(ring * sizeof *buffers);
    for (size_t i = 0; buffers && i < ring; ++i) {
        buffers[i] = aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
        if (!buffers[i]) fail("memory");
        memset(buffers[i], 0, nbytes);
    }
    if (!buffers) fail("memory");
    return buffers;
}

/* Bytes that differ from object to object and from salt to salt. */
static void fill(char* buffer, size_t nbytes, uint64_t index, uint64_t salt) {
    uint64_t state = (index + 1) * 0x9e3779b97f4a7c15u ^ salt;
    for (size_t at = 0; at < nbytes; at += sizeof state) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        memcpy(buffer + at, &state, nbytes - at < sizeof state ? nbytes - at : sizeof state);
    }
}

/* After a spinning call that came too early. The other side may need this very core. */
static void try_again(unsigned* tries) {
    if (++*tries % 8 == 0) sched_yield();
}

#ifdef TLS
static SSL* tls; /* of the one connection that there is at a time */

static void begin_tls(int fd, int serves) {
    char name[3][4096];
    const char* files[] = {"tls.crt", "tls.key", "ca.crt"};
    const char* folder = getenv("SOCKETS_TLS");
    for (int i = 0; i < 3; ++i) snprintf(name[i], sizeof name[i], "%s/%s", folder ? folder : ".", files[i]);
    SSL_CTX* context = SSL_CTX_new(TLS_method());
    SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
    SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256");
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_num_tickets(context, 0);
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, 128 << 10);
    if (SSL_CTX_use_certificate_chain_file(context, name[0]) != 1 ||
        SSL_CTX_use_PrivateKey_file(context, name[1], SSL_FILETYPE_PEM) != 1 ||
        SSL_CTX_load_verify_locations(context, name[2], NULL) != 1) {
        fail("certificates");
    }
    if (!serves) SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
    tls = SSL_new(context);
    SSL_set_fd(tls, fd);
    if ((serves ? SSL_accept(tls) : SSL_connect(tls)) != 1) {
        ERR_print_errors_fp(stderr);
        exit(1);
    }
    SSL_CTX_free(context);
}

static void end_tls(void) {
    SSL_free(tls);
    tls = NULL;
}

/* As recv and send would answer. */
static ssize_t tls_answer(int result) {
    if (result > 0) return result;
    int error = SSL_get_error(tls, result);
    if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) {
        errno = EAGAIN;
        return -1;
    }
    if (error == SSL_ERROR_ZERO_RETURN || ERR_GET_REASON(ERR_peek_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING) return 0;
    return -1;
}

/* The socket itself says whether a call waits. */
static void set_waiting(int fd, int spin) {
    int flags = fcntl(fd, F_GETFL), wanted = spin ? flags | O_NONBLOCK : flags & ~O_NONBLOCK;
    if (flags != wanted) fcntl(fd, F_SETFL, wanted);
}

static ssize_t receive_some(int fd, void* into, size_t nbytes, int spin) {
    (void)fd, (void)spin;
    ERR_clear_error();
    return tls_answer(SSL_read(tls, into, (int)nbytes));
}

/* The first part, and the begin of the second where both fit into one record. */
static ssize_t send_some(int fd, struct iovec* parts, size_t count, int spin) {
    (void)fd, (void)spin;
    static char record[16384];
    char* from = parts->iov_base;
    size_t nbytes = parts->iov_len;
    if (count > 1 && nbytes < sizeof record) {
        size_t more = parts[1].iov_len < sizeof record - nbytes ? parts[1].iov_len : sizeof record - nbytes;
        memcpy(record, from, nbytes);
        memcpy(record + nbytes, parts[1].iov_base, more);
        from = record;
        nbytes += more;
    }
    ERR_clear_error();
    return tls_answer(SSL_write(tls, from, (int)nbytes));
}
#else
static void begin_tls(int fd, int serves) { (void)fd, (void)serves; }
static void end_tls(void) {}
static void set_waiting(int fd, int spin) { (void)fd, (void)spin; }

static ssize_t receive_some(int fd, void* into, size_t nbytes, int spin) {
    return recv(fd, into, nbytes, spin ? MSG_DONTWAIT : MSG_WAITALL);
}

static ssize_t send_some(int fd, struct iovec* parts, size_t count, int spin) {
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    return sendmsg(fd, &message, MSG_NOSIGNAL | (spin ? MSG_DONTWAIT : 0));
}
#endif

/* 0 where the stream has ended. */
static int receive(int fd, void* into, size_t nbytes, int spin) {
    unsigned tries = 0;
    for (char* at = into; nbytes > 0;) {
        ssize_t got = receive_some(fd, at, nbytes, spin);
        if (got > 0) {
            at += got;
            nbytes -= (size_t)got;
        } else if (got == 0) {
            return 0;
        } else if (errno == EAGAIN || errno == EINTR) {
            try_again(&tries);
        } else {
            fail("recv");
        }
    }
    return 1;
}

static void send_all(int fd, struct iovec* parts, int count, int spin) {
    unsigned tries = 0;
    while (count > 0) {
        ssize_t sent = send_some(fd, parts, (size_t)count, spin);
        if (sent < 0) {
            if (errno != EAGAIN && errno != EINTR) fail("sendmsg");
            try_again(&tries);
        }
        for (; sent > 0 && (size_t)sent >= parts->iov_len; --count) {
            sent -= (ssize_t)parts++->iov_len;
        }
        if (sent > 0) {
            parts->iov_base = (char*)parts->iov_base + sent;
            parts->iov_len -= (size_t)sent;
        }
    }
}

static void send_request(int fd, struct request* request, char* payload, size_t nbytes) {
    struct iovec parts[] = {{request, sizeof *request}, {payload, nbytes}};
    send_all(fd, parts, request->op == PUT ? 2 : 1, (int)request->spin);
}

static _Noreturn void serve(size_t nbytes, size_t ring) {
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* never outlives the benchmark */
    char** buffers = make_ring(nbytes, ring);
    for (size_t i = 0; i < ring; ++i) fill(buffers[i], nbytes, i, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (struct sockaddr*)&address, length) || listen(listener, 1) ||
        getsockname(listener, (struct sockaddr*)&address, &length)) {
        fail("listen");
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        int fd = accept(listener, NULL, NULL), on = 1;
        if (fd < 0) fail("accept");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        begin_tls(fd, 1);
        struct request request = {0};
        while (receive(fd, &request, sizeof request, (int)request.spin)) {
            char* object = buffers[request.index % ring];
            struct iovec answer = {object, nbytes};
            set_waiting(fd, (int)request.spin);
            if (request.op == PUT) {
                if (!receive(fd, object, nbytes, (int)request.spin)) break;
                answer = (struct iovec){&request, sizeof request};
            }
            send_all(fd, &answer, 1, (int)request.spin);
        }
        end_tls();
        close(fd);
    }
}

struct client {
    int fds[2]; /* of the servers */
    size_t servers;
    uint32_t spin;
    size_t nbytes, ring, window;
    char** buffers;
};

/* A get is of the last server. */
static void await_answer(struct client* client, size_t server, void* into, size_t nbytes) {
    if (!receive(client->fds[server], into, nbytes, (int)client->spin)) fail("the server has closed the connection");
}

/* Runs `count` requests, or as many as fit into `seconds` where that is not 0; returns the seconds of one. */
static double run(struct client* client, uint32_t op, size_t count, double seconds) {
    char answer[sizeof(struct request)];
    double start = now(), end = start;
    size_t sent = 0, done = 0, last = client->servers - 1;
    for (;;) {
        int going = seconds > 0 ? end - start < seconds : sent < count;
        if (going && sent - done < client->window) {
            struct request request = {.op = op, .spin = client->spin, .index = sent};
            char* object = client->buffers[sent % client->ring];
            for (size_t server = op == PUT ? 0 : last; server <= last; ++server) {
                send_request(client->fds[server], &request, object, client->nbytes);
                if (server < last) await_answer(client, server, answer, sizeof answer);
            }
            ++sent;
        } else if (done < sent) {
            char* into = op == GET ? client->buffers[done % client->ring] : answer;
            await_answer(client, last, into, op == GET ? client->nbytes : sizeof answer);
            ++done;
            end = now();
        } else {
            return (end - start) / (double)done;
        }
    }
}

static void put_all(struct client* client, uint64_t salt) {
    for (size_t i = 0; i < client->ring; ++i) fill(client->buffers[i], client->nbytes, i, salt);
    run(client, PUT, client->ring, 0);
}

/* Check on each server that the last objects that came equal the last sent ones. */
static void check(struct client* client, uint32_t op, uint64_t salt) {
    if (op == PUT) run(client, PUT, client->ring, 0);
    char* expected = malloc(client->nbytes);
    for (size_t server = 0; expected && server < client->servers; ++server) {
        for (size_t i = 0; i < client->ring; ++i) memset(client->buffers[i], 0, client->nbytes);
        run(client, GET, client->ring, 0);
        for (size_t i = 0; i < client->ring; ++i) {
            fill(expected, client->nbytes, i, salt);
            if (memcmp(expected, client->buffers[i], client->nbytes)) {
                fprintf(stderr, "object %zu differs from the sent one\n", i);
                exit(1);
            }
        }
        int read = client->fds[client->servers - 1];
        client->fds[client->servers - 1] = client->fds[0];
        client->fds[0] = read;
    }
    free(expected);
}

static int open_connection(uint16_t port) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (connect(fd, (struct sockaddr*)&address, sizeof address)) fail("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

int main(int count, char** words) {
    if (count == 4 && !strcmp(words[1], "serve")) serve(strtoul(words[2], 0, 10), strtoul(words[3], 0, 10));
    if (count != 8) {
        fputs("sockets serve NBYTES RING\nsockets get|put PORT[,PORT] NBYTES RING WINDOW SECONDS spin|block\n", stderr);
        return 2;
    }
    uint32_t op = strcmp(words[1], "put") ? GET : PUT;
    struct client client = {.spin = !strcmp(words[7], "spin"),
                            .nbytes = strtoul(words[3], 0, 10),
                            .ring = strtoul(words[4], 0, 10),
                            .window = strtoul(words[5], 0, 10)};
    for (char* port = strtok(words[2], ","); port && client.servers < 2; port = strtok(NULL, ",")) {
        client.fds[client.servers++] = open_connection((uint16_t)atoi(port));
    }
    begin_tls(client.fds[0], 0);
    set_waiting(client.fds[0], (int)client.spin);
    client.buffers = make_ring(client.nbytes, client.ring);
    uint64_t salt = (uint64_t)getpid() << 1;
    put_all(&client, salt);
    run(&client, GET, client.ring, 0);
    if (op == PUT) {
        ++salt;
        for (size_t i = 0; i < client.ring; ++i) fill(client.buffers[i], client.nbytes, i, salt);
    }
    double seconds = run(&client, op, 0, atof(words[6]));
    check(&client, op, salt);
    printf("%.9g\n", seconds);
    return 0;
}
