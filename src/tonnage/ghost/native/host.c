/* Large memory of the host: addresses whose pages are allocated when they are touched.
 *
 * Tensors that are offloaded to the host hold values that no kernel computed, and are never touched (values.c).
 * Linux refuses a single request for more memory than the machine has, unless nothing has to be reserved;
 * torch's allocator calls posix_memalign, which reserves. */
#define _GNU_SOURCE
#include "ghost.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#define LARGE (256 * MIB)
#define PAGE 4096ull

static struct range *blocks;
static uint64_t count; /* of blocks; read without the lock: who frees one of them knows of it */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *next_function(const char *name)
{
    static __thread bool asking; /* looking a name up may free what it needed for that */
    if (asking)
        return NULL;
    asking = true;
    void *function = dlsym(RTLD_NEXT, name);
    asking = false;
    return function;
}

static void note(struct range *block)
{
    pthread_mutex_lock(&lock);
    range_insert(&blocks, block);
    count++;
    pthread_mutex_unlock(&lock);
}

static struct range *taken(uint64_t address)
{
    pthread_mutex_lock(&lock);
    struct range *block = range_holding(blocks, address);
    if (block && block->start == address) {
        range_remove(&blocks, block);
        count--;
    } else {
        block = NULL;
    }
    pthread_mutex_unlock(&lock);
    return block;
}

API int posix_memalign(void **pointer, size_t alignment, size_t bytes)
{
    static int (*next)(void **, size_t, size_t);
    if (bytes < LARGE || alignment > PAGE) {
        if (!next)
            next = next_function("posix_memalign");
        return next ? next(pointer, alignment, bytes) : ENOMEM;
    }
    struct range *block = calloc(1, sizeof *block);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = block ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) : MAP_FAILED;
    if (memory == MAP_FAILED) {
        free(block);
        return ENOMEM;
    }
    block->start = (uint64_t)memory;
    block->bytes = bytes;
    note(block);
    *pointer = memory;
    return 0;
}

API void free(void *pointer)
{
    static void (*next)(void *);
    uint64_t address = (uint64_t)pointer;
    struct range *block = count && address && address % PAGE == 0 ? taken(address) : NULL;
    if (block) {
        munmap(pointer, block->bytes);
        pointer = block;
    }
    if (!next)
        next = next_function("free");
    if (next)
        next(pointer);
}

/* What is large stays so, also if little of it is left. */
static void *moved(struct range *block, size_t bytes)
{
    void *memory = mremap((void *)block->start, block->bytes, bytes, MREMAP_MAYMOVE);
    if (memory != MAP_FAILED) {
        block->start = (uint64_t)memory;
        block->bytes = bytes;
    }
    note(block);
    return memory == MAP_FAILED ? NULL : memory;
}

API void *realloc(void *pointer, size_t bytes)
{
    static void *(*next)(void *, size_t);
    uint64_t address = (uint64_t)pointer;
    struct range *block = count && bytes && address && address % PAGE == 0 ? taken(address) : NULL;
    if (block)
        return moved(block, bytes);
    if (!next)
        next = next_function("realloc");
    return next ? next(pointer, bytes) : NULL;
}
