/* Requests of torch's caching allocator, made one after the other without a Python call for each. */
#include "ghost.h"

#define LARGEST_SEGMENT (64 * MIB) /* more than the 20 MiB that the allocator takes for blocks of less than 10 */

enum request_kind { BEGIN_MARK, HAND_OUT, TAKE_BACK }; /* the first three of tonnage_inside/requested.py */

struct requests {
    const int64_t (*rows)[3]; /* kind; bytes and stream of a block to hand out, or which one to take back */
    uint64_t count, made;
    uint64_t *addresses; /* of the blocks that were handed out */
    uint64_t blocks;
};

struct allocator { /* torch's functions for C; each gives 0 unless it fails */
    int32_t (*hand_out)(uint64_t bytes, void **address);
    int32_t (*take_back)(void *address);
    int32_t (*enter_stream)(void *stream, int32_t device, void **guard);
    int32_t (*leave_stream)(void *guard);
};

/* What the card has left; asked anew only when something was taken of it or given back. */
static uint64_t room(size_t *told_at, uint64_t *told)
{
    size_t now = ghost_log_count();
    if (*told_at != now) {
        *told = device_free_bytes(current_device);
        *told_at = now;
    }
    return *told;
}

/* Hands out a block on a stream; 0 if that was done. */
static int handed_out(const struct allocator *torch, uint64_t bytes, void *stream, void **address)
{
    void *guard = NULL;
    int failed;
    if (!stream)
        return torch->hand_out(bytes, address);
    if (torch->enter_stream(stream, current_device, &guard))
        return 1;
    failed = torch->hand_out(bytes, address);
    torch->leave_stream(guard);
    return failed;
}

/* Makes requests until one is of another kind, or might not find room: torch's interface for C cannot say that memory
 * ran out.  A block may be rounded up to a power of two.  What the log tells of the card meanwhile carries the number
 * of the block it was for. */
API void ghost_make_requests(struct requests *r, const struct allocator *torch)
{
    size_t told_at = (size_t)-1;
    uint64_t told = 0;
    for (; r->made < r->count; r->made++) {
        int64_t kind = r->rows[r->made][0], first = r->rows[r->made][1], second = r->rows[r->made][2];
        void *address;
        __atomic_store_n(&ghost_current_mark, (uint32_t)r->blocks, __ATOMIC_RELAXED);
        if (kind == TAKE_BACK) {
            torch->take_back((void *)r->addresses[first]);
        } else if (kind == HAND_OUT) {
            uint64_t bytes = (uint64_t)first;
            if (room(&told_at, &told) < 2 * bytes + LARGEST_SEGMENT)
                return;
            if (handed_out(torch, bytes, (void *)(uintptr_t)second, &address))
                return;
            r->addresses[r->blocks++] = (uint64_t)address;
        } else if (kind != BEGIN_MARK) {
            return;
        }
    }
}
