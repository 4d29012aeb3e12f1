/* Device addresses: one inaccessible reservation of the process's address space, so that a device pointer
 * equals no host pointer and reading it on the host faults as it does with a real card.
 *
 * Where a block lies matters: before torch 2.12 the caching allocator takes, of free blocks of one size, the
 * one with the lowest address.  Blocks are therefore placed as the driver places them.  The rules were read off
 * the answers of driver 580 to 225 requests (measurements/h200-addresses.jsonl; the tests replay them):
 *   - Address space is taken in chunks, multiples of 32 MiB, downwards: each new one ends where the lowest
 *     begins, or at the upper end of the highest gap that is larger than the chunk.
 *   - A block lies at the start of its chunk; what is left behind it serves later requests.  The newest chunk
 *     with a large enough hole is asked first, and gives the smallest hole that fits.
 *   - A chunk without blocks becomes a gap, or part of what lies below all chunks.
 *   - The context leaves two holes of its own: 2 MiB, and one of 22 to 30 MiB (24 here).
 * Reserved ranges (expandable segments) grow upwards from the other end of the space. */
#define _GNU_SOURCE
#include "ghost.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE (2 * MIB)
#define CHUNK (32 * MIB)
#define CONTEXT_HOLE (24 * MIB)
#define SPACE_BYTES (1ull << 45)
#define END_OF_PROCESS (1ull << 47) /* x86-64 places nothing above unless asked to, and most of them cannot */

struct hole {
    uint64_t start, bytes;
};

struct holes { /* sorted by address, none touching another */
    struct hole *items;
    size_t count, capacity;
};

struct chunk {
    struct chunk *older;
    uint64_t start, bytes;
    struct holes holes;
    size_t blocks;
};

static uint64_t base, limit;   /* of all device addresses; 0 before the first use */
static uint64_t next_reserved; /* everything from here to `lowest` was never handed out */
static uint64_t lowest;        /* start of the lowest chunk */
static struct chunk *newest;
static uint64_t above_holes;   /* more bytes than any hole of a chunk has */
static struct holes gaps;     /* between chunks */
static struct holes returned; /* of reserved ranges */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t whole(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

static void holes_remove(struct holes *holes, size_t place)
{
    memmove(&holes->items[place], &holes->items[place + 1], (holes->count - place - 1) * sizeof(struct hole));
    holes->count--;
}

/* Adds a range, joined with the holes it touches, and tells how large the hole is then. */
static uint64_t holes_add(struct holes *holes, uint64_t start, uint64_t bytes)
{
    size_t place = 0;
    while (place < holes->count && holes->items[place].start < start)
        place++;
    if (place < holes->count && start + bytes == holes->items[place].start) {
        bytes += holes->items[place].bytes;
        holes_remove(holes, place);
    }
    if (place && holes->items[place - 1].start + holes->items[place - 1].bytes == start) {
        holes->items[place - 1].bytes += bytes;
        return holes->items[place - 1].bytes;
    }
    if (holes->count == holes->capacity) {
        holes->capacity = holes->capacity ? 2 * holes->capacity : 4;
        holes->items = realloc(holes->items, holes->capacity * sizeof(struct hole));
    }
    memmove(&holes->items[place + 1], &holes->items[place], (holes->count - place) * sizeof(struct hole));
    holes->items[place] = (struct hole){start, bytes};
    holes->count++;
    return bytes;
}

/* Takes `bytes` from the start of a hole. */
static uint64_t holes_take(struct holes *holes, size_t place, uint64_t bytes)
{
    struct hole *hole = &holes->items[place];
    uint64_t start = hole->start;
    hole->start += bytes;
    hole->bytes -= bytes;
    if (!hole->bytes)
        holes_remove(holes, place);
    return start;
}

/* ---- chunks ------------------------------------------------------------------------------------- */

/* Room for a chunk: the upper end of the highest gap that is larger, else right below the lowest chunk. */
static uint64_t take_room(uint64_t bytes)
{
    for (size_t place = gaps.count; place-- > 0;)
        if (gaps.items[place].bytes > bytes) {
            gaps.items[place].bytes -= bytes;
            return gaps.items[place].start + gaps.items[place].bytes;
        }
    if (lowest - next_reserved < bytes)
        return 0;
    lowest -= bytes;
    return lowest;
}

static struct chunk *new_chunk(uint64_t bytes)
{
    uint64_t start = take_room(bytes);
    if (!start)
        return NULL;
    struct chunk *chunk = calloc(1, sizeof *chunk);
    *chunk = (struct chunk){.older = newest, .start = start, .bytes = bytes};
    newest = chunk;
    return chunk;
}

static void add_hole(struct chunk *chunk, uint64_t start, uint64_t bytes)
{
    uint64_t joined = holes_add(&chunk->holes, start, bytes);
    if (joined >= above_holes)
        above_holes = joined + 1;
}

/* What the context leaves of its own chunks, which live as long as the process. */
static void place_context(void)
{
    const uint64_t left[] = {CONTEXT_HOLE, PAGE};
    for (size_t i = 0; i < sizeof left / sizeof *left; i++) {
        struct chunk *chunk = new_chunk(CHUNK);
        if (!chunk)
            return;
        chunk->blocks = 1;
        add_hole(chunk, chunk->start + CHUNK - left[i], left[i]);
    }
}

/* 32 TiB.  Where the process may not reserve them (`ulimit -v`), the first beyond all that a process can have: no
 * host pointer is there either, and reading faults as well. */
static void reserve(void)
{
    void *space = mmap(NULL, SPACE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uint64_t start = space == MAP_FAILED ? END_OF_PROCESS : (uint64_t)space;
    next_reserved = whole(start, CHUNK);
    limit = start + SPACE_BYTES;
    lowest = limit / CHUNK * CHUNK;
    place_context();
    __atomic_store_n(&base, start, __ATOMIC_RELEASE);
}

bool is_device_address(const void *pointer)
{
    uint64_t address = (uint64_t)pointer, start = __atomic_load_n(&base, __ATOMIC_ACQUIRE);
    return start && address >= start && address < limit;
}

/* The smallest hole of the newest chunk that has one large enough.  Where none has, that is known the next time. */
static uint64_t take_hole(uint64_t bytes)
{
    if (bytes >= above_holes)
        return 0;
    for (struct chunk *chunk = newest; chunk; chunk = chunk->older) {
        size_t best = chunk->holes.count;
        for (size_t place = 0; place < chunk->holes.count; place++) {
            uint64_t size = chunk->holes.items[place].bytes;
            if (size >= bytes && (best == chunk->holes.count || size < chunk->holes.items[best].bytes))
                best = place;
        }
        if (best < chunk->holes.count) {
            chunk->blocks++;
            return holes_take(&chunk->holes, best, bytes);
        }
    }
    above_holes = bytes;
    return 0;
}

uint64_t space_take(uint64_t bytes)
{
    bytes = whole(bytes, PAGE);
    pthread_mutex_lock(&lock);
    if (!base)
        reserve();
    uint64_t address = base ? take_hole(bytes) : 0;
    struct chunk *chunk = base && !address ? new_chunk(whole(bytes, CHUNK)) : NULL;
    if (chunk) {
        chunk->blocks = 1;
        address = chunk->start;
        if (bytes < chunk->bytes)
            add_hole(chunk, address + bytes, chunk->bytes - bytes);
    }
    pthread_mutex_unlock(&lock);
    return address;
}

static void drop(struct chunk *chunk)
{
    holes_add(&gaps, chunk->start, chunk->bytes);
    if (gaps.items[0].start == lowest) {
        lowest += gaps.items[0].bytes;
        holes_remove(&gaps, 0);
    }
    free(chunk->holes.items);
    free(chunk);
}

static void give_block(uint64_t address, uint64_t bytes)
{
    for (struct chunk **link = &newest; *link; link = &(*link)->older) {
        struct chunk *chunk = *link;
        if (address < chunk->start || address >= chunk->start + chunk->bytes)
            continue;
        add_hole(chunk, address, bytes);
        if (--chunk->blocks == 0) {
            *link = chunk->older;
            drop(chunk);
        }
        return;
    }
}

/* ---- reserved ranges ---------------------------------------------------------------------------- */

/* Takes a range from a returned one, or 0 where none that is aligned is as large; what lies before it stays. */
static uint64_t take_aligned(size_t place, uint64_t bytes, uint64_t alignment)
{
    const struct hole hole = returned.items[place];
    uint64_t before = whole(hole.start, alignment) - hole.start;
    if (before + bytes > hole.bytes)
        return 0;
    uint64_t start = holes_take(&returned, place, before + bytes);
    if (before)
        holes_add(&returned, start, before);
    return start + before;
}

uint64_t space_reserve(uint64_t bytes, uint64_t alignment)
{
    bytes = whole(bytes, PAGE);
    uint64_t address = 0;
    pthread_mutex_lock(&lock);
    if (!base)
        reserve();
    for (size_t place = 0; place < returned.count && !address; place++)
        address = take_aligned(place, bytes, alignment);
    if (!address && base) {
        uint64_t aligned = whole(next_reserved, alignment);
        if (aligned < lowest && lowest - aligned >= bytes) {
            if (aligned > next_reserved)
                holes_add(&returned, next_reserved, aligned - next_reserved);
            address = aligned;
            next_reserved = aligned + bytes;
        }
    }
    pthread_mutex_unlock(&lock);
    return address;
}

void space_give(uint64_t address, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    if (address >= lowest)
        give_block(address, whole(bytes, PAGE));
    else
        holes_add(&returned, address, whole(bytes, PAGE));
    pthread_mutex_unlock(&lock);
}
