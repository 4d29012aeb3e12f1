/* Handing out: when PyTorch's allocator gives a block to a tensor or takes it back, what was known of its bytes is
 * forgotten.
 *
 * The blocks lie inside memory that we gave long before, so nothing of the CUDA interface tells us.  But the
 * allocator reports each of them to the profiler through a function that libc10.so exports (PyTorch 2.1 to 2.13);
 * being preloaded, ours is found first, forgets, and passes the call on.  It is C, so that it may run while a
 * Python exception is on its way, which a Python callback would lose. */
#define _GNU_SOURCE
#include "ghost.h"

#include <dlfcn.h>
#include <stdlib.h>

#define REPORT _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE
#define TEXT(name) #name
#define TEXT_OF(name) TEXT(name)

typedef void report_function(void *block, int64_t bytes, size_t allocated, size_t reserved, uint16_t device);

static bool heard;

/* c10::reportMemoryUsageToProfiler(void *, int64_t, size_t, size_t, c10::Device): `bytes` is negative when the block
 * comes back; a Device is two bytes in one register. */
API void REPORT(void *block, int64_t bytes, size_t allocated, size_t reserved, uint16_t device)
{
    static report_function *next;
    if (is_device_address(block)) {
        heard = true;
        values_forget((uint64_t)block, (uint64_t)llabs(bytes));
    }
    if (!__atomic_load_n(&next, __ATOMIC_ACQUIRE)) {
        void *c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
        void *found = c10 ? dlsym(c10, TEXT_OF(REPORT)) : NULL;
        if (!found)
            return;
        __atomic_store_n(&next, (report_function *)found, __ATOMIC_RELEASE);
    }
    next(block, bytes, allocated, reserved, device);
}

/* Whether PyTorch's allocator was heard: then nobody else needs to call ghost_forget. */
API int ghost_hears_allocator(void)
{
    return heard;
}
