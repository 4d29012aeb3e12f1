/* Memory: device, pinned, registered and managed blocks; pools; copies and fills. */
#define _GNU_SOURCE
#include "ghost.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum block_kind { DEVICE_BLOCK, POOL_BLOCK, SHARED_BLOCK, PINNED_BLOCK, REGISTERED_BLOCK, MANAGED_BLOCK };

struct block {
    struct range range; /* first: a pointer to it is a pointer to the block */
    enum block_kind kind;
    int device;
    struct CUmemPoolHandle_st *pool;
};

/* A stream-ordered pool keeps up to `threshold` bytes for itself; its blocks are remapped freely, so what is
 * free in it serves any request. */
struct CUmemPoolHandle_st {
    int device;
    uint64_t used, used_peak, reserved, reserved_peak, threshold;
};
typedef struct CUmemPoolHandle_st *cudaMemPool_t;

static struct range *blocks; /* struct block */
static struct CUmemPoolHandle_st default_pools[MAX_DEVICES];
static cudaMemPool_t current_pools[MAX_DEVICES];
static uint64_t pinned, pinned_peak, managed, managed_peak;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t whole(uint64_t bytes)
{
    return (bytes + GRANULE - 1) & ~(GRANULE - 1);
}

static void add_block(uint64_t start, uint64_t bytes, enum block_kind kind, int device, cudaMemPool_t pool)
{
    struct block *block = calloc(1, sizeof *block);
    block->range.start = start;
    block->range.bytes = bytes;
    block->kind = kind;
    block->device = device;
    block->pool = pool;
    pthread_mutex_lock(&lock);
    range_insert(&blocks, &block->range);
    pthread_mutex_unlock(&lock);
}

/* Takes the block that starts at `pointer` out of the table; NULL if there is none. */
static struct block *remove_block(const void *pointer)
{
    pthread_mutex_lock(&lock);
    struct range *range = range_floor(blocks, (uint64_t)pointer);
    if (range && range->start == (uint64_t)pointer)
        range_remove(&blocks, range);
    else
        range = NULL;
    pthread_mutex_unlock(&lock);
    return (struct block *)range;
}

static void count_pinned(int64_t change)
{
    pthread_mutex_lock(&lock);
    pinned += change;
    if (pinned > pinned_peak)
        pinned_peak = pinned;
    pthread_mutex_unlock(&lock);
}

API uint64_t ghost_pinned_bytes(void)
{
    return pinned;
}

API uint64_t ghost_pinned_peak_bytes(void)
{
    return pinned_peak;
}

/* Managed memory lives on the host here: a real card would move parts of it in and out on demand. */
API uint64_t ghost_managed_bytes(void)
{
    return managed;
}

API uint64_t ghost_managed_peak_bytes(void)
{
    return managed_peak;
}

/* ---- device memory ---- */

static void trim_pool(cudaMemPool_t pool, uint64_t keep)
{
    pthread_mutex_lock(&lock);
    uint64_t target = pool->used > keep ? pool->used : keep;
    uint64_t freed = pool->reserved > target ? pool->reserved - target : 0;
    pool->reserved -= freed;
    pthread_mutex_unlock(&lock);
    if (freed)
        device_give(pool->device, freed);
}

static bool take_device(int device, uint64_t bytes)
{
    if (device_take(device, bytes))
        return true;
    trim_pool(&default_pools[device], 0);
    return device_take(device, bytes);
}

cudaError_t memory_allocate(void **pointer, size_t bytes, int device)
{
    *pointer = NULL;
    if (bytes == 0)
        return SUCCESS;
    if (bytes > (1ull << 46) || !take_device(device, whole(bytes)))
        return ERROR_OUT_OF_MEMORY;
    uint64_t address = space_take(bytes);
    if (!address) {
        device_give(device, whole(bytes));
        return ERROR_OUT_OF_MEMORY;
    }
    add_block(address, bytes, DEVICE_BLOCK, device, NULL);
    log_memory(RECORD_MALLOC, device, address, bytes);
    *pointer = (void *)address;
    return SUCCESS;
}

static void free_in_pool(struct block *block)
{
    cudaMemPool_t pool = block->pool;
    pthread_mutex_lock(&lock);
    pool->used -= whole(block->range.bytes);
    pthread_mutex_unlock(&lock);
    trim_pool(pool, pool->threshold);
}

static void free_device_block(struct block *block)
{
    values_forget(block->range.start, block->range.bytes);
    space_give(block->range.start, block->range.bytes);
    if (block->kind == POOL_BLOCK)
        free_in_pool(block);
    else if (block->kind == DEVICE_BLOCK)
        device_give(block->device, whole(block->range.bytes));
    if (block->kind != SHARED_BLOCK)
        log_memory(RECORD_FREE, block->device, block->range.start, block->range.bytes);
}

static void free_managed(struct block *block)
{
    munmap((void *)block->range.start, block->range.bytes);
    pthread_mutex_lock(&lock);
    managed -= block->range.bytes;
    pthread_mutex_unlock(&lock);
}

static void put_back(struct block *block)
{
    pthread_mutex_lock(&lock);
    range_insert(&blocks, &block->range);
    pthread_mutex_unlock(&lock);
}

cudaError_t memory_free(void *pointer)
{
    if (!pointer)
        return SUCCESS;
    struct block *block = remove_block(pointer);
    if (!block)
        return ERROR_INVALID_VALUE;
    if (block->kind == PINNED_BLOCK || block->kind == REGISTERED_BLOCK) {
        put_back(block);
        return ERROR_INVALID_VALUE;
    }
    if (block->kind == MANAGED_BLOCK)
        free_managed(block);
    else
        free_device_block(block);
    free(block);
    return SUCCESS;
}

/* The block that holds a pointer; `start` and `bytes` may be NULL. */
cudaError_t memory_range(uint64_t pointer, uint64_t *start, uint64_t *bytes, int *device)
{
    pthread_mutex_lock(&lock);
    const struct block *block = (struct block *)range_holding(blocks, pointer);
    if (block) {
        if (start)
            *start = block->range.start;
        if (bytes)
            *bytes = block->range.bytes;
        if (device)
            *device = block->device;
    }
    pthread_mutex_unlock(&lock);
    return block ? SUCCESS : ERROR_INVALID_VALUE;
}

API cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    device_use(current_device);
    return runtime_result(memory_allocate(pointer, bytes, current_device));
}

API cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height)
{
    *pitch = (width + 511) & ~(size_t)511;
    return cudaMalloc(pointer, *pitch * height);
}

API cudaError_t cudaFree(void *pointer)
{
    device_use(current_device);
    return runtime_result(memory_free(pointer));
}

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    cudaError_t result = device_use(current_device);
    *free_bytes = device_free_bytes(current_device);
    *total_bytes = config()->total_bytes;
    return runtime_result(result);
}

/* ---- stream-ordered pools ---- */

static cudaMemPool_t default_pool(int device)
{
    default_pools[device].device = device;
    return &default_pools[device];
}

static cudaMemPool_t current_pool(int device)
{
    return current_pools[device] ? current_pools[device] : default_pool(device);
}

/* Makes the pool large enough for `bytes` more. */
static bool grow_pool(cudaMemPool_t pool, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    uint64_t wanted = pool->used + bytes;
    uint64_t more = wanted > pool->reserved ? wanted - pool->reserved : 0;
    pthread_mutex_unlock(&lock);
    if (more && !device_take(pool->device, more))
        return false;
    pthread_mutex_lock(&lock);
    pool->reserved += more;
    pool->used += bytes;
    if (pool->reserved > pool->reserved_peak)
        pool->reserved_peak = pool->reserved;
    if (pool->used > pool->used_peak)
        pool->used_peak = pool->used;
    pthread_mutex_unlock(&lock);
    return true;
}

API cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream)
{
    *pointer = NULL;
    if (bytes == 0)
        return SUCCESS;
    uint64_t address = grow_pool(pool, whole(bytes)) ? space_take(bytes) : 0;
    if (!address)
        return runtime_result(ERROR_OUT_OF_MEMORY);
    add_block(address, bytes, POOL_BLOCK, pool->device, pool);
    log_memory(RECORD_MALLOC, pool->device, address, bytes);
    *pointer = (void *)address;
    return SUCCESS;
}

API cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream)
{
    int device = stream_of(stream)->device;
    device_use(device);
    return cudaMallocFromPoolAsync(pointer, bytes, current_pool(device), stream);
}

API cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    return runtime_result(memory_free(pointer));
}

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    *pool = default_pool(device);
    return SUCCESS;
}

API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device)
{
    *pool = current_pool(device);
    return SUCCESS;
}

API cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool)
{
    current_pools[device] = pool;
    return SUCCESS;
}

API cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const void *properties)
{
    const struct cudaMemLocation *location = (const void *)((const int *)properties + 2);
    *pool = calloc(1, sizeof **pool);
    (*pool)->device = location->type == 1 ? location->id : current_device;
    return SUCCESS;
}

API cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool)
{
    trim_pool(pool, 0);
    return SUCCESS; /* the structure stays for blocks that are freed later */
}

API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep_bytes)
{
    trim_pool(pool, keep_bytes);
    return SUCCESS;
}

enum { POOL_THRESHOLD = 4, POOL_RESERVED, POOL_RESERVED_PEAK, POOL_USED, POOL_USED_PEAK };

API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, int attribute, void *value)
{
    if (attribute == POOL_THRESHOLD)
        pool->threshold = *(uint64_t *)value;
    else if (attribute == POOL_RESERVED_PEAK)
        pool->reserved_peak = pool->reserved;
    else if (attribute == POOL_USED_PEAK)
        pool->used_peak = pool->used;
    return SUCCESS;
}

API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, int attribute, void *value)
{
    switch (attribute) {
    case POOL_THRESHOLD:
        *(uint64_t *)value = pool->threshold;
        break;
    case POOL_RESERVED:
        *(uint64_t *)value = pool->reserved;
        break;
    case POOL_RESERVED_PEAK:
        *(uint64_t *)value = pool->reserved_peak;
        break;
    case POOL_USED:
        *(uint64_t *)value = pool->used;
        break;
    case POOL_USED_PEAK:
        *(uint64_t *)value = pool->used_peak;
        break;
    default:
        *(int *)value = 1; /* the three reuse policies are on by default */
    }
    return SUCCESS;
}

API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct CUmemAccessDesc *access, size_t count)
{
    return SUCCESS;
}

API cudaError_t cudaMemPoolGetAccess(int *flags, cudaMemPool_t pool, struct cudaMemLocation *location)
{
    *flags = 3; /* read and write */
    return SUCCESS;
}

/* ---- host memory ---- */

static cudaError_t map_host(void **pointer, size_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    *pointer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (*pointer != MAP_FAILED)
        return SUCCESS;
    *pointer = NULL;
    return ERROR_OUT_OF_MEMORY;
}

/* Pinned memory: pages come when they are touched, the count is of what was asked for. */
cudaError_t memory_pin(void **pointer, size_t bytes)
{
    *pointer = NULL;
    if (bytes == 0)
        return SUCCESS;
    cudaError_t error = map_host(pointer, bytes);
    if (error)
        return error;
    add_block((uint64_t)*pointer, bytes, PINNED_BLOCK, current_device, NULL);
    count_pinned((int64_t)bytes);
    log_memory(RECORD_PINNED_ALLOC, current_device, (uint64_t)*pointer, bytes);
    return SUCCESS;
}

API cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    return runtime_result(memory_pin(pointer, bytes));
}

API cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    return runtime_result(memory_pin(pointer, bytes));
}

static cudaError_t unpin(void *pointer, enum block_kind kind)
{
    struct block *block = remove_block(pointer);
    if (block && block->kind != kind) {
        put_back(block);
        block = NULL;
    }
    if (!block)
        return kind == PINNED_BLOCK ? ERROR_INVALID_VALUE : ERROR_HOST_NOT_REGISTERED;
    log_memory(RECORD_PINNED_FREE, block->device, block->range.start, block->range.bytes);
    count_pinned(-(int64_t)block->range.bytes);
    if (kind == PINNED_BLOCK)
        munmap(pointer, block->range.bytes);
    free(block);
    return SUCCESS;
}

API cudaError_t cudaFreeHost(void *pointer)
{
    return runtime_result(pointer ? unpin(pointer, PINNED_BLOCK) : SUCCESS);
}

API cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags)
{
    uint64_t start = (uint64_t)pointer;
    if (!pointer || bytes == 0)
        return runtime_result(ERROR_INVALID_VALUE);
    pthread_mutex_lock(&lock);
    struct range *next = range_ceiling(blocks, start);
    bool taken = range_holding(blocks, start) || (next && next->start < start + bytes);
    pthread_mutex_unlock(&lock);
    if (taken)
        return runtime_result(ERROR_HOST_ALREADY_REGISTERED);
    add_block(start, bytes, REGISTERED_BLOCK, current_device, NULL);
    count_pinned((int64_t)bytes);
    log_memory(RECORD_PINNED_ALLOC, current_device, start, bytes);
    return SUCCESS;
}

API cudaError_t cudaHostUnregister(void *pointer)
{
    return runtime_result(unpin(pointer, REGISTERED_BLOCK));
}

API cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *pointer, unsigned flags)
{
    *device_pointer = pointer;
    return SUCCESS;
}

API cudaError_t cudaHostGetFlags(unsigned *flags, void *pointer)
{
    *flags = 0;
    return runtime_result(memory_range((uint64_t)pointer, NULL, NULL, NULL));
}

cudaError_t memory_manage(void **pointer, size_t bytes)
{
    cudaError_t error = map_host(pointer, bytes);
    if (error)
        return error;
    add_block((uint64_t)*pointer, bytes, MANAGED_BLOCK, current_device, NULL);
    pthread_mutex_lock(&lock);
    managed += bytes;
    if (managed > managed_peak)
        managed_peak = managed;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags)
{
    device_use(current_device);
    return runtime_result(memory_manage(pointer, bytes));
}

/* ---- what a pointer is ---- */

enum { TYPE_UNREGISTERED, TYPE_HOST, TYPE_DEVICE, TYPE_MANAGED };

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&lock);
    const struct block *block = (struct block *)range_holding(blocks, (uint64_t)pointer);
    struct block copy = block ? *block : (struct block){.device = -2};
    pthread_mutex_unlock(&lock);
    bool host = block && (copy.kind == PINNED_BLOCK || copy.kind == REGISTERED_BLOCK);
    attributes->device = copy.device;
    if (host || (block && copy.kind == MANAGED_BLOCK)) {
        attributes->type = host ? TYPE_HOST : TYPE_MANAGED;
        attributes->hostPointer = attributes->devicePointer = (void *)pointer;
    } else if (is_device_address(pointer)) {
        int mapped = block ? copy.device : vm_device((uint64_t)pointer);
        attributes->type = TYPE_DEVICE;
        attributes->device = mapped < 0 ? current_device : mapped;
        attributes->devicePointer = (void *)pointer;
    } else {
        attributes->type = TYPE_UNREGISTERED;
        attributes->hostPointer = (void *)pointer;
    }
    return SUCCESS;
}

/* ---- sharing with other processes: the same bytes are never counted twice ---- */

struct shared_handle {
    uint64_t address, bytes;
    int device, process;
};

API cudaError_t cudaIpcGetMemHandle(struct cudaIpcMemHandle *handle, void *pointer)
{
    struct shared_handle shared = {.process = getpid()};
    cudaError_t error = memory_range((uint64_t)pointer, &shared.address, &shared.bytes, &shared.device);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &shared, sizeof shared);
    return runtime_result(error);
}

API cudaError_t cudaIpcOpenMemHandle(void **pointer, struct cudaIpcMemHandle handle, unsigned flags)
{
    struct shared_handle shared;
    memcpy(&shared, &handle, sizeof shared);
    device_use(current_device);
    uint64_t address = space_take(shared.bytes);
    *pointer = (void *)address;
    if (!address)
        return runtime_result(ERROR_OUT_OF_MEMORY);
    add_block(address, shared.bytes, SHARED_BLOCK, shared.device, NULL);
    return SUCCESS;
}

API cudaError_t cudaIpcCloseMemHandle(void *pointer)
{
    return runtime_result(memory_free(pointer));
}

/* ---- copies ---- */

static enum record_kind copy_kind(const void *target, const void *source)
{
    if (is_device_address(target))
        return is_device_address(source) ? RECORD_COPY_D2D : RECORD_COPY_H2D;
    return is_device_address(source) ? RECORD_COPY_D2H : 0;
}

static cudaError_t copy(struct operation work, cudaStream_t stream)
{
    if (work.width == 0 || work.height == 0)
        return SUCCESS;
    work.action = DO_COPY;
    work.record.kind = copy_kind(work.target, work.source);
    work.record.bytes = work.width * work.height;
    work.record.address = (uint64_t)work.target;
    work.record.address2 = (uint64_t)work.source;
    if (work.record.kind)
        submit(stream, &work);
    else
        perform(&work); /* host to host: nothing for the card */
    return SUCCESS;
}

static cudaError_t copy_line(void *target, const void *source, size_t bytes, cudaStream_t stream)
{
    return copy((struct operation){.target = target, .source = source, .width = bytes, .height = 1}, stream);
}

/* A copy that the host waits for. */
static cudaError_t copy_and_wait(struct operation work, cudaStream_t stream)
{
    cudaError_t error = capture_check(stream_of(stream));
    if (error)
        return runtime_result(error);
    copy(work, stream);
    stream_wait(stream_of(stream));
    return SUCCESS;
}

API cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, int kind)
{
    struct operation work = {.target = target, .source = source, .width = bytes, .height = 1};
    return copy_and_wait(work, NULL);
}

API cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, int kind, cudaStream_t stream)
{
    return copy_line(target, source, bytes, stream);
}

static struct operation rectangle(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                                  size_t width, size_t height)
{
    return (struct operation){.target = target,
                              .source = source,
                              .width = width,
                              .height = height,
                              .target_pitch = target_pitch,
                              .source_pitch = source_pitch};
}

API cudaError_t cudaMemcpy2D(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                             size_t width, size_t height, int kind)
{
    return copy_and_wait(rectangle(target, target_pitch, source, source_pitch, width, height), NULL);
}

API cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                                  size_t width, size_t height, int kind, cudaStream_t stream)
{
    return copy(rectangle(target, target_pitch, source, source_pitch, width, height), stream);
}

API cudaError_t cudaMemcpy3DAsync(const struct cudaMemcpy3DParms *p, cudaStream_t stream)
{
    if (p->srcArray || p->dstArray)
        return runtime_result(ERROR_NOT_SUPPORTED);
    for (size_t z = 0; z < p->depth; z++) {
        const struct cudaPitchedPtr *from = &p->srcPtr, *to = &p->dstPtr;
        const char *source = (const char *)from->ptr + p->srcPos[0] +
                             from->pitch * (p->srcPos[1] + from->ysize * (p->srcPos[2] + z));
        char *target =
            (char *)to->ptr + p->dstPos[0] + to->pitch * (p->dstPos[1] + to->ysize * (p->dstPos[2] + z));
        copy(rectangle(target, to->pitch, source, from->pitch, p->width, p->height), stream);
    }
    return SUCCESS;
}

API cudaError_t cudaMemcpy3D(const struct cudaMemcpy3DParms *p)
{
    return cudaMemcpy3DAsync(p, NULL);
}

API cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device,
                                    size_t bytes, cudaStream_t stream)
{
    struct operation work = {.target = target, .source = source, .width = bytes, .height = 1};
    work.record.grid_x = target_device + 1; /* 0: not between devices */
    work.record.grid_y = source_device + 1;
    return copy(work, stream);
}

API cudaError_t cudaMemcpyPeer(void *target, int target_device, const void *source, int source_device, size_t bytes)
{
    return cudaMemcpyPeerAsync(target, target_device, source, source_device, bytes, NULL);
}

#if GHOST_CUDA == 12
API cudaError_t cudaMemcpyBatchAsync(void **targets, void **sources, size_t *sizes, size_t count, void *attributes,
                                     size_t *indices, size_t attribute_count, size_t *failed, cudaStream_t stream)
#else
API cudaError_t cudaMemcpyBatchAsync(void *const *targets, const void *const *sources, const size_t *sizes,
                                     size_t count, void *attributes, size_t *indices, size_t attribute_count,
                                     cudaStream_t stream)
#endif
{
    for (size_t i = 0; i < count; i++)
        copy_line(targets[i], sources[i], sizes[i], stream);
    return SUCCESS;
}

/* ---- fills ---- */

static cudaError_t fill(void *target, int value, size_t pitch, size_t width, size_t height, cudaStream_t stream)
{
    struct operation work = {.action = DO_FILL, .target = target, .value = value & 0xff, .value_bytes = 1};
    work.record = (struct ghost_record){
        .kind = RECORD_MEMSET, .bytes = width * height, .address = (uint64_t)target};
    work.width = width;
    work.height = height;
    work.target_pitch = pitch;
    if (width && height)
        submit(stream, &work);
    return SUCCESS;
}

API cudaError_t cudaMemset(void *target, int value, size_t bytes)
{
    return fill(target, value, 0, bytes, 1, NULL);
}

API cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream)
{
    return fill(target, value, 0, bytes, 1, stream);
}

API cudaError_t cudaMemset2D(void *target, size_t pitch, int value, size_t width, size_t height)
{
    return fill(target, value, pitch, width, height, NULL);
}

API cudaError_t cudaMemset2DAsync(void *target, size_t pitch, int value, size_t width, size_t height,
                                  cudaStream_t stream)
{
    return fill(target, value, pitch, width, height, stream);
}

/* ---- hints about where managed memory should be: taken note of by nobody ---- */

#if GHOST_CUDA == 12
API cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, int device, cudaStream_t stream)
{
    return SUCCESS;
}

API cudaError_t cudaMemAdvise(const void *pointer, size_t bytes, int advice, int device)
{
    return SUCCESS;
}
#else
API cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, struct cudaMemLocation location,
                                     unsigned flags, cudaStream_t stream)
{
    return SUCCESS;
}

API cudaError_t cudaMemAdvise(const void *pointer, size_t bytes, int advice, struct cudaMemLocation location)
{
    return SUCCESS;
}
#endif
