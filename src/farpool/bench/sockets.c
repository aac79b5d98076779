/* The limit that the remote benchmark compares with: bytes over TCP loopback by plain sockets, one process to another.
 *
 *   sockets serve NBYTES RING                                    print the port, then answer connections in turn
 *   sockets get|put PORT NBYTES RING WINDOW SECONDS spin|block   print the seconds that an object took
 *
 * A get is a request of 64 bytes that is answered with the object; a put is a request and the object, answered with 64
 * bytes. Up to WINDOW requests are unanswered. Objects come from and go to RING buffers in turn, written before on both
 * sides. Once the time has been taken, what arrived is compared with what was sent. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
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

/* 0 where the stream has ended. */
static int receive(int fd, void* into, size_t nbytes, int spin) {
    unsigned tries = 0;
    for (char* at = into; nbytes > 0;) {
        ssize_t got = recv(fd, at, nbytes, spin ? MSG_DONTWAIT : MSG_WAITALL);
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
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    unsigned tries = 0;
    while (message.msg_iovlen > 0) {
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | (spin ? MSG_DONTWAIT : 0));
        if (sent < 0) {
            if (errno != EAGAIN && errno != EINTR) fail("sendmsg");
            try_again(&tries);
        }
        for (; sent > 0 && (size_t)sent >= message.msg_iov->iov_len; --message.msg_iovlen) {
            sent -= (ssize_t)message.msg_iov++->iov_len;
        }
        if (sent > 0) {
            message.msg_iov->iov_base = (char*)message.msg_iov->iov_base + sent;
            message.msg_iov->iov_len -= (size_t)sent;
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
        struct request request = {0};
        while (receive(fd, &request, sizeof request, (int)request.spin)) {
            char* object = buffers[request.index % ring];
            struct iovec answer = {object, nbytes};
            if (request.op == PUT) {
                if (!receive(fd, object, nbytes, (int)request.spin)) break;
                answer = (struct iovec){&request, sizeof request};
            }
            send_all(fd, &answer, 1, (int)request.spin);
        }
        close(fd);
    }
}

struct client {
    int fd;
    uint32_t spin;
    size_t nbytes, ring, window;
    char** buffers;
};

/* Runs `count` requests, or as many as fit into `seconds` where that is not 0; returns the seconds of one. */
static double run(struct client* client, uint32_t op, size_t count, double seconds) {
    char answer[sizeof(struct request)];
    double start = now(), end = start;
    size_t sent = 0, done = 0;
    for (;;) {
        int going = seconds > 0 ? end - start < seconds : sent < count;
        if (going && sent - done < client->window) {
            struct request request = {.op = op, .spin = client->spin, .index = sent};
            send_request(client->fd, &request, client->buffers[sent % client->ring], client->nbytes);
            ++sent;
        } else if (done < sent) {
            char* into = op == GET ? client->buffers[done % client->ring] : answer;
            size_t nbytes = op == GET ? client->nbytes : sizeof answer;
            if (!receive(client->fd, into, nbytes, (int)client->spin)) fail("the server has closed the connection");
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

/* That the last objects to come are those that were sent last. */
static void check(struct client* client, uint32_t op, uint64_t salt) {
    if (op == PUT) run(client, PUT, client->ring, 0);
    for (size_t i = 0; i < client->ring; ++i) memset(client->buffers[i], 0, client->nbytes);
    run(client, GET, client->ring, 0);
    char* expected = malloc(client->nbytes);
    for (size_t i = 0; expected && i < client->ring; ++i) {
        fill(expected, client->nbytes, i, salt);
        if (memcmp(expected, client->buffers[i], client->nbytes)) {
            fprintf(stderr, "object %zu is not what was sent\n", i);
            exit(1);
        }
    }
    free(expected);
}

int main(int count, char** words) {
    if (count == 4 && !strcmp(words[1], "serve")) serve(strtoul(words[2], 0, 10), strtoul(words[3], 0, 10));
    if (count != 8) {
        fputs("sockets serve NBYTES RING\nsockets get|put PORT NBYTES RING WINDOW SECONDS spin|block\n", stderr);
        return 2;
    }
    uint32_t op = strcmp(words[1], "put") ? GET : PUT;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[2])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct client client = {.fd = socket(AF_INET, SOCK_STREAM, 0),
                            .spin = !strcmp(words[7], "spin"),
                            .nbytes = strtoul(words[3], 0, 10),
                            .ring = strtoul(words[4], 0, 10),
                            .window = strtoul(words[5], 0, 10)};
    int on = 1;
    if (connect(client.fd, (struct sockaddr*)&address, sizeof address)) fail("connect");
    setsockopt(client.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
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
