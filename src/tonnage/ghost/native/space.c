/* Device addresses: one inaccessible reservation of the process's address space, so that a device pointer
 * equals no host pointer and reading it on the host faults as it does with a real card. */
#define _GNU_SOURCE
#include "ghost.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE (2 * MIB)
#define ALIGNMENT (32 * MIB) /* of the first address */

static uint64_t base, limit; /* of the reservation; 0 before the first use */
static uint64_t next;        /* everything from here to the limit was never handed out */
static struct range *given_back;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* 32 TiB, or as much as an address space limit leaves. */
static void reserve(void)
{
    for (uint64_t bytes = 1ull << 45; bytes >= GIB && !base; bytes /= 2) {
        void *space = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space != MAP_FAILED) {
            next = ((uint64_t)space + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
            limit = (uint64_t)space + bytes;
            __atomic_store_n(&base, (uint64_t)space, __ATOMIC_RELEASE);
        }
    }
}

bool is_device_address(const void *pointer)
{
    uint64_t address = (uint64_t)pointer, start = __atomic_load_n(&base, __ATOMIC_ACQUIRE);
    return start && address >= start && address < limit;
}

/* First fit, lowest address first, among the ranges given back. */
static uint64_t take_again(uint64_t bytes, uint64_t alignment)
{
    struct range *range = range_ceiling(given_back, 0);
    for (; range; range = range_ceiling(given_back, range->start + 1)) {
        uint64_t skipped = -range->start & (alignment - 1);
        if (skipped == 0 && range->bytes >= bytes)
            break;
    }
    if (!range)
        return 0;
    uint64_t address = range->start;
    range_remove(&given_back, range);
    range->start += bytes;
    range->bytes -= bytes;
    if (range->bytes)
        range_insert(&given_back, range);
    else
        free(range);
    return address;
}

static void give_locked(uint64_t address, uint64_t bytes)
{
    struct range *before = range_floor(given_back, address);
    struct range *after = range_ceiling(given_back, address);
    if (after && after->start == address + bytes) {
        range_remove(&given_back, after);
        bytes += after->bytes;
        free(after);
    }
    if (before && before->start + before->bytes == address) {
        before->bytes += bytes;
        return;
    }
    struct range *range = calloc(1, sizeof *range);
    range->start = address;
    range->bytes = bytes;
    range_insert(&given_back, range);
}

static uint64_t whole_pages(uint64_t bytes)
{
    return (bytes + PAGE - 1) & ~(PAGE - 1);
}

uint64_t space_take(uint64_t bytes, uint64_t alignment)
{
    bytes = whole_pages(bytes);
    pthread_mutex_lock(&lock);
    if (!base)
        reserve();
    uint64_t address = take_again(bytes, alignment);
    if (!address && base) {
        uint64_t aligned = (next + alignment - 1) & ~(alignment - 1);
        if (aligned < limit && limit - aligned >= bytes) {
            if (aligned > next)
                give_locked(next, aligned - next);
            address = aligned;
            next = aligned + bytes;
        }
    }
    pthread_mutex_unlock(&lock);
    return address;
}

void space_give(uint64_t address, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    give_locked(address, whole_pages(bytes));
    pthread_mutex_unlock(&lock);
}
