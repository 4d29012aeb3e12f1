/* The log: what was submitted, as an array of records in memory, and the names those records refer to. */
#define _GNU_SOURCE
#include "ghost.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define LOG_RECORDS (1ull << 30) /* room reserved, not memory: pages come as records are written */
#define BATCH 65536              /* pages of records beyond this many are given back by a clear */

_Static_assert(sizeof(struct ghost_record) == 64, "readers rely on 64 bytes a record");

static struct ghost_record *records;
static size_t record_count, record_room;
API uint32_t ghost_current_mark;
static int enabled = -1; /* -1: as the settings say */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool log_enabled(void)
{
    int on = __atomic_load_n(&enabled, __ATOMIC_RELAXED);
    return on < 0 ? config()->log : on;
}

static void make_room(void)
{
    pthread_mutex_lock(&lock);
    for (size_t room = LOG_RECORDS; !records && room >= BATCH; room /= 2) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void *memory = mmap(NULL, room * sizeof *records, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (memory != MAP_FAILED) {
            madvise(memory, room * sizeof *records, MADV_HUGEPAGE); /* a step writes thousands of pages */
            record_room = room;
            __atomic_store_n(&records, memory, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&lock);
}

void log_append(struct ghost_record record)
{
    if (!log_enabled())
        return;
    if (!__atomic_load_n(&records, __ATOMIC_ACQUIRE))
        make_room();
    size_t i = __atomic_fetch_add(&record_count, 1, __ATOMIC_RELAXED);
    if (i >= record_room) {
        __atomic_fetch_sub(&record_count, 1, __ATOMIC_RELAXED);
        return;
    }
    record.mark = __atomic_load_n(&ghost_current_mark, __ATOMIC_RELAXED);
    records[i] = record;
}

void log_memory(enum record_kind kind, int device, uint64_t address, uint64_t bytes)
{
    log_append((struct ghost_record){.kind = kind, .device = device, .address = address, .bytes = bytes});
}

API void ghost_log_enable(int on)
{
    __atomic_store_n(&enabled, on != 0, __ATOMIC_RELAXED);
}

API size_t ghost_log_count(void)
{
    return __atomic_load_n(&record_count, __ATOMIC_RELAXED);
}

/* The records; valid while the process lives, their order is the order of submission. */
API const struct ghost_record *ghost_log_data(void)
{
    return records;
}

/* Adds a record like another one, of what is elsewhere now. */
API void ghost_log_add(const struct ghost_record *like, uint64_t address, uint64_t address2)
{
    struct ghost_record record = *like;
    record.address = address;
    record.address2 = address2;
    log_append(record);
}

/* Forgets the records behind the first so many. */
API void ghost_log_cut(size_t count)
{
    __atomic_store_n(&record_count, count, __ATOMIC_RELAXED);
}

API void ghost_log_clear(void)
{
    size_t used = record_count;
    record_count = 0;
    if (used > BATCH)
        madvise(records + BATCH, (used - BATCH) * sizeof *records, MADV_DONTNEED);
}

/* ---- names ---- */

static const char **names;
static uint32_t name_count, name_capacity;
static struct table name_ids; /* hash of the text -> index + 1; the probe below settles equal hashes */

static uint64_t hash(const char *text)
{
    uint64_t h = 14695981039346656037ull; /* FNV-1a */
    for (; *text; text++)
        h = (h ^ (unsigned char)*text) * 1099511628211ull;
    return h;
}

static uint32_t name_add(const char *text)
{
    if (name_count == name_capacity) {
        name_capacity = name_capacity ? name_capacity * 2 : 1024;
        names = realloc(names, name_capacity * sizeof *names);
    }
    names[name_count] = strdup(text);
    return name_count++;
}

uint32_t name_id(const char *text)
{
    pthread_mutex_lock(&lock);
    if (!name_count)
        name_add("");
    uint32_t id = 0;
    if (text && *text) {
        uint64_t key = hash(text);
        while ((id = (uint32_t)(uintptr_t)table_get(&name_ids, key)) && strcmp(names[id], text) != 0)
            key++;
        if (!id) {
            id = name_add(text);
            table_put(&name_ids, key, (void *)(uintptr_t)id);
        }
    }
    pthread_mutex_unlock(&lock);
    return id;
}

API uint32_t ghost_name_count(void)
{
    return name_count;
}

API const char *ghost_name(uint32_t id)
{
    return id < name_count ? names[id] : NULL;
}
