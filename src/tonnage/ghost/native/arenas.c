/* Memory for Python's small objects in huge pages, which spares a process thousands of page faults. */
#include "ghost.h"

#include <sys/mman.h>

#define REGION (4 * GIB) /* addresses, not memory */

static char *next, *end;

/* PyObjectArenaAllocator.alloc: an arena of so many bytes, or NULL. */
API void *ghost_arena_take(void *context, size_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!next) {
        char *region = mmap(NULL, REGION, PROT_READ | PROT_WRITE, flags, -1, 0);
        next = end = region;
        if (region != MAP_FAILED && madvise(region, REGION, MADV_HUGEPAGE) == 0)
            end += REGION;
    }
    if (bytes <= (size_t)(end - next)) {
        next += bytes;
        return next - bytes;
    }
    void *arena = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return arena == MAP_FAILED ? NULL : arena;
}

/* PyObjectArenaAllocator.free, also of arenas that Python had before. */
API void ghost_arena_give(void *context, void *arena, size_t bytes)
{
    munmap(arena, bytes);
}
