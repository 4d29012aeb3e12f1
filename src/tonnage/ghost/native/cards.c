/* The machine's cards: how many bytes of each are taken, and by which process.
 *
 * The processes of one run share the account through a file (GHOST_CARDS), so that two processes on one card share
 * its memory; without a file each process has its own cards.  A process gives its bytes back by ending, however it
 * ends: the others check whether it still exists when its bytes would decide something. */
#define _GNU_SOURCE
#include "ghost.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_PROCESSES 256

/* tonnage.ghost.cards reads this layout. */
struct cards {
    int32_t holder; /* the process that changes something now; 0: none */
    int32_t count;  /* accounts that were ever in use: the first ones */
    struct account {
        int32_t process; /* 0: not in use */
        int32_t ended;   /* it is not there any more, and holds nothing */
        uint64_t began;  /* when, in ticks since the machine's start: numbers of processes are given out again */
        uint64_t used[MAX_DEVICES], peak[MAX_DEVICES];
    } accounts[MAX_PROCESSES];
    struct {
        uint64_t peak; /* of all processes together */
        struct {
            int64_t process;
            uint64_t bytes;
        } held[MAX_PROCESSES]; /* then, by account */
    } cards[MAX_DEVICES];
};

static struct cards private_cards, *cards = &private_cards;
static struct account *mine;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- processes ---- */

/* When a process began, 0 if it is not there: also when only its exit code is left, for which nobody has asked. */
static uint64_t process_began(int process)
{
    char path[64], text[1024] = "", state;
    unsigned long long began;
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    const char *name_end = got > 0 ? strrchr(text, ')') : NULL; /* the 18 numbers after the state are others */
    static const char form[] = " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu";
    if (!name_end || sscanf(name_end + 1, form, &state, &began) != 2 || state == 'Z' || state == 'X')
        return 0;
    return began ? began : 1;
}

bool process_ended(int process)
{
    if (!process)
        return false;
    if (kill(process, 0) != 0)
        return errno == ESRCH;
    return process_began(process) == 0;
}

/* ---- the account ---- */

static void open_cards(void)
{
    const char *path = config()->cards;
    struct stat facts;
    int file = *path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file >= 0 && fstat(file, &facts) == 0 && facts.st_size == sizeof(struct cards)) {
        void *memory = mmap(NULL, sizeof(struct cards), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (memory != MAP_FAILED)
            cards = memory;
    }
    if (file >= 0)
        close(file);
    if (*path && cards == &private_cards)
        fprintf(stderr, "ghost: GHOST_CARDS=%s is no file of %zu bytes; this process has cards of its own\n", path,
                sizeof(struct cards));
}

/* From here to leave() no other thread or process changes anything.  One that died in between left whole numbers. */
static void enter(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int32_t me = getpid(), holder = 0;
    pthread_once(&once, open_cards);
    pthread_mutex_lock(&lock);
    for (unsigned tries = 1; !__atomic_compare_exchange_n(&cards->holder, &holder, me, false, __ATOMIC_ACQUIRE,
                                                          __ATOMIC_RELAXED); tries++) {
        if (tries % 256 || !process_ended(holder))
            holder = 0; /* else the dead one's place is taken with the next try */
        if (tries % 64)
            sched_yield();
        else
            usleep(50);
    }
}

static void leave(void)
{
    __atomic_store_n(&cards->holder, 0, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
}

/* This process's account; NULL if there is no place for one.  A fork has another than the process it came from. */
static struct account *account(void)
{
    int32_t me = getpid();
    if (mine && mine->process == me)
        return mine;
    mine = NULL;
    for (int i = 0; i < MAX_PROCESSES && !mine; i++)
        if (!cards->accounts[i].process)
            mine = &cards->accounts[i];
    for (int i = 0; i < MAX_PROCESSES && !mine; i++)
        if (cards->accounts[i].ended)
            mine = &cards->accounts[i];
    if (!mine)
        return NULL;
    memset(mine, 0, sizeof *mine);
    mine->process = me;
    mine->began = process_began(me);
    if (mine >= cards->accounts + cards->count)
        cards->count = (int32_t)(mine - cards->accounts) + 1;
    return mine;
}

static uint64_t sum(int card)
{
    uint64_t bytes = 0;
    for (int i = 0; i < cards->count; i++)
        bytes += cards->accounts[i].used[card];
    return bytes;
}

/* Processes that hold something of the card and are not there any more hold nothing. */
static void bury(int card)
{
    for (int i = 0; i < cards->count; i++) {
        struct account *a = &cards->accounts[i];
        if (a == mine || !a->used[card] || process_began(a->process) == a->began)
            continue;
        a->ended = 1;
        memset(a->used, 0, sizeof a->used);
    }
}

static void note_peak(int card, uint64_t bytes)
{
    cards->cards[card].peak = bytes;
    for (int i = 0; i < cards->count; i++) {
        cards->cards[card].held[i].process = cards->accounts[i].process;
        cards->cards[card].held[i].bytes = cards->accounts[i].used[card];
    }
}

bool card_take(int card, uint64_t bytes)
{
    enter();
    struct account *a = account();
    uint64_t total = config()->total_bytes, used = sum(card), own = a ? a->used[card] : 0;
    if (used != own && (used + bytes > total || used + bytes > cards->cards[card].peak)) {
        bury(card);
        used = sum(card);
    }
    bool fits = a && used <= total && bytes <= total - used;
    if (fits) {
        a->used[card] += bytes;
        if (a->used[card] > a->peak[card])
            a->peak[card] = a->used[card];
        if (used + bytes > cards->cards[card].peak)
            note_peak(card, used + bytes);
    }
    leave();
    return fits;
}

void card_give(int card, uint64_t bytes)
{
    enter();
    struct account *a = account();
    if (a)
        a->used[card] -= bytes < a->used[card] ? bytes : a->used[card]; /* a fork holds nothing of its parent's */
    leave();
}

uint64_t card_used(int card)
{
    enter();
    bury(card);
    uint64_t bytes = sum(card);
    leave();
    return bytes;
}

uint64_t card_used_here(int card)
{
    return mine ? mine->used[card] : 0;
}

uint64_t card_peak_here(int card)
{
    return mine ? mine->peak[card] : 0;
}

int card_processes(int card, struct card_process *list, int room)
{
    int found = 0;
    enter();
    bury(card);
    for (int i = 0; i < cards->count; i++) {
        const struct account *a = &cards->accounts[i];
        if (a->used[card] && found++ < room)
            list[found - 1] = (struct card_process){a->process, a->used[card]};
    }
    leave();
    return found;
}
