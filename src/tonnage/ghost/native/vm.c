/* Virtual memory management of the driver: addresses are reserved, memory is created, then mapped. */
#include "ghost.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint64_t CUdeviceptr;
typedef struct memory *CUmemGenericAllocationHandle;

struct memory {
    int device;
    uint64_t bytes;
    int references; /* the handle and every mapping; the bytes go when none is left */
    bool imported;  /* another process pays for it */
    struct CUmemAllocationProp properties;
};

struct mapping {
    struct range range; /* first: a pointer to it is a pointer to the mapping */
    struct memory *memory;
};

static struct range *mappings; /* struct mapping */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void release(struct memory *memory)
{
    if (--memory->references > 0)
        return;
    if (!memory->imported)
        device_give(memory->device, memory->bytes);
    free(memory);
}

int vm_device(uint64_t address)
{
    pthread_mutex_lock(&lock);
    const struct mapping *mapping = (struct mapping *)range_holding(mappings, address);
    int device = mapping ? mapping->memory->device : -1;
    pthread_mutex_unlock(&lock);
    return device;
}

API CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr wish,
                                 unsigned long long flags)
{
    *pointer = space_reserve(bytes, alignment > 32 * MIB ? alignment : 32 * MIB);
    return *pointer ? SUCCESS : ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes)
{
    space_give(pointer, bytes);
    return SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                         const struct CUmemAllocationProp *properties, unsigned long long flags)
{
    bool on_device = properties->location.type == 1;
    int device = on_device ? properties->location.id : current_device;
    *handle = NULL;
    if (device < 0 || device >= device_count() || bytes % GRANULE)
        return ERROR_INVALID_VALUE;
    if (on_device && !device_take(device, bytes))
        return ERROR_OUT_OF_MEMORY;
    struct memory *memory = calloc(1, sizeof *memory);
    *memory = (struct memory){device, bytes, 1, !on_device, *properties};
    *handle = memory;
    return SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    pthread_mutex_lock(&lock);
    release(handle);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    struct mapping *mapping = calloc(1, sizeof *mapping);
    mapping->range.start = pointer;
    mapping->range.bytes = bytes;
    mapping->memory = handle;
    pthread_mutex_lock(&lock);
    handle->references++;
    range_insert(&mappings, &mapping->range);
    pthread_mutex_unlock(&lock);
    log_memory(RECORD_VM_MAP, handle->device, pointer, bytes);
    return SUCCESS;
}

/* Unmaps every mapping that starts in the range, as the driver asks for whole mappings. */
API CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
    int device = vm_device(pointer);
    struct range *range;
    pthread_mutex_lock(&lock);
    while ((range = range_ceiling(mappings, pointer)) && range->start < pointer + bytes) {
        struct mapping *mapping = (struct mapping *)range;
        range_remove(&mappings, range);
        release(mapping->memory);
        free(mapping);
    }
    pthread_mutex_unlock(&lock);
    if (device < 0)
        return ERROR_INVALID_VALUE;
    values_forget(pointer, bytes);
    log_memory(RECORD_VM_UNMAP, device, pointer, bytes);
    return SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const struct CUmemAccessDesc *access, size_t count)
{
    return SUCCESS;
}

API CUresult cuMemGetAccess(unsigned long long *flags, const struct cudaMemLocation *location, CUdeviceptr pointer)
{
    *flags = vm_device(pointer) < 0 ? 0 : 3;
    return SUCCESS;
}

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const struct CUmemAllocationProp *properties, int option)
{
    *bytes = GRANULE;
    return SUCCESS;
}

API CUresult cuMemGetAllocationPropertiesFromHandle(struct CUmemAllocationProp *properties,
                                                    CUmemGenericAllocationHandle handle)
{
    *properties = handle->properties;
    return SUCCESS;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *pointer)
{
    pthread_mutex_lock(&lock);
    const struct mapping *mapping = (struct mapping *)range_holding(mappings, (uint64_t)pointer);
    *handle = mapping ? mapping->memory : NULL;
    if (*handle)
        (*handle)->references++;
    pthread_mutex_unlock(&lock);
    return *handle ? SUCCESS : ERROR_INVALID_VALUE;
}

/* A shareable handle is a file that says what the memory is; POSIX file descriptors are type 1, fabric
 * handles (8) are memory of the caller. */
struct shared_memory {
    uint64_t bytes;
    struct CUmemAllocationProp properties;
};

API CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                          unsigned long long flags)
{
    struct shared_memory shared = {handle->bytes, handle->properties};
    if (type != 1)
        return ERROR_NOT_SUPPORTED;
    int file = (int)syscall(SYS_memfd_create, "ghost", 1u);
    if (file < 0 || pwrite(file, &shared, sizeof shared, 0) != sizeof shared)
        return ERROR_NOT_SUPPORTED;
    *(int *)shareable = file;
    return SUCCESS;
}

API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, int type)
{
    struct shared_memory shared;
    if (type != 1 || pread((int)(intptr_t)os_handle, &shared, sizeof shared, 0) != sizeof shared)
        return ERROR_INVALID_VALUE;
    struct memory *memory = calloc(1, sizeof *memory);
    *memory = (struct memory){shared.properties.location.id, shared.bytes, 1, true, shared.properties};
    *handle = memory;
    return SUCCESS;
}
