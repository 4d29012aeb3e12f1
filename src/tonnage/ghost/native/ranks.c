/* Ranks of a communicator that are real processes on this machine: small payloads travel through POSIX shared
 * memory, so that values which steer control flow are the same on all ranks.
 *
 * A meeting is one shared memory object.  Each rank has two buffers, used in turn: whoever writes for exchange
 * number n knows that everybody has read exchange n - 2, since all arrived at n - 1 after that.  Messages are
 * objects of their own, so that a sender never waits. */
#define _GNU_SOURCE
#include "ranks.h"
#include "ghost.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define MAX_RANKS 1024

struct shared {
    uint64_t arrived[MAX_RANKS]; /* number of the last exchange a rank reached */
    int process[MAX_RANKS];      /* 0 until the rank has joined */
    char buffers[];              /* [rank][2][EXCHANGE_BYTES] */
};

struct meeting {
    struct shared *shared;
    size_t bytes;
    uint64_t key, number; /* of the present exchange */
    int rank, ranks;
    uint32_t *sent, *received; /* messages so far, by peer */
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* What one waits for: `reached` says whether rank `i` has got there. */
struct goal {
    const struct meeting *meeting;
    const char *purpose;
    bool (*reached)(const struct meeting *meeting, int i);
};

static bool complain(const struct goal *goal, int late, const char *what)
{
    const struct meeting *m = goal->meeting;
    fprintf(stderr, "ghost: rank %d of %d waits in %s for rank %d (process %d), which %s\n", m->rank, m->ranks,
            goal->purpose, late, m->shared->process[late], what);
    return false;
}

/* Waits for every rank in [first, end).  A rank that ended is looked for again once after its end was seen: it
 * may have arrived just before. */
static bool wait_for(const struct goal *goal, int first, int end)
{
    const struct meeting *m = goal->meeting;
    double start = now(), checked = start;
    unsigned spins = 0;
    for (int i = first; i < end; i++) {
        while (!goal->reached(m, i)) {
            if (++spins < 200) {
                sched_yield();
                continue;
            }
            usleep(100);
            double time = now();
            if (time - checked < 0.2)
                continue;
            checked = time;
            if (process_ended(m->shared->process[i]) && !goal->reached(m, i))
                return complain(goal, i, "has ended");
            if (time - start > config()->timeout_seconds)
                return complain(goal, i, "did not come in time (GHOST_TIMEOUT_SECONDS)");
        }
    }
    return true;
}

static void object_name(char name[256], uint64_t key, const char *suffix)
{
    snprintf(name, 256, "/ghost-%s-%u-%016llx%s", config()->shm, (unsigned)getuid(), (unsigned long long)key, suffix);
}

static bool joined(const struct meeting *meeting, int i)
{
    return __atomic_load_n(&meeting->shared->process[i], __ATOMIC_ACQUIRE) != 0;
}

static bool arrived(const struct meeting *meeting, int i)
{
    return __atomic_load_n(&meeting->shared->arrived[i], __ATOMIC_ACQUIRE) >= meeting->number;
}

/* Whether shared memory has room for what will be written there: on a full /dev/shm writing would end the process.
 * Linux before 5.14 cannot be asked. */
static bool holds(void *start, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)start / page * page;
    size_t length = (uintptr_t)start + bytes - begin;
    if (bytes == 0 || madvise((void *)begin, length, MADV_POPULATE_WRITE) == 0 || errno == EINVAL)
        return true;
    fprintf(stderr, "ghost: /dev/shm has no room for %zu bytes that ranks exchange; enlarge it or empty it\n", bytes);
    return false;
}

/* Shared memory of so many bytes, of which `first` can be written; NULL, and why on stderr. */
static struct shared *open_shared(const char *name, size_t bytes, size_t first)
{
    int file = shm_open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes) != 0) {
        fprintf(stderr, "ghost: shared memory %s of %zu bytes: %s\n", name, bytes, strerror(errno));
        if (file >= 0)
            close(file);
        return NULL;
    }
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory == MAP_FAILED)
        return NULL;
    if (holds(memory, first))
        return memory;
    munmap(memory, bytes);
    shm_unlink(name);
    return NULL;
}

struct meeting *meeting_join(uint64_t key, int rank, int ranks)
{
    char name[256];
    size_t bytes = sizeof(struct shared) + (size_t)ranks * 2 * EXCHANGE_BYTES;
    if (ranks > MAX_RANKS)
        return NULL;
    object_name(name, key, "");
    struct shared *shared = open_shared(name, bytes, sizeof *shared);
    if (!shared)
        return NULL;
    struct meeting *meeting = calloc(1, sizeof *meeting);
    *meeting = (struct meeting){.shared = shared, .bytes = bytes, .key = key, .rank = rank, .ranks = ranks};
    meeting->sent = calloc((size_t)ranks, sizeof *meeting->sent);
    meeting->received = calloc((size_t)ranks, sizeof *meeting->received);
    __atomic_store_n(&shared->process[rank], getpid(), __ATOMIC_RELEASE);
    struct goal goal = {meeting, "the communicator's start", joined};
    bool all = wait_for(&goal, 0, ranks);
    if (rank == 0 || !all)
        shm_unlink(name); /* everybody has it open: the name is not needed any more */
    if (all)
        return meeting;
    meeting_leave(meeting);
    return NULL;
}

void meeting_leave(struct meeting *meeting)
{
    munmap(meeting->shared, meeting->bytes);
    free(meeting->sent);
    free(meeting->received);
    free(meeting);
}

static char *buffer(const struct meeting *meeting, int rank)
{
    return meeting->shared->buffers + ((size_t)rank * 2 + meeting->number % 2) * EXCHANGE_BYTES;
}

bool meeting_exchange(struct meeting *meeting, const void *data, size_t bytes, const char *purpose)
{
    meeting->number++;
    if (!holds(buffer(meeting, meeting->rank), bytes))
        return false;
    memcpy(buffer(meeting, meeting->rank), data, bytes);
    __atomic_store_n(&meeting->shared->arrived[meeting->rank], meeting->number, __ATOMIC_RELEASE);
    struct goal goal = {meeting, purpose, arrived};
    return wait_for(&goal, 0, meeting->ranks);
}

const void *meeting_given(const struct meeting *meeting, int rank)
{
    return buffer(meeting, rank);
}

/* ---- messages ---- */

static void message_name(char name[256], const struct meeting *meeting, int from, int to, uint32_t number)
{
    char suffix[64];
    snprintf(suffix, sizeof suffix, "-%d-%d-%u", from, to, number);
    object_name(name, meeting->key, suffix);
}

/* The object's last byte is written last and tells that the message is whole. */
bool meeting_send(struct meeting *meeting, int to, const void *data, size_t bytes)
{
    char name[256];
    message_name(name, meeting, meeting->rank, to, meeting->sent[to]++);
    char *memory = (char *)open_shared(name, bytes + 1, bytes + 1);
    if (!memory)
        return false;
    memcpy(memory, data, bytes);
    __atomic_store_n(memory + bytes, 1, __ATOMIC_RELEASE);
    munmap(memory, bytes + 1);
    return true;
}

static bool message_here(const struct meeting *meeting, int from)
{
    char name[256], last = 0;
    message_name(name, meeting, from, meeting->rank, meeting->received[from]);
    int file = shm_open(name, O_RDONLY | O_CLOEXEC, 0);
    if (file < 0)
        return false;
    off_t end = lseek(file, 0, SEEK_END);
    bool whole = end > 0 && pread(file, &last, 1, end - 1) == 1 && last == 1;
    close(file);
    return whole;
}

bool meeting_receive(struct meeting *meeting, int from, void *data, size_t bytes)
{
    char name[256];
    struct goal goal = {meeting, "Recv", message_here};
    if (!wait_for(&goal, from, from + 1))
        return false;
    message_name(name, meeting, from, meeting->rank, meeting->received[from]++);
    int file = shm_open(name, O_RDONLY | O_CLOEXEC, 0);
    ssize_t got = file < 0 ? -1 : pread(file, data, bytes, 0);
    if (file >= 0)
        close(file);
    shm_unlink(name);
    return got == (ssize_t)bytes;
}
