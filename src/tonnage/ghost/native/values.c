/* Values: which bytes of device memory are known, because a small copy or fill put them there.
 *
 * Known ranges hold their bytes; everything else on the device reads as zero, unless a guess was put there: bytes that
 * are read, but do not count as known.  Copies of more than VALUES_COPY_BYTES carry no values.  Kernels write nothing we
 * could see, so what was known of a block is forgotten when PyTorch's allocator hands it out anew (handout.c), or when
 * somebody calls ghost_forget or ghost_forget_values. */
#define _GNU_SOURCE
#include "ghost.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define KNOWN_LIMIT (512 * MIB) /* of host memory; what comes after is not remembered */
#define PAGE 4096ull

enum origin {
    WRITTEN,  /* by a copy, a fill or a collective of the program */
    FOLLOWED, /* computed by Python code of ours, from other values */
    GUESSED,  /* read as if known, but a kernel computed it */
};

struct value {
    struct range range; /* first: a pointer to it is a pointer to the value */
    bool zero;          /* all bytes are zero and none is kept */
    enum origin origin;
    unsigned char bytes[];
};

static struct range *known;  /* struct value */
static struct range *starts; /* where blocks begin, as far as ghost_forget told */
static uint64_t known_bytes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* `bytes` is NULL for zeros. */
static void remember(uint64_t address, const void *bytes, uint64_t size, enum origin origin)
{
    uint64_t kept = bytes ? size : 0;
    if (known_bytes + kept > KNOWN_LIMIT || size == 0)
        return;
    struct value *value = malloc(sizeof *value + kept);
    value->range.start = address;
    value->range.bytes = size;
    value->zero = !bytes;
    value->origin = origin;
    if (bytes)
        memcpy(value->bytes, bytes, size);
    range_insert(&known, &value->range);
    known_bytes += kept;
}

/* The bytes of a value from `offset` on, NULL for zeros. */
static const void *bytes_from(const struct value *value, uint64_t offset)
{
    return value->zero ? NULL : value->bytes + offset;
}

/* The first known range that overlaps [start, end). */
static struct value *overlapping(uint64_t start, uint64_t end)
{
    struct range *range = range_holding(known, start);
    if (!range)
        range = range_ceiling(known, start);
    return range && range->start < end ? (struct value *)range : NULL;
}

static void forget(uint64_t start, uint64_t end)
{
    struct value *value;
    while ((value = overlapping(start, end))) {
        uint64_t from = value->range.start, to = from + value->range.bytes;
        range_remove(&known, &value->range);
        known_bytes -= value->zero ? 0 : value->range.bytes;
        if (from < start)
            remember(from, bytes_from(value, 0), start - from, value->origin);
        if (to > end)
            remember(end, bytes_from(value, end - from), to - end, value->origin);
        free(value);
    }
}

/* One write lies in one block: block starts strictly inside it are out of date. */
static void written(uint64_t start, uint64_t end)
{
    struct range *inside;
    forget(start, end);
    while ((inside = range_ceiling(starts, start + 1)) && inside->start < end) {
        range_remove(&starts, inside);
        free(inside);
    }
}

/* `source` is NULL for zeros, of which any number is remembered. */
static void write_values(uint64_t target, const void *source, uint64_t bytes, enum origin origin)
{
    pthread_mutex_lock(&lock);
    written(target, target + bytes);
    if (!source || bytes <= VALUES_COPY_BYTES)
        remember(target, source, bytes, origin);
    pthread_mutex_unlock(&lock);
}

static void read_values(unsigned char *target, uint64_t source, uint64_t bytes)
{
    memset(target, 0, bytes);
    pthread_mutex_lock(&lock);
    uint64_t end = source + bytes;
    struct value *value = overlapping(source, end);
    while (value) {
        uint64_t from = value->range.start, to = from + value->range.bytes;
        uint64_t first = from > source ? from : source, last = to < end ? to : end;
        if (!value->zero)
            memcpy(target + (first - source), value->bytes + (first - from), last - first);
        struct range *next = range_ceiling(known, from + 1);
        value = next && next->start < end ? (struct value *)next : NULL;
    }
    pthread_mutex_unlock(&lock);
}

/* Device to device: what is known at the source becomes known at the target, the rest unknown. */
static void move_values(uint64_t target, uint64_t source, uint64_t bytes)
{
    struct piece {
        struct piece *next;
        uint64_t offset, bytes;
        bool zero;
        enum origin origin;
        unsigned char data[];
    } *pieces = NULL;

    pthread_mutex_lock(&lock);
    uint64_t end = source + bytes;
    struct value *value = bytes <= VALUES_COPY_BYTES ? overlapping(source, end) : NULL;
    while (value) {
        uint64_t from = value->range.start, to = from + value->range.bytes;
        uint64_t first = from > source ? from : source, last = to < end ? to : end;
        struct piece *piece = malloc(sizeof *piece + (value->zero ? 0 : last - first));
        *piece = (struct piece){pieces, first - source, last - first, value->zero, value->origin};
        if (!value->zero)
            memcpy(piece->data, value->bytes + (first - from), last - first);
        pieces = piece;
        struct range *next = range_ceiling(known, from + 1);
        value = next && next->start < end ? (struct value *)next : NULL;
    }
    written(target, target + bytes);
    while (pieces) {
        struct piece *piece = pieces;
        remember(target + piece->offset, piece->zero ? NULL : piece->data, piece->bytes, piece->origin);
        pieces = piece->next;
        free(piece);
    }
    pthread_mutex_unlock(&lock);
}

/* Calls `act` for runs of pages of host memory that are all touched, or all untouched.  Untouched anonymous memory
 * reads as zero and takes no memory.  A process may read which of its own pages are present. */
static void for_runs(unsigned char *memory, uint64_t bytes,
                     void (*act)(unsigned char *run, uint64_t bytes, bool untouched, void *other), void *other)
{
    static int pagemap = -2;
    if (pagemap == -2)
        pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    uint64_t entries[512];
    while (bytes) {
        uint64_t page = (uint64_t)memory / PAGE, offset = (uint64_t)memory % PAGE;
        uint64_t pages = (offset + bytes + PAGE - 1) / PAGE;
        if (pages > 512)
            pages = 512;
        ssize_t got = pagemap < 0 ? -1 : pread(pagemap, entries, pages * 8, (off_t)(page * 8));
        if (got != (ssize_t)(pages * 8))
            memset(entries, 0xff, sizeof entries);
        for (uint64_t first = 0, next; first < pages; first = next) {
            bool untouched = entries[first] >> 62 == 0;
            for (next = first + 1; next < pages && (entries[next] >> 62 == 0) == untouched;)
                next++;
            uint64_t size = (next - first) * PAGE - offset < bytes ? (next - first) * PAGE - offset : bytes;
            act(memory, size, untouched, other);
            memory += size;
            bytes -= size;
            offset = 0;
        }
    }
}

static void zero_run(unsigned char *run, uint64_t bytes, bool untouched, void *unused)
{
    (void)unused;
    if (!untouched)
        memset(run, 0, bytes);
}

static void zero_host(void *target, uint64_t bytes)
{
    for_runs(target, bytes, zero_run, NULL);
}

/* Memory of which a page never touched reads as zero: pages of a file are not present either before they are read,
 * but for files of techniques/disk.py, which begin empty. */
static bool begins_as_zero(const void *address)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    bool found = false;
    while (maps && !found && fgets(line, sizeof line, maps)) {
        unsigned long start, end, inode = 1;
        if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &start, &end, &inode) == 3)
            found = start <= (unsigned long)address && (unsigned long)address < end &&
                    (inode == 0 || strstr(line, "/tonnage-offload-"));
    }
    if (maps)
        fclose(maps);
    return found;
}

struct copied {
    unsigned char *source, *target;
};

static void copy_run(unsigned char *run, uint64_t bytes, bool untouched, void *other)
{
    struct copied *places = other;
    unsigned char *target = places->target + (run - places->source);
    if (untouched)
        zero_host(target, bytes);
    else
        memcpy(target, run, bytes);
}

/* A copy within the host that leaves untouched what was never touched. */
API void ghost_copy_host(void *target, void *source, uint64_t bytes)
{
    struct copied places = {source, target};
    if (begins_as_zero(source))
        for_runs(source, bytes, copy_run, &places);
    else
        memcpy(target, source, bytes);
}

static void note_nonzero(unsigned char *run, uint64_t bytes, bool untouched, void *found)
{
    bool *nonzero = found;
    if (!untouched && !*nonzero)
        *nonzero = run[0] != 0 || memcmp(run, run + 1, bytes - 1) != 0;
}

/* Whether all of this host memory reads as zero; what was never touched is not touched for it. */
API int ghost_reads_zero(void *memory, uint64_t bytes)
{
    bool nonzero = false;
    for_runs(memory, bytes < PAGE ? bytes : PAGE, note_nonzero, &nonzero); /* mostly decides */
    if (!nonzero && begins_as_zero(memory))
        for_runs(memory, bytes, note_nonzero, &nonzero);
    else
        nonzero = true;
    return !nonzero;
}

API void ghost_zero_host(void *target, uint64_t bytes)
{
    zero_host(target, bytes);
}

/* A copy between any two places, by the rule at the top of this file. */
void values_copy(void *target, const void *source, size_t bytes)
{
    if (is_device_address(target)) {
        if (is_device_address(source))
            move_values((uint64_t)target, (uint64_t)source, bytes);
        else
            write_values((uint64_t)target, source, bytes, WRITTEN);
    } else if (!is_device_address(source)) {
        memmove(target, source, bytes);
    } else if (bytes <= VALUES_COPY_BYTES) {
        read_values(target, (uint64_t)source, bytes);
    } else {
        zero_host(target, bytes);
    }
}

/* The same for Python code of ours, which must not be a copy of the program's: not logged, and also while a stream
 * captures a graph. */
API void ghost_copy_values(void *target, const void *source, uint64_t bytes)
{
    if (is_device_address(target) && !is_device_address(source))
        write_values((uint64_t)target, source, bytes, FOLLOWED);
    else
        values_copy(target, source, bytes);
}

static void fill_host(unsigned char *target, int value, int value_bytes, size_t bytes)
{
    if (value_bytes == 1) {
        memset(target, value, bytes);
        return;
    }
    for (size_t i = 0; i + value_bytes <= bytes; i += value_bytes)
        memcpy(target + i, &value, value_bytes);
}

void values_fill(void *target, int value, int value_bytes, size_t bytes)
{
    if (!is_device_address(target)) {
        fill_host(target, value, value_bytes, bytes);
    } else if (value == 0) {
        write_values((uint64_t)target, NULL, bytes, WRITTEN);
    } else if (bytes > VALUES_COPY_BYTES) {
        values_forget((uint64_t)target, bytes);
    } else {
        unsigned char *pattern = malloc(bytes);
        fill_host(pattern, value, value_bytes, bytes);
        write_values((uint64_t)target, pattern, bytes, WRITTEN);
        free(pattern);
    }
}

void values_forget(uint64_t address, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    written(address, address + bytes);
    pthread_mutex_unlock(&lock);
}

/* The block at `address` was handed out anew or freed: it reaches to the next block start we know of. */
API void ghost_forget(uint64_t address)
{
    pthread_mutex_lock(&lock);
    struct range *start = range_floor(starts, address);
    if (!start || start->start != address) {
        start = calloc(1, sizeof *start);
        start->start = address;
        range_insert(&starts, start);
    }
    struct range *next = range_ceiling(starts, address + 1);
    forget(address, next ? next->start : UINT64_MAX);
    pthread_mutex_unlock(&lock);
}

/* Forgets the values of a part of a block. */
API void ghost_forget_values(uint64_t address, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    forget(address, address + bytes);
    pthread_mutex_unlock(&lock);
}

/* Forgets what Python code of ours has computed for a part of a block, if a kernel has overwritten it since. */
API void ghost_forget_followed(uint64_t address, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    uint64_t from = address, end = address + bytes;
    struct value *value;
    while (from < end && (value = overlapping(from, end))) {
        uint64_t start = value->range.start > from ? value->range.start : from;
        uint64_t stop = value->range.start + value->range.bytes;
        if (value->origin == FOLLOWED)
            forget(start, stop < end ? stop : end);
        from = stop;
    }
    pthread_mutex_unlock(&lock);
}

/* Puts a guess where a kernel has computed: it is read like a value, and is none. */
API void ghost_guess(uint64_t target, const void *source, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    written(target, target + bytes);
    remember(target, source, bytes, GUESSED);
    pthread_mutex_unlock(&lock);
}

static bool covered(uint64_t address, uint64_t bytes, bool with_guesses)
{
    pthread_mutex_lock(&lock);
    uint64_t reached = address, end = address + bytes;
    struct range *range;
    while (reached < end && (range = range_holding(known, reached)) &&
           (with_guesses || ((struct value *)range)->origin != GUESSED))
        reached = range->start + range->bytes;
    pthread_mutex_unlock(&lock);
    return reached >= end;
}

/* Whether every byte of the range is known: copied or filled there, rather than left to a kernel. */
bool values_known(uint64_t address, uint64_t bytes)
{
    return covered(address, bytes, false);
}

API int ghost_known(uint64_t address, uint64_t bytes)
{
    return values_known(address, bytes);
}

/* The same, but for guesses too. */
API int ghost_readable(uint64_t address, uint64_t bytes)
{
    return covered(address, bytes, true);
}
